"""The project itself: README, imports, lock, wheel, benchmark and interop."""
