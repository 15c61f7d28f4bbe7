"""Which sequence has which cache row, what runs together, and what fits. No buffer, no backend."""
