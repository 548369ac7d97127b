"""Build the static site of the pages, and the distributions for PyPI."""
