"""What is compared: one module a contender, each run by `worker` in a process of its own, in the environment it needs.

A module has a class `Contender`, which takes tokens and gives logits; `interface` says how. `lineup` lists who takes part.
"""
