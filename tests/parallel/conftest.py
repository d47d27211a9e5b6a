"""Fixtures that check that every test's threads end."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator

import pytest

import arraybridge
from tests.helpers import registry_kept
from tests.parallel.fake_streams import StreamFramework


def our_threads() -> list[str]:
    """Return the names of the package's worker threads that are alive."""
    return [t.name for t in threading.enumerate() if re.match(r"arraybridge-\d", t.name)]


def wait_for_no_threads() -> None:
    until = time.monotonic() + 20
    while our_threads():
        assert time.monotonic() < until, our_threads()
        time.sleep(0.005)


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    wait_for_no_threads()


@pytest.fixture
def framework() -> Iterator[StreamFramework]:
    one = StreamFramework()
    with registry_kept():
        arraybridge.register(one)
        yield one
