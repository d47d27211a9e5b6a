"""Rehearse what happens when memory runs out, without running out of it."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock

from arraybridge.frameworks import registry
from arraybridge.memory import oom_recovery
from arraybridge.types import FrameworkLike


@dataclass
class OomSimulation:
    """What `inject_oom` did so far.

    Attributes:
        attempts: rows of each attempt made since, None where it had no array.
        raised: how many of them were made to fail.
    """

    attempts: list[int | None] = field(default_factory=list)
    raised: int = 0


@contextmanager
def inject_oom(
    framework: FrameworkLike, skip: int = 0, count: int | None = None, above_rows: int | None = None
) -> Iterator[OomSimulation]:
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
    owner = registry.framework(framework)
    simulation = OomSimulation()
    lock = Lock()
    numbers = itertools.count()

    def fault(rows: int | None) -> None:
        with lock:
            simulation.attempts.append(rows)
            if above_rows is not None and (rows is None or rows <= above_rows):
                return
            number = next(numbers)
            if number < skip or (count is not None and number >= skip + count):
                return
            simulation.raised += 1
        raise owner.memory.oom_error()

    oom_recovery.faults.append(fault)
    try:
        yield simulation
    finally:
        oom_recovery.faults.remove(fault)
    if not simulation.attempts:
        warnings.warn(
            "inject_oom() saw no attempt: nothing in the block ran under OOM recovery. Decorate the function"
            " with oom_recovery=True or 'split', or call it by run_with_oom_recovery or split_and_retry.",
            stacklevel=3,  # the end of the with block
        )
