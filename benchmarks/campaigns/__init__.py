"""Long seeded campaigns: run by hand at full size and recorded, the same code small in the tests."""
