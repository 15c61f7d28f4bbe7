"""Long runs of faults that are made on purpose; each writes what it saw to benchmarks/records/."""
