"""Benchmarks: ``python -m bench <suite>|all``. Every case is checked against float64 before it is timed."""
