"""From a checked network to an engine file and its record."""
