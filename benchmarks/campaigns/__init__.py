"""Long campaigns that are run by hand and recorded; the suite runs the same code small and seeded."""
