"""Other runtimes (peers), each in a virtual environment of its own, and the scripts that run in those environments."""
