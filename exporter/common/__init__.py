"""Modules that every room uses: errors, JSON documents, the terminal, timing and memory."""
