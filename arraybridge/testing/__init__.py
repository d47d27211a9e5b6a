"""For tests of your own: rehearse out-of-memory, and find out whether a framework keeps the promises."""

from arraybridge.testing.conformance import FrameworkCheckError as FrameworkCheckError
from arraybridge.testing.conformance import Report as Report
from arraybridge.testing.conformance import Verdict as Verdict
from arraybridge.testing.conformance import check_framework as check_framework
from arraybridge.testing.oom import Rehearsal as Rehearsal
from arraybridge.testing.oom import inject_oom as inject_oom
from arraybridge.testing.samples import sample as sample

__all__ = [
    "FrameworkCheckError",
    "Rehearsal",
    "Report",
    "Verdict",
    "check_framework",
    "inject_oom",
    "sample",
]
