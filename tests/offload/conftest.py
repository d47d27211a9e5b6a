"""The fake clock, card and machine of these tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from arraybridge.frameworks import registry
from arraybridge.offload.cards import Cards as Machine
from tests.helpers import registry_kept
from tests.offload.fakecard import Clock, FakeCard


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def card(clock: Clock) -> Iterator[FakeCard]:
    framework = FakeCard(clock)
    with registry_kept():
        registry.register(framework)
        yield framework


@pytest.fixture
def machine(clock: Clock, card: FakeCard) -> Machine:
    found = Machine(clock)
    fake = found.find("fakecard", 0)  # so that small arrays, too, are weighed
    assert not isinstance(fake, str)
    return found
