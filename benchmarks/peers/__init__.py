"""What people would use instead: each peer in a virtual environment of its own, driven by a script that runs there."""
