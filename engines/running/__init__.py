"""Runs engines: chooses one, keeps its cache in device memory, replays CUDA graphs, joins several engines."""
