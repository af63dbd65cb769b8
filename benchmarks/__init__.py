"""Benchmarks: speed and memory of the lens, how they grow, and how accurate it is."""
