"""Long campaigns that are run by hand and recorded in benchmarks/records/; the suite runs the same code small and seeded."""
