"""How much of the gradients is left in few input directions."""
