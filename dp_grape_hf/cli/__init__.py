"""The door: the command ``dp-grape``, and one module for each of its subcommands."""
