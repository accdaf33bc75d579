"""Rows become messages, messages text, text tokens with a loss mask, tokens batches."""
