"""Validation: runs the same steps through two steppers and compares the results under measured tolerances."""
