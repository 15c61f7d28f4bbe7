"""Makers of hostile inputs. Each copies a good original and changes it at random, from a seed."""
