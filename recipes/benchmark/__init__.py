"""The time of one private step next to its alternatives."""
