"""Puts files and folders in place whole or not at all, and takes turns with other runs."""
