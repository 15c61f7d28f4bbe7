"""The eager definition in plain PyTorch, and the weights that fill it. Read `block.py` first."""
