"""Makers of hostile inputs: each copies a good original into a folder and changes it at random from a seed."""
