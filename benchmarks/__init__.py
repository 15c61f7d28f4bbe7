"""Measurements: run by hand or by `make bench`, recorded under benchmarks/records, never asserted by a timed test."""
