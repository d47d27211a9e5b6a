"""Benchmarks: one script per claim, results as JSON beside the plots drawn from them."""
