"""What a GPU measures: gradients, memory, time."""
