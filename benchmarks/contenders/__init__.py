"""The contenders, one module each. `worker` runs each in a process of its own, in the environment that it needs.

A module has a class `Contender`, which takes tokens and returns logits; `interface` defines its methods. The list of
contenders is in benchmarks/race/lineup.py.
"""
