"""Experiments, a folder for each subject; README.md says which is where."""
