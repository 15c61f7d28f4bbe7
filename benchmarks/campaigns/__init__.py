"""Long campaigns, run by hand and recorded in benchmarks/records. The tests run small, seeded versions of them."""
