"""Skip these tests without an emulated GPU, because they query the emulation itself."""

from __future__ import annotations

import pytest

from tests.helpers import EMULATED, require_two_gpus

collect_ignore_glob = [] if EMULATED else ["test_*.py"]


@pytest.fixture(autouse=True)
def _empty_gpus() -> None:
    """Empty all streams and pools before each test."""
    import arraybridge
    from tests.emulated_gpu import accounting

    arraybridge.free_memory()
    accounting.empty_pools()


@pytest.fixture
def _two_gpus() -> None:
    """Skip on a machine with one GPU."""
    require_two_gpus()
