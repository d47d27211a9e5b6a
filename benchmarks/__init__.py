"""Benchmarks: one script per claim, with results as JSON files and plots."""
