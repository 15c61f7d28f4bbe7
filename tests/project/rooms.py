"""The rooms of each package in order. A room may import the rooms before it, but no room after it."""

ROOMS = {
    "exporter": (
        *("common", "spec", "costs", "model", "bundle", "placing", "graph", "steppers"),
        *("measuring", "checkpoint", "validation", "export", "commands"),
    ),
    "engines": ("library", "network", "building", "interpreter", "running", "comparison", "commands"),
    "runtime": (
        *("turns", "policy", "inputs", "device_io", "launching", "state", "backends"),
        *("session", "text", "doctor", "commands"),
    ),
    "benchmarks": ("machine", "peers", "contenders", "own", "race", "output", "campaigns"),
}
