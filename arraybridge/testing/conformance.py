"""Whether a framework keeps the promises of the library: a suite for authors of plug-ins."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from arraybridge.errors import MemoryConversionError
from arraybridge.frameworks import registry
from arraybridge.frameworks.base import Framework
from arraybridge.show import Contents, Table
from arraybridge.testing.promises import PROMISES, BrokenPromiseError, Subject
from arraybridge.types import FrameworkLike


class FrameworkCheckError(AssertionError):
    """A framework breaks a promise; the message is the report."""


class Verdict(NamedTuple):
    """What came out for one promise.

    Attributes:
        promise: its name, which ``only=`` takes.
        cases: how many cases were tried.
        failures: what went wrong in those that failed, each with its case.
    """

    promise: str
    cases: int
    failures: list[str]


class Report(Table):
    """What `check_framework` found; prints as a table, and is true where nothing failed.

    Attributes:
        framework: name of the framework.
        verdicts: one `Verdict` a promise.
    """

    def __init__(self, framework: str, verdicts: list[Verdict]) -> None:
        self.framework = framework
        self.verdicts = verdicts

    @property
    def broken(self) -> list[str]:
        """Names of the promises that are not kept."""
        return [verdict.promise for verdict in self.verdicts if verdict.failures]

    @property
    def ok(self) -> bool:
        """Whether every promise is kept."""
        return not self.broken

    def __bool__(self) -> bool:
        return self.ok

    def raise_if_broken(self) -> None:
        """Raise what is broken, for a test.

        Raises:
            FrameworkCheckError: a promise is not kept; its message is this table.
        """
        if not self.ok:
            raise FrameworkCheckError(f"\n{self}")

    def _table(self) -> Contents:
        head = ("promise", "cases", "failed", "first failure")
        rows = [
            (v.promise, str(v.cases), str(len(v.failures)), *(v.failures[:1] or [""])) for v in self.verdicts
        ]
        cases = sum(verdict.cases for verdict in self.verdicts)
        kept = len(self.verdicts) - len(self.broken)
        line = f"{self.framework}: {kept} of {len(self.verdicts)} promises kept, {cases} cases"
        return head, rows, head[1:3], line


def check_framework(
    framework: FrameworkLike | Framework,
    make: Callable[[np.ndarray], Any] | None = None,
    *,
    only: str | Iterable[str] | None = None,
) -> Report:
    """Try every promise of the library on one framework, and say in words what fails.

    The promises are those of the section on conversion in the documentation, as far as the framework claims
    to keep them: it is asked for its dtypes, ranks, devices and alignment, and held to what it says.

    Args:
        framework: its name; or an instance, which is registered while the suite runs if it is not yet.
        make: a function that makes an array of the framework from a C-contiguous NumPy array, with the
            framework's own calls. Left out, the framework's ``from_host`` makes them.
        only: names of the promises to try; left out, all of them.

    Returns:
        a `Report`. In a test: ``check_framework("mine").raise_if_broken()``.

    Raises:
        FrameworkNotInstalledError: it is not there.
        ValueError: ``only`` names no promise.

    >>> check_framework("numpy", only="dtypes").ok
    True
    """
    names = list(PROMISES) if only is None else [only] if isinstance(only, str) else list(only)
    if unknown := [name for name in names if name not in PROMISES]:
        raise ValueError(f"{', '.join(unknown)}: no such promise; they are {', '.join(PROMISES)}")
    one = registry.framework(framework) if isinstance(framework, str) else framework
    before = registry.instances().get(one.name)
    if before is not one:
        registry.register(one)
    try:
        subject = Subject(one, make)
        verdicts = [_judge(name, subject) for name in names]
    finally:
        if before is None:
            registry.unregister(one.name)
        elif before is not one:
            registry.register(before)
    return Report(one.name, verdicts)


def _judge(name: str, subject: Subject) -> Verdict:
    promise, failures = PROMISES[name], []
    cases = list(promise.cases(subject))
    for case in cases:
        try:
            promise.check(subject, **case)
        except Exception as error:  # noqa: BLE001  # whatever a plug-in raises is what is reported
            words = ", ".join(f"{word}={' '.join(str(value).split())}" for word, value in case.items())
            failures.append(f"{words}{words and ': '}{_in_words(error)}")
    return Verdict(name, len(cases), failures)


def _in_words(error: Exception) -> str:
    words = str(error).partition("\n")[0]
    if isinstance(error, BrokenPromiseError):
        return words
    kind = type(error).__name__
    return f"{kind}: {words}" if isinstance(error, MemoryConversionError) else f"it raises {kind}: {words}"
