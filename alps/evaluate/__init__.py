"""What a model is worth on a task: held-out loss, exact answers, general text; each with n and standard error."""
