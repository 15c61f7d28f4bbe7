"""A run's record: its form, its tables and its plots."""
