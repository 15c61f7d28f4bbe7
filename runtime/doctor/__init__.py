"""Examines this machine and this installation."""
