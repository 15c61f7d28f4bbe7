"""What every room needs: errors, documents, the terminal, timing and memory."""
