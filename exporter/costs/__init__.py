"""The costs of a model: parameters, bytes, FLOPs, and the time of one step at a machine's limits."""
