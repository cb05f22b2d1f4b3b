"""Benchmarks: ratios of two sides measured side by side in one run; `make bench` prints them as one table."""
