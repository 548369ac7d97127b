"""The loss of one example: by the head of its model, or by a Trainer's own ``compute_loss``."""
