"""Check after every GPU test that the current device was restored."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.helpers import EMULATED


@pytest.fixture(autouse=True)
def _current_device_is_restored() -> Iterator[None]:
    """Fail if a device is still selected after the test, or if a pushed context was not popped."""
    from arraybridge import cuda_driver

    yield
    cupy = sys.modules.get("cupy")
    if cupy is None or not cuda_driver.is_driver_initialized():
        return
    # PyTorch leaves CUDA's current device on the device of its last tensor if the other device has no
    # context.
    if "torch" not in sys.modules or cuda_driver.has_context(0):
        assert cupy.cuda.runtime.getDevice() == 0
    if EMULATED:
        from tests.emulated_gpu import accounting

        assert accounting.pushed_contexts() == 0
