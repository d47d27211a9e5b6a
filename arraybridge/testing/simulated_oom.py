"""Simulation of out-of-memory errors, for tests of recovery."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock

from arraybridge.interface import registry
from arraybridge.memory import oom_recovery
from arraybridge.types import FrameworkLike
from arraybridge.validation import whole_number


@dataclass
class OomSimulation:
    """A record of the attempts in an `inject_oom` block.

    Attributes:
        attempts: The number of rows of each attempt; None if it had no array.
        raised: The number of attempts that failed.
    """

    attempts: list[int | None] = field(default_factory=list)
    raised: int = 0


@contextmanager
def inject_oom(
    framework: FrameworkLike, skip: int = 0, count: int | None = None, above_rows: int | None = None
) -> Iterator[OomSimulation]:
    """Make attempts under OOM recovery fail, inside a ``with`` block, as if memory had run out.

    Each call to a function by `run_with_oom_recovery`, by `split_and_retry`, or by a decorator with
    ``oom_recovery`` is an attempt. The framework's out-of-memory error is raised instead of calling the
    function, in every thread. Functions that run without recovery are not affected.

    Args:
        framework: The framework whose error is raised. It is imported.
        skip: The number of attempts that run normally first. Defaults to 0.
        count: The number of attempts that fail after these. Defaults to None: one attempt, or all attempts if
            ``above_rows`` is given.
        above_rows: If given, only attempts with more rows fail, as on a GPU with little memory. ``skip`` and
            ``count`` then refer to these attempts. Defaults to None.

    Yields:
        A record of the attempts: ``.attempts``, their rows in order, and ``.raised``.

    Warns:
        UserWarning: If the block ends without an attempt, because nothing was simulated.

    Raises:
        TypeError: If a number is not an int.
        ValueError: If a number is negative.
        FrameworkNotInstalledError: If the framework is missing.

    Example:
        >>> import numpy as np, arraybridge
        >>> with inject_oom("numpy", above_rows=4) as simulation:
        ...     doubled = arraybridge.split_and_retry(lambda x: x * 2, np.arange(8))
        >>> simulation.attempts
        [8, 8, 4, 4]
    """
    skip = whole_number("skip", skip, least=0)
    count = None if count is None else whole_number("count", count, least=0)
    above_rows = None if above_rows is None else whole_number("above_rows", above_rows, least=0)
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
            "inject_oom() saw no attempt: no function in the block ran under OOM recovery. Decorate the"
            " function with oom_recovery=True or 'split', or call it with run_with_oom_recovery or"
            " split_and_retry.",
            stacklevel=3,  # the end of the with block
        )
