"""Benchmarks; `make bench` runs all of them."""
