"""Decisions about numbers alone: memory, free cache rows, which rows run together. No buffer and no backend is used here."""
