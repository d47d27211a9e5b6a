"""Skip these tests without an emulated GPU, because they query the emulation itself."""

from __future__ import annotations

import pytest

from tests.helpers import EMULATED

collect_ignore_glob = [] if EMULATED else ["test_*.py"]


@pytest.fixture(autouse=True)
def _both_gpus() -> None:
    """Empty all streams and pools before each test."""
    import arraybridge
    from tests.emulated_gpu import accounting

    arraybridge.free_memory()
    accounting.empty_pools()
