"""Puts files and folders in place completely or not at all, and waits for other runs that change the same folder."""
