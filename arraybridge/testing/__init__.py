"""For tests of your own: rehearse out-of-memory, and find out whether a framework keeps the promises."""

from arraybridge.testing.conformance import FrameworkCheckError, Report, Verdict, check_framework
from arraybridge.testing.simulated_oom import OomSimulation, inject_oom

__all__ = ["FrameworkCheckError", "OomSimulation", "Report", "Verdict", "check_framework", "inject_oom"]
