"""The subcommands of `python -m engines`."""
