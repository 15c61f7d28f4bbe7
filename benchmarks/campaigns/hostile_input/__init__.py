"""Hostile input: thousands of untrusted files and arguments, made from a seed and opened by every call and command.

inputs      makers of hostile bundles, graphs, checkpoints and command lines
values      hostile numbers, texts and trees; mutations of JSON
originals   good bundles and checkpoints that the inputs are made from
doors       library calls and commands that open an input
gates       counts how far each case comes
sandbox     the folder of a case, its secrets, and checks that nothing else was read or changed
case_worker runs cases in a process of its own
campaign    watches the workers' time, memory and crashes, and sums up
"""
