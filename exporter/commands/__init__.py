"""The subcommands of `python -m exporter`."""
