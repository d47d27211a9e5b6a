"""Benchmarks: `benchmark` times a call, `compare` the same call on CPU and GPU, at one size or at several."""

from arraybridge.measure.comparison import compare as compare
from arraybridge.measure.reports import Comparison as Comparison
from arraybridge.measure.reports import SizeComparison as SizeComparison
from arraybridge.measure.timing import Timing as Timing
from arraybridge.measure.timing import benchmark as benchmark
