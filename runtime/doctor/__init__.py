"""Examines this machine and what is installed on it."""
