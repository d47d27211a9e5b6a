"""The emulated GPU itself: it follows CUDA's documentation, and shows mistakes that a real GPU may hide."""

from __future__ import annotations

from collections.abc import Iterator

import cupy
import numpy as np
import pytest

from tests.helpers import EMULATED, output_of

pytestmark = pytest.mark.gpu

N = 1000
lazy = pytest.mark.skipif(EMULATED == "at-once", reason="in eager mode, no work is ever late")


@pytest.fixture
def streams() -> Iterator[tuple[cupy.cuda.Stream, cupy.cuda.Stream]]:
    yield cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()


def locked(value: float) -> np.ndarray:
    memory = np.frombuffer(cupy.cuda.alloc_pinned_memory(8 * N), np.float64, N)
    memory[:] = value
    return memory


@lazy
def test_missing_wait_shows(streams: tuple[cupy.cuda.Stream, cupy.cuda.Stream]) -> None:
    first, second = streams
    x, out = cupy.empty(N), locked(0)
    x.set(locked(7), stream=first)
    x.get(stream=second, out=out)
    assert not (out == 7).any()
    second.wait_event(first.record())
    x.get(stream=second, out=out)
    assert (out == 7).all()


# -- behavior that happens once per process -------------------------------------------------------------


def test_gpu_is_opened_on_first_use() -> None:
    said = output_of(
        "import cupy",
        "from tests.emulated_gpu import accounting",
        "r = cupy.cuda.runtime",
        "r.getDeviceCount(); r.getDeviceProperties(1); r.deviceGetAttribute(75, 1); r.getDevice()",
        "print(accounting.is_open(0), accounting.is_open(1))",
        "cupy.cuda.Device(1).use()",
        "print(accounting.is_open(0), accounting.is_open(1))",
        "with cupy.cuda.Device(1): pass",
        "print(accounting.is_open(0), accounting.is_open(1))",
    )
    assert said.split() == ["False", "False", "False", "True", "False", "True"]
