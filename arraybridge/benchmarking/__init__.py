"""Benchmarks: `benchmark` times a call, `compare` the same call on CPU and GPU, at one size or at several."""

from arraybridge.benchmarking.compare import compare as compare
from arraybridge.benchmarking.reports import Comparison as Comparison
from arraybridge.benchmarking.reports import SizeComparison as SizeComparison
from arraybridge.benchmarking.timing import Timing as Timing
from arraybridge.benchmarking.timing import benchmark as benchmark
