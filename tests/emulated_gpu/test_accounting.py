"""Checks that need the emulation's accounting: a real memory limit, and work that stays queued."""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np
import pytest

import arraybridge
from tests.emulated_gpu import accounting
from tests.helpers import EMULATED

pytestmark = pytest.mark.gpu

MIB = 1 << 20


def test_full_gpu_is_cleared_or_raises_out_of_memory() -> None:
    """Check that CuPy's cache and idle buffers are released for a new array."""
    third = accounting.capacity() // 3
    pool = arraybridge.BufferPool(accounting.capacity())
    pool.give(pool.take((third,), np.uint8, "cupy", gpu_id=0))
    cupy.empty(third, np.uint8)
    with pytest.raises(cupy.cuda.runtime.CUDARuntimeError, match="cudaErrorMemoryAllocation"):
        cupy.cuda.Memory(2 * third)
    x = arraybridge.run_with_oom_recovery(cupy.cuda.Memory, 2 * third)
    assert x.size == 2 * third
    full = cupy.cuda.Memory(cupy.cuda.runtime.memGetInfo()[0] - 2 * MIB)
    with pytest.raises(cupy.cuda.memory.OutOfMemoryError) as caught:
        arraybridge.convert_memory(np.zeros(4 * MIB, np.uint8), "cupy", 0)
    assert arraybridge.is_oom_error(caught.value)
    assert full.size


def test_too_large_batch_is_split_without_repeated_work() -> None:
    wide = accounting.capacity() // 4 // 6  # one row in float32 takes a sixth of the GPU
    x = cupy.arange(16, dtype=np.float32).reshape(16, 1)
    done: list[int] = []

    def spread(part: Any) -> Any:
        full = cupy.empty((len(part), wide), np.float32)
        full[:, -1:] = part * 2
        done.extend(part[:, 0].get().astype(int).tolist())
        return full[:, -1:].copy()

    assert arraybridge.split_and_retry(spread, x).get().tolist() == (x * 2).get().tolist()
    assert done == list(range(16))


@pytest.mark.skipif(EMULATED == "at-once", reason="in eager mode, no work is ever queued")
def test_work_on_another_stream_stays_queued() -> None:
    """Check that no call waits for the whole GPU."""
    bystander = cupy.cuda.Stream(non_blocking=True)
    with bystander:
        late = cupy.zeros(6)
        for _ in range(4):
            late += 1
    waiting = accounting.queued()
    assert waiting >= 4
    with cupy.cuda.Stream(non_blocking=True):
        x = cupy.arange(6.0)
        assert arraybridge.to_numpy(x).tolist() == list(range(6))
        for target in ("cupy", "numpy"):
            arraybridge.convert_memory(x, target, copy=True)
        arraybridge.convert_memory(np.ones(6), "cupy", 0)
        y = arraybridge.cupy(output_type="numpy")(lambda a: a + 1)(x)
    assert y.tolist() == list(range(1, 7))
    assert accounting.queued() >= waiting
    bystander.synchronize()
    assert (late.get() == 4).all()
