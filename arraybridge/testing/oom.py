"""Rehearse what happens when memory runs out, without running out of it."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from arraybridge.frameworks import registry
from arraybridge.frameworks.base import Framework
from arraybridge.memory import recovery
from arraybridge.types import FrameworkLike


class Rehearsal:
    """What `inject_oom` did so far.

    Attributes:
        attempts: rows of each attempt made since, None where it had no array.
        raised: how many of them were made to fail.
    """

    def __init__(self, framework: Framework, skip: int, count: int | None, above_rows: int | None) -> None:
        self.attempts: list[int | None] = []
        self.raised = 0
        self._framework = framework
        self._skip = skip
        self._count = count
        self._above_rows = above_rows
        self._lock = threading.Lock()

    def error_for(self, rows: int | None) -> Exception | None:
        """The error that this attempt is to fail with, or None."""
        with self._lock:
            self.attempts.append(rows)
            if self._above_rows is not None and (rows is None or rows <= self._above_rows):
                return None
            if self._skip:
                self._skip -= 1
                return None
            if self._count is not None and self.raised >= self._count:
                return None
            self.raised += 1
        return self._framework.pool.oom_error()


@contextmanager
def inject_oom(
    framework: FrameworkLike, skip: int = 0, count: int | None = None, above_rows: int | None = None
) -> Iterator[Rehearsal]:
    """Make attempts under OOM recovery fail, inside a ``with`` block, as if memory had run out.

    An attempt is each call of a function by `run_with_oom_recovery`, by `split_and_retry`, or by a decorator
    with ``oom_recovery``: the framework's own error is raised in place of the call, in every thread.
    Functions that run without recovery are left alone, and so is what happens inside the function.

    Args:
        framework: whose error to raise; it is imported.
        skip: attempts to leave alone first.
        count: attempts to fail after these; None: one, or with ``above_rows`` all of them.
        above_rows: fail only attempts on more rows than that, as a small card would.

    Warns where the block ends and no attempt was made, since nothing was rehearsed then.

    Yields:
        A record of the attempts: ``.attempts``, their rows in order, and ``.raised``.

    Raises:
        ValueError: a number is negative.
        FrameworkNotInstalledError: the framework is missing.

    >>> import numpy as np, arraybridge
    >>> with inject_oom("numpy", above_rows=4) as rehearsal:
    ...     doubled = arraybridge.split_and_retry(lambda x: x * 2, np.arange(8))
    >>> rehearsal.attempts
    [8, 8, 4, 4]
    """
    for name, value in (("skip", skip), ("count", count), ("above_rows", above_rows)):
        if value is not None and value < 0:
            raise ValueError(f"inject_oom({name}={value}) counts attempts or rows; pass 0 or more")
    if count is None and above_rows is None:
        count = 1
    fault = Rehearsal(registry.framework(framework), skip, count, above_rows)
    recovery.faults.append(fault)
    try:
        yield fault
    finally:
        recovery.faults.remove(fault)
    if not fault.attempts:
        warnings.warn(
            "inject_oom() saw no attempt: nothing in the block ran under OOM recovery. Decorate the function"
            " with oom_recovery=True or 'split', or call it by run_with_oom_recovery or split_and_retry.",
            stacklevel=3,  # the end of the with block
        )
