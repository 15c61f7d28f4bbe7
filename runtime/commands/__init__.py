"""The subcommands of `python -m runtime`."""
