"""Fine-tuning: loss, optimizer, schedule, and the Lightning loop around them."""
