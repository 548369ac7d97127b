"""Three notebooks that teach private training, run from end to end."""
