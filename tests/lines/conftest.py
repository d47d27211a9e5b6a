"""Whatever a test does, the threads that it started end within a second."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest


def our_threads() -> list[str]:
    """Names of the threads of arraybridge that are alive."""
    return [t.name for t in threading.enumerate() if t.name.startswith("arraybridge-")]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    until = time.monotonic() + 1
    while our_threads() and time.monotonic() < until:
        time.sleep(0.01)
    assert not our_threads()
