"""Measurements of this project alone. Each module is a command that writes a record."""
