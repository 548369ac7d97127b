"""What is shown outside the repository: the pages as a static site, and the packages for PyPI."""
