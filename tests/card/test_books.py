"""Memory against the emulation's own books: what is freed, what is counted, and a limit that is real."""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np
import pytest

import arraybridge
from arraybridge import free_memory, memory_stats
from tests.card import books
from tests.helpers import EMULATED

pytestmark = pytest.mark.gpu

MIB = 1 << 20


def test_free_memory_frees_what_it_says() -> None:
    before = books.used()
    x, y = cupy.empty(64 * MIB, np.uint8), cupy.empty(32 * MIB, np.uint8)
    assert books.used() == before + 96 * MIB
    del y
    assert books.used() == before + 96 * MIB
    assert free_memory("cupy", gpu_id=0) == 32 * MIB
    assert books.used() == before + 64 * MIB
    del x
    assert free_memory() >= 64 * MIB
    assert books.used() == before


def test_free_memory_minds_the_card() -> None:
    before = [books.used(card) for card in range(2)]  # of torch, say, where it is there
    for card in range(2):
        with cupy.cuda.Device(card):
            cupy.empty(16 * MIB, np.uint8)
    for gpu_id, grown in ((1, [16 * MIB, 0]), (0, [0, 0])):
        assert free_memory(gpu_id=gpu_id) == 16 * MIB
        assert [books.used(card) - before[card] for card in range(2)] == grown
    assert cupy.cuda.Device().id == 0


def test_stats_agree_with_the_books() -> None:
    x, y = cupy.empty(48 * MIB, np.uint8), cupy.empty(16 * MIB, np.uint8)
    del y
    card = memory_stats()["gpu:0"]
    assert (card.total, card.free) == (books.capacity(), books.capacity() - books.used())
    (held,) = [one for one in card.holdings if one.holder == "cupy"]
    assert (held.used, held.cached) == (x.nbytes, 16 * MIB)
    assert memory_stats()["gpu:1"].free == books.capacity()


def test_a_full_card_is_cleared_for_a_new_array_or_out_of_memory() -> None:
    """CuPy's cache and idle buffers are in the way of a new array, and are given up for it."""
    third = books.capacity() // 3
    pool = arraybridge.BufferPool(books.capacity())
    pool.give(pool.take((third,), np.uint8, "cupy", gpu_id=0))
    cupy.empty(third, np.uint8)
    with pytest.raises(cupy.cuda.runtime.CUDARuntimeError, match="cudaErrorMemoryAllocation"):
        cupy.cuda.Memory(2 * third)
    x = arraybridge.run_with_oom_recovery(cupy.cuda.Memory, 2 * third)
    assert x.size == 2 * third
    full = cupy.cuda.Memory(books.capacity() - books.used() - MIB)
    with pytest.raises(cupy.cuda.memory.OutOfMemoryError) as caught:
        arraybridge.convert_memory(np.zeros(4 * MIB, np.uint8), "cupy", 0)
    assert arraybridge.is_oom_error(caught.value)
    assert full.size


def test_a_batch_that_does_not_fit_is_split_and_nothing_is_done_twice() -> None:
    wide = books.capacity() // 4 // 6  # a row in float32 takes a sixth of the card
    x = cupy.arange(16, dtype=np.float32).reshape(16, 1)
    done: list[int] = []

    def spread(part: Any) -> Any:
        full = cupy.empty((len(part), wide), np.float32)
        full[:, -1:] = part * 2
        done.extend(part[:, 0].get().astype(int).tolist())
        return full[:, -1:].copy()

    assert arraybridge.split_and_retry(spread, x).get().tolist() == (x * 2).get().tolist()
    assert done == list(range(16))


@pytest.mark.skipif(EMULATED == "at-once", reason="with streams at once nothing ever waits")
def test_what_waits_on_another_stream_goes_on_waiting() -> None:
    """No call waits for the whole card."""
    bystander = cupy.cuda.Stream(non_blocking=True)
    with bystander:
        late = cupy.zeros(6)
        for _ in range(4):
            late += 1
    waiting = books.queued()
    assert waiting >= 4
    with cupy.cuda.Stream(non_blocking=True):
        x = cupy.arange(6.0)
        assert arraybridge.to_numpy(x).tolist() == list(range(6))
        for target in ("cupy", "numpy"):
            arraybridge.convert_memory(x, target, copy=True)
        arraybridge.convert_memory(np.ones(6), "cupy", 0)
        y = arraybridge.cupy(output_type="numpy")(lambda a: a + 1)(x)
    assert y.tolist() == list(range(1, 7))
    assert books.queued() >= waiting
    bystander.synchronize()
    assert (late.get() == 4).all()
