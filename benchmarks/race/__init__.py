"""The benchmark against other runtimes: who takes part, in what, and how it is run."""
