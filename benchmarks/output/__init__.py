"""The record of a run: its form, its tables and its plots."""
