"""These tests ask the emulated card itself, so that they skip on every other machine, one with a card too."""

from __future__ import annotations

import pytest

from tests.helpers import EMULATED

collect_ignore_glob = [] if EMULATED else ["test_*.py"]


@pytest.fixture(autouse=True)
def _both_gpus() -> None:
    """Nothing of an earlier test waits in a queue or lies in a pool."""
    import arraybridge
    from tests.emulated_gpu import accounting

    arraybridge.free_memory()
    accounting.empty_pools()
