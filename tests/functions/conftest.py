"""A framework of a few lines, for what needs no real one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from arraybridge.frameworks.base import Framework
from tests.functions.cases import BoxFramework, registered


@pytest.fixture
def boxes() -> Iterator[Framework]:
    with registered(BoxFramework()) as framework:
        yield framework
