"""Benchmarks: `benchmark` times a call; `compare` times it on the CPU and the GPU, at one or more sizes."""

from arraybridge.benchmarking.compare import compare as compare
from arraybridge.benchmarking.reports import Comparison as Comparison
from arraybridge.benchmarking.reports import SizeComparison as SizeComparison
from arraybridge.benchmarking.timing import Timing as Timing
from arraybridge.benchmarking.timing import benchmark as benchmark
