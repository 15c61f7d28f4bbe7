"""Decisions from numbers alone: memory, free cache rows, rows that run together. It uses no buffer and no backend."""
