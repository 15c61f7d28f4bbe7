"""Measurements of the machine: its description, its limits, commands' time and memory, and the profile of a step."""
