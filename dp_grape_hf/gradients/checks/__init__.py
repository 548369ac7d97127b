"""What is examined before the first release, and watched afterwards."""
