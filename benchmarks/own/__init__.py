"""Measurements of this project alone, each a command that writes its record."""
