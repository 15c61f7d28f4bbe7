"""Measurements, run by hand or by `make bench`. Their records are in benchmarks/records; no test asserts a time."""
