"""The machine: what it is, what it can do at best, and where a step's time goes."""
