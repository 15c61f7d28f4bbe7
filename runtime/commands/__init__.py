"""The subcommands of `python -m runtime`, one module each, and their parser."""
