"""Benchmarks: `benchmark` times a call; `compare` times it on the CPU and the GPU."""

from arraybridge.benchmarking.compare import Comparison as Comparison
from arraybridge.benchmarking.compare import compare as compare
from arraybridge.benchmarking.timing import Timing as Timing
from arraybridge.benchmarking.timing import benchmark as benchmark
