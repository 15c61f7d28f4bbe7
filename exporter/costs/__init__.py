"""What a model costs: parameters, bytes, FLOPs, and the time of one step at a machine's limits."""
