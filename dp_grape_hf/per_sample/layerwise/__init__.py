"""The fast engine: one forward and one backward pass, with a rule for each type of layer."""
