"""The notebooks of recipes/tutorial, run from end to end."""
