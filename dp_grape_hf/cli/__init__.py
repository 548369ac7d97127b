"""The command ``dp-grape``, with one module for each of its subcommands."""
