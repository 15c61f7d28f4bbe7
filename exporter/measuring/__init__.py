"""Measures what happens inside a graph: its named values, and the agreement of its tokens."""
