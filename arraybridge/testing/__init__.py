"""Tools for your own tests: simulated out-of-memory errors and a conformance suite for frameworks."""

from arraybridge.testing.conformance import FrameworkCheckError, Report, Verdict, check_framework
from arraybridge.testing.simulated_oom import OomSimulation, inject_oom

__all__ = ["FrameworkCheckError", "OomSimulation", "Report", "Verdict", "check_framework", "inject_oom"]
