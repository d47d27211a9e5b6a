"""The fake framework, registered for one test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import arraybridge
from arraybridge.interface import registry
from tests.memory.fake_framework import FakeFramework


@pytest.fixture
def fake() -> Iterator[FakeFramework]:
    """Register a framework with two GPUs during the test."""
    framework = FakeFramework()
    arraybridge.register(framework)
    yield framework
    registry.unregister("fake")
