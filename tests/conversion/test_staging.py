"""Large arrays through pinned buffers: on a bus made of threads, whose clock the transfers alone move."""

from __future__ import annotations

import contextlib
import importlib
import logging
import re
import threading
import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest

import arraybridge
from arraybridge import convert_memory, free_memory, pinned
from arraybridge.conversion import staging
from arraybridge.conversion.ring import StagingRing
from arraybridge.frameworks import registry
from arraybridge.frameworks.base import CPU
from arraybridge.types import Device
from tests.cards import CardArray
from tests.helpers import registry_kept, require
from tests.memory.fake import FakeFramework, HostedFake

MIB = 1 << 20
GPU = Device("gpu", 0)


def registered(fake: FakeFramework, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeFramework]:
    """Register the framework for one test, with small rings and trials; the clock is its own."""
    monkeypatch.setattr(staging, "perf_counter", fake.clock)
    monkeypatch.setattr(staging, "CHUNK", 1 << 16)
    monkeypatch.setattr(staging, "BUFFERS", 4)
    monkeypatch.setattr(staging, "MAKE_AFTER", 4 * MIB)
    monkeypatch.setattr(staging, "TRIAL_SIZES", (MIB, 2 * MIB))
    monkeypatch.setattr(FakeFramework, "modules", ("tests",))  # so that its arrays are found
    fake.delay = 0.0
    with registry_kept():
        arraybridge.register(fake)
        yield fake
        staging._rings.pop(fake, None)
        for key in [key for key in staging._proofs if key[0] is fake]:
            del staging._proofs[key]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeFramework]:
    """Two cards without host arrays."""
    yield from registered(FakeFramework(), monkeypatch)


@pytest.fixture
def hosted(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeFramework]:
    """Two cards of a framework that has host arrays as well."""
    yield from registered(HostedFake(), monkeypatch)


def random(count: int, dtype: str = "uint8") -> np.ndarray:
    """``count`` elements of any bit pattern."""
    size = np.dtype(dtype).itemsize
    data = np.random.default_rng(count).integers(0, 256, count * size, np.uint8)
    return data % 2 == 1 if dtype == "bool" else data.view(dtype)


def same_bytes(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def there_and_back(x: np.ndarray) -> tuple[CardArray, np.ndarray]:
    there = convert_memory(x, "fake", gpu_id=0)
    return there, convert_memory(there, "numpy")


def counts(fake: FakeFramework, x: np.ndarray) -> tuple[list[int], list[int]]:
    """How many plain calls and queued copies one round trip takes, which has to arrive."""
    plain, queued = list(fake.plain), list(fake.queued)
    _, back = there_and_back(x)
    assert same_bytes(back, x)
    assert fake.unfinished == 0
    return (
        [now - before for now, before in zip(fake.plain, plain, strict=True)],
        [now - before for now, before in zip(fake.queued, queued, strict=True)],
    )


def settle_verdict(fake: FakeFramework) -> None:
    """Move enough that the ring is tried."""
    x = random(MIB)
    for _ in range(3):
        there_and_back(x)


BY_THE_RING = ([0, 0], [16, 16])  # 1 MiB in chunks of 64 KiB
BY_THE_PLAIN_CALL = ([1, 1], [0, 0])


# -- the ring ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 6, 7, 99, 100, 101, 399, 400, 401, 2345])
@pytest.mark.parametrize("buffers", [1, 2, 3, 4])
def test_bytes_arrive(fake: FakeFramework, size: int, buffers: int) -> None:
    """Also though each copy ends late: a buffer that is filled too early would show."""
    fake.delay = 0.0005
    source = random(size)
    ring = StagingRing(fake, chunk=100, buffers=buffers)
    assert fake.most_pinned == ring.nbytes == 100 * buffers
    target = CardArray(np.zeros(size, np.uint8), 0)
    ring.send(source, target, fake.pinning)
    assert fake.unfinished == 0
    np.testing.assert_array_equal(target.values, source)
    back = np.zeros(size, np.uint8)
    ring.fetch(target, back, fake.pinning)
    assert fake.unfinished == 0
    np.testing.assert_array_equal(back, source)


def test_an_error_on_the_way_leaves_nothing_running(
    fake: FakeFramework, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.delay = 0.0005
    ring = StagingRing(fake, chunk=10, buffers=3)
    enqueue = fake.pinning.enqueue_copy
    calls = []

    def fail(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 5:
            raise RuntimeError("the bus is gone")
        return enqueue(*arguments)

    monkeypatch.setattr(fake.pinning, "enqueue_copy", fail)
    target = CardArray(np.zeros(200, np.uint8), 0)
    with pytest.raises(RuntimeError, match="bus"):
        ring.send(np.ones(200, np.uint8), target, fake.pinning)
    assert fake.unfinished == 0
    calls.clear()
    with pytest.raises(RuntimeError, match="bus"):
        ring.fetch(target, np.zeros(200, np.uint8), fake.pinning)
    assert fake.unfinished == 0
    monkeypatch.setattr(fake.pinning, "enqueue_copy", enqueue)
    ring.send(np.ones(200, np.uint8), target, fake.pinning)
    assert target.values.all()


def test_no_card_no_ring() -> None:
    with pytest.raises(ValueError, match="no card"):
        StagingRing(arraybridge.framework("numpy"))


def test_a_ring_of_full_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 64 MiB are pinned; larger arrays use the buffers again."""
    fake = FakeFramework()
    fake.delay = 0.0
    x = random(9 * MIB + 1, "float64")
    try:
        there = staging.send_through(x, fake, Device("gpu", 1))
        assert (there.card, there.shape) == (1, x.shape)
        back = staging.fetch_through(there, fake, np.empty_like(x))
        assert same_bytes(back, x)
        assert fake.queued == [19, 19]  # chunks of 4 MiB
        assert fake.most_pinned == 64 * MIB
    finally:
        assert staging.drop("fake") == 64 * MIB


# -- values --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "size",
    [
        *(0, 1, MIB - 1, MIB, MIB + 1, MIB + (1 << 16) - 1, MIB + (1 << 16), MIB + (1 << 16) + 1),
        *(1_234_567, 2 * MIB + 3),
    ],
)
def test_every_size_arrives(fake: FakeFramework, size: int) -> None:
    settle_verdict(fake)
    x = random(size)
    chunks = -(-size // (1 << 16))
    assert counts(fake, x) == (([0, 0], [chunks, chunks]) if size >= MIB else BY_THE_PLAIN_CALL)


@pytest.mark.parametrize("dtype", ["bool", "int16", "float32", "float64", "complex128"])
def test_every_dtype_arrives(fake: FakeFramework, dtype: str) -> None:
    settle_verdict(fake)
    x = random(3 * (MIB >> 1), dtype).reshape(3, 1, -1)
    there, back = there_and_back(x)
    assert there.shape == x.shape
    assert there.dtype == x.dtype
    assert same_bytes(there.values, x)
    assert same_bytes(back, x)
    assert fake.queued[0] > 80


def test_what_is_not_packed_or_not_native_goes_by_the_plain_call(fake: FakeFramework) -> None:
    settle_verdict(fake)
    x = random(4 * MIB).reshape(2048, 2048)
    for odd in (x[:, ::2], x.T, x[::-1], x.view(">f8"), x[:, 1:]):
        queued = list(fake.queued)
        there, back = there_and_back(odd)
        np.testing.assert_array_equal(there.values.view(np.uint8), odd.view(odd.dtype).copy().view(np.uint8))
        np.testing.assert_array_equal(back.view(np.uint8), odd.copy().view(np.uint8))
        assert fake.queued[0] == queued[0]
    transposed = CardArray(x.T, 0)
    queued = list(fake.queued)
    np.testing.assert_array_equal(convert_memory(transposed, "numpy"), x.T)
    assert fake.queued == queued


def test_what_is_read_only_or_a_view_arrives(fake: FakeFramework) -> None:
    settle_verdict(fake)
    x = random(2 * MIB)
    x.flags.writeable = False
    assert counts(fake, x[MIB // 2 : 3 * MIB // 2]) == BY_THE_RING
    assert not x.flags.writeable


def test_a_result_is_memory_of_its_own(fake: FakeFramework) -> None:
    settle_verdict(fake)
    x = random(MIB)
    there, back = there_and_back(x)
    again = convert_memory(there, "numpy")
    assert back.flags.writeable
    assert back.flags.c_contiguous
    back[:] = 0
    assert same_bytes(again, x)
    assert same_bytes(there.values, x)
    assert not any(np.shares_memory(again, buffer) for buffer in staging._rings[fake]._buffers)


def test_by_way_of_the_host_to_another_framework(
    fake: FakeFramework, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = require("torch")
    settle_verdict(fake)
    x = random(MIB // 4, "int32")
    queued = list(fake.queued)
    tensor = torch.from_numpy(x)
    there = convert_memory(tensor, "fake", gpu_id=0)
    assert torch.equal(convert_memory(there, "torch"), tensor)
    assert [now - before for now, before in zip(fake.queued, queued, strict=True)] == [16, 16]
    # A cast that the target cannot make itself is made on the way.
    monkeypatch.setattr(FakeFramework, "dtypes", frozenset({"int64"}))
    cast = convert_memory(x, "fake", gpu_id=0, dtype="int64")
    assert cast.dtype == "int64"
    np.testing.assert_array_equal(cast.values, x)
    assert fake.queued[0] - queued[0] == 16 + 32


# -- the verdict ---------------------------------------------------------------------------------------


def test_a_ring_that_wins_is_used(fake: FakeFramework, caplog: pytest.LogCaptureFixture) -> None:
    x = random(MIB)
    with caplog.at_level(logging.INFO, "arraybridge.conversion"):
        for _ in range(2):  # 4 MiB by the plain call
            assert counts(fake, x) == BY_THE_PLAIN_CALL
        assert not caplog.records
        there_and_back(x)  # tried
        assert counts(fake, x) == BY_THE_RING
    first, second = (record.getMessage() for record in caplog.records)
    ring = "staging buffers are used from 1 MiB on (1 MiB in 100.00 ms, plain 1000.00 ms; 2 MiB in 200.00 ms"
    assert first.startswith(f"fake on gpu:0, to the card: {ring}")
    assert second.startswith(f"fake on gpu:0, to the host: {ring}")
    assert staging.prove(fake, GPU) == {"to the card": MIB, "to the host": MIB}
    # Another card has to prove itself.
    queued = list(fake.queued)
    convert_memory(x, "fake", gpu_id=1)
    assert fake.queued == queued


def test_a_ring_that_is_slower_is_dropped(fake: FakeFramework, caplog: pytest.LogCaptureFixture) -> None:
    fake.queued_seconds = (0.0, 1 / 1.19)
    with caplog.at_level(logging.INFO, "arraybridge.conversion"):
        settle_verdict(fake)
    assert [re.sub(r"\(.*", "", r.getMessage()) for r in caplog.records] == [
        "fake on gpu:0, to the card: staging buffers are not used ",
        "fake on gpu:0, to the host: staging buffers are not used ",
    ]
    assert fake.queued != [0, 0]
    assert fake not in staging._rings
    for _ in range(6):
        assert counts(fake, random(MIB)) == BY_THE_PLAIN_CALL
    assert staging.prove(fake, GPU) == {}


def test_a_ring_may_win_one_way(fake: FakeFramework, monkeypatch: pytest.MonkeyPatch) -> None:
    to_host = fake.to_host

    def quick(x: CardArray) -> np.ndarray:
        result, fake.now = to_host(x), fake.now - x.nbytes / MIB
        return result

    monkeypatch.setattr(fake, "to_host", quick)
    settle_verdict(fake)
    assert counts(fake, random(MIB)) == ([0, 1], [16, 0])
    assert staging.prove(fake, GPU) == {"to the card": MIB}


def test_a_ring_may_win_from_a_larger_size_on(fake: FakeFramework) -> None:
    fake.plain_seconds, fake.queued_seconds = (
        (0.0, 1.0),
        (0.05, 0.0),
    )  # each copy costs 50 ms, whatever its size
    staging.TRIAL_SIZES = (MIB // 2, 2 * MIB, 4 * MIB)  # type: ignore[misc]
    fake.plain_seconds = (
        -1.0,
        1.6,
    )  # 0.5 MiB in -0.2 s, 2 MiB in 2.2 s (ring: 1.6 s), 4 MiB in 5.4 s (3.2 s)
    settle_verdict(fake)
    assert counts(fake, random(MIB)) == BY_THE_PLAIN_CALL
    assert counts(fake, random(2 * MIB - 1)) == BY_THE_PLAIN_CALL
    assert counts(fake, random(2 * MIB)) == ([0, 0], [32, 32])


@pytest.mark.parametrize("fault", ["spoil", "skip"])
@pytest.mark.parametrize("way", [0, 1])
def test_wrong_bytes_in_the_trial(
    fake: FakeFramework, monkeypatch: pytest.MonkeyPatch, fault: str, way: int
) -> None:
    """Also where nothing is delivered, out of buffers that still hold all of what was sent before."""
    monkeypatch.setattr(staging, "BUFFERS", 16)
    monkeypatch.setattr(staging, "TRIAL_SIZES", (MIB,))
    setattr(fake, fault, {way})
    x = random(MIB)
    for _ in range(2):
        there_and_back(x)
    words = ("to the card", "to the host")[way]
    with pytest.warns(RuntimeWarning, match=f"wrong bytes {words}\\.") as caught:
        _, back = there_and_back(x)
    assert caught[0].filename == __file__
    assert same_bytes(back, x)
    assert counts(fake, x) == (([1, 0], [0, 16]) if way == 0 else ([0, 1], [16, 0]))


def test_wrong_bytes_both_ways(fake: FakeFramework) -> None:
    fake.spoil = {0, 1}
    with pytest.warns(RuntimeWarning, match="to the card and to the host"):
        settle_verdict(fake)
    assert fake not in staging._rings
    assert counts(fake, random(MIB)) == BY_THE_PLAIN_CALL


@pytest.mark.parametrize("ways", [{0}, {1}, {0, 1}])
def test_an_error_in_the_trial(fake: FakeFramework, ways: set[int], caplog: pytest.LogCaptureFixture) -> None:
    fake.fail = ways
    with caplog.at_level(logging.INFO, "arraybridge.conversion"):
        settle_verdict(fake)
    assert "not used (RuntimeError: the bus is gone)" in caplog.text
    assert fake not in staging._rings
    fake.fail = set()
    assert counts(fake, random(MIB)) == BY_THE_PLAIN_CALL


@pytest.mark.parametrize("error", [MemoryError("no pages"), RuntimeError("CUDA error: out of memory")])
def test_no_memory_in_the_trial(
    fake: FakeFramework, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse(nbytes: int) -> np.ndarray:
        raise error

    monkeypatch.setattr(fake.pinning, "pinned_bytes", refuse)
    settle_verdict(fake)
    assert counts(fake, random(MIB)) == BY_THE_PLAIN_CALL
    assert staging.prove(fake, GPU) == {}


def test_an_interrupted_trial_is_made_up_for(fake: FakeFramework, monkeypatch: pytest.MonkeyPatch) -> None:
    enqueue = fake.pinning.enqueue_copy

    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(fake.pinning, "enqueue_copy", interrupt)
    with pytest.raises(KeyboardInterrupt):
        settle_verdict(fake)
    monkeypatch.setattr(fake.pinning, "enqueue_copy", enqueue)
    settle_verdict(fake)
    assert counts(fake, random(MIB)) == BY_THE_RING


def test_an_error_later(fake: FakeFramework, caplog: pytest.LogCaptureFixture) -> None:
    """The user's array arrives all the same, and that way is not tried again."""
    settle_verdict(fake)
    fake.fail = {0}
    with caplog.at_level(logging.INFO, "arraybridge.conversion"):
        assert counts(fake, random(MIB)) == ([1, 0], [0, 16])
    assert "to the card: the staging buffers failed" in caplog.text
    fake.fail = set()
    assert counts(fake, random(MIB)) == ([1, 0], [0, 16])


def test_a_card_that_is_full_is_out_of_memory_as_ever(
    fake: FakeFramework, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle_verdict(fake)

    def full(*_: Any) -> Any:
        raise MemoryError("the card is full")

    monkeypatch.setattr(fake, "empty", full)
    with pytest.raises(MemoryError, match="card is full"):
        convert_memory(random(MIB), "fake", gpu_id=0)
    monkeypatch.undo()
    assert fake.plain[0] > 0
    assert staging._rings[fake].lock.acquire(blocking=False)


# -- never ---------------------------------------------------------------------------------------------


def test_small_arrays_never(fake: FakeFramework) -> None:
    x = random(MIB - 1)
    for _ in range(12):
        assert counts(fake, x) == BY_THE_PLAIN_CALL
    assert (fake, GPU) not in staging._proofs
    settle_verdict(fake)
    assert counts(fake, x) == BY_THE_PLAIN_CALL


def test_pinned_memory_never(fake: FakeFramework) -> None:
    settle_verdict(fake)
    x = pinned(random(2 * MIB))
    assert fake.pinning.is_pinned(x)
    assert counts(fake, x) == ([1, 0], [0, 32])
    assert counts(fake, x[MIB:]) == ([1, 0], [0, 16])


def test_a_framework_that_cannot_pin_never(fake: FakeFramework, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake, "pinning", None)
    settle_verdict(fake)
    assert fake.queued == [0, 0]
    assert staging.prove(fake, GPU) is None


def test_not_where_it_is_switched_off(fake: FakeFramework, monkeypatch: pytest.MonkeyPatch) -> None:
    x = random(MIB)
    with arraybridge.settings(staging=False):
        settle_verdict(fake)
        settle_verdict(fake)
        assert fake.queued == [0, 0]
    settle_verdict(fake)
    assert counts(fake, x) == BY_THE_RING
    with arraybridge.settings(staging=False):
        with arraybridge.settings(missing_gpu="host"):
            assert counts(fake, x) == BY_THE_PLAIN_CALL
        with arraybridge.settings(staging=True):
            assert counts(fake, x) == BY_THE_RING
    monkeypatch.setenv("ARRAYBRIDGE_STAGING", "off")
    assert counts(fake, x) == BY_THE_PLAIN_CALL
    with arraybridge.settings(staging=True):
        assert counts(fake, x) == BY_THE_RING
    monkeypatch.setenv("ARRAYBRIDGE_STAGING", "maybe")
    with pytest.raises(arraybridge.MemoryConversionError, match="'on' or 'off'"):
        convert_memory(x, "fake", gpu_id=0)
    with pytest.raises(ValueError, match="True or False"), arraybridge.settings(staging="no"):  # type: ignore[arg-type]
        pass


def test_a_ring_in_use_is_not_waited_for(fake: FakeFramework) -> None:
    settle_verdict(fake)
    with staging._rings[fake].lock:
        assert counts(fake, random(MIB)) == BY_THE_PLAIN_CALL
    assert counts(fake, random(MIB)) == BY_THE_RING


# -- giving the buffers back ---------------------------------------------------------------------------


def test_free_memory_gives_the_buffers_back(fake: FakeFramework, caplog: pytest.LogCaptureFixture) -> None:
    settle_verdict(fake)
    ring = weakref.ref(staging._rings[fake])
    fake.cached = [0, 0]
    assert free_memory("numpy") == 0
    assert ring() is not None
    assert free_memory("fake") == 4 << 16
    assert ring() is None
    assert free_memory("fake") == 0
    x = random(MIB)
    with caplog.at_level(logging.INFO, "arraybridge.conversion"):
        # They are worth making once as much was moved again; the verdict stays.
        for _ in range(2):
            assert counts(fake, x) == BY_THE_PLAIN_CALL
        assert counts(fake, x) == BY_THE_RING
    assert not caplog.records


def test_buffers_in_use_are_not_made_twice(fake: FakeFramework) -> None:
    """The bound holds for those that were let go, too, as long as somebody uses them."""
    settle_verdict(fake)
    in_use = staging._rings[fake]
    free_memory("fake")
    for _ in range(4):
        assert counts(fake, random(MIB)) == BY_THE_PLAIN_CALL
    assert fake.most_pinned == in_use.nbytes
    del in_use
    settle_verdict(fake)
    assert counts(fake, random(MIB)) == BY_THE_RING


def test_no_memory_for_new_buffers(fake: FakeFramework, monkeypatch: pytest.MonkeyPatch) -> None:
    settle_verdict(fake)
    free_memory("fake")

    def refuse(nbytes: int) -> np.ndarray:
        raise MemoryError("no pages")

    with monkeypatch.context() as broken:
        broken.setattr(fake.pinning, "pinned_bytes", refuse)
        for _ in range(4):
            assert counts(fake, random(MIB)) == BY_THE_PLAIN_CALL
    settle_verdict(fake)
    assert counts(fake, random(MIB)) == BY_THE_RING


def test_bytes_that_the_framework_counts_are_not_counted_twice(
    fake: FakeFramework, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle_verdict(fake)
    monkeypatch.setattr(fake.pinning, "is_counted", True)
    fake.cached = [0, 0]
    assert free_memory("fake") == 0
    assert fake not in staging._rings


def test_threads(fake: FakeFramework, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight threads convert while another frees the buffers again and again."""
    monkeypatch.setattr(staging, "MAKE_AFTER", MIB)
    settle_verdict(fake)
    tried = list(fake.queued)
    fake.delay, fake.plain_delay = 0.0002, 0.005
    wrong: list[str] = []
    left = threading.Semaphore(0)

    def work(number: int) -> None:
        rng = np.random.default_rng(number)
        try:
            for _ in range(8):
                x = rng.integers(0, 256, MIB + int(rng.integers(0, 1 << 17)), np.uint8)
                there, back = there_and_back(x)
                if not same_bytes(there.values, x):
                    wrong.append("to the card")
                if not same_bytes(back, x):
                    wrong.append("to the host")
        except RuntimeError as error:
            wrong.append(repr(error))
        finally:
            left.release()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    freed = ended = 0
    seen = sum(tried)
    while ended < 8:
        ended += left.acquire(timeout=0.005)
        if sum(fake.queued) > seen + 20:  # in the midst of a transfer, or after it
            seen = sum(fake.queued)
            fake.cached = [0, 0]
            freed += free_memory("fake")
    for thread in threads:
        thread.join()
    assert wrong == []
    assert fake.unfinished == 0
    assert freed >= 4 << 16
    assert freed % (4 << 16) == 0
    settle_verdict(fake)
    assert counts(fake, random(MIB)) == BY_THE_RING


# -- one framework, two places -------------------------------------------------------------------------


class GraphArray(CardArray):
    """An array that is more than its values."""


def test_within_one_framework(hosted: FakeFramework) -> None:
    settle_verdict(hosted)
    x = CardArray(random(MIB), -1)
    queued = list(hosted.queued)
    there = convert_memory(x, "fake", gpu_id=1)
    assert hosted.queued == queued  # card 1 has not proven itself
    there = convert_memory(x, "fake", gpu_id=0)
    assert there.card == 0
    back = convert_memory(there, "fake", device="cpu")
    assert back.card == -1
    assert same_bytes(back.values, x.values)
    assert not np.shares_memory(back.values, x.values)
    assert [now - before for now, before in zip(hosted.queued, queued, strict=True)] == [16, 16]
    # What is no plain array, or not packed, goes as it always did, and so does what goes from card to card.
    queued = list(hosted.queued)
    for odd in (GraphArray(random(MIB), -1), CardArray(random(2 * MIB)[::2], -1)):
        there = convert_memory(odd, "fake", gpu_id=0)
        assert same_bytes(there.values, odd.values.copy())
    graph = GraphArray(random(MIB), 0)
    assert same_bytes(convert_memory(graph, "fake", device="cpu").values, graph.values)
    assert same_bytes(convert_memory(graph, "numpy"), graph.values)
    assert convert_memory(CardArray(random(MIB), 0), "fake", gpu_id=1).card == 1
    assert hosted.queued == queued


def test_what_is_foretold_is_recorded(fake: FakeFramework) -> None:
    settle_verdict(fake)
    x = random(MIB)
    queued = list(fake.queued)
    route = arraybridge.explain(x, "fake", gpu_id=0)
    assert fake.queued == queued
    with arraybridge.trace() as log:
        convert_memory(x, "fake", gpu_id=0)
    assert log.records == [route]
    assert (route.method, route.copies) == ("device", 1)


# -- what torch answers --------------------------------------------------------------------------------


def torch_pinning() -> Any:
    """What torch answers of pinned memory; one built for the CPU has no such part, but can be asked."""
    return importlib.import_module("arraybridge.frameworks.torch.memory").TorchPinning()


def test_tensors_that_are_no_more_than_their_bytes() -> None:
    torch = require("torch")
    pinning = torch_pinning()
    x = torch.arange(6.0)
    assert pinning.can_stage(x)
    assert pinning.can_stage(x[::2])
    more = (
        torch.nn.Parameter(x),
        torch.nn.Parameter(x, requires_grad=False),
        x.clone().requires_grad_(),
        x.clone().requires_grad_() * 2,
        torch.complex(x, x).conj(),
        torch.complex(x, x).conj().imag,
    )
    assert not any(pinning.can_stage(one) for one in more)
    with torch.autograd.forward_ad.dual_level():
        assert not pinning.can_stage(x)  # it might have a tangent
    assert pinning.can_stage(x)


@pytest.mark.parametrize("dtype", ["bool", "uint8", "float32", "complex64", "bfloat16", "float8_e4m3fn"])
def test_bytes_of_a_tensor(dtype: str) -> None:
    torch = require("torch")
    pinning = torch_pinning()
    x = torch.zeros(2, 3, dtype=getattr(torch, dtype))
    memory = pinning.own_bytes(x)
    assert memory is not None
    assert memory.shape == (6 * x.element_size(),)
    memory[:] = 1
    assert torch.equal(x.view(torch.uint8).view(-1), torch.ones(memory.size, dtype=torch.uint8))
    del memory
    x.resize_(1000)  # the tensor is what it was
    assert pinning.own_bytes(torch.zeros(4, 4).T) is None
    assert pinning.own_bytes(torch.zeros(4, 4)[:, :2]) is None


@pytest.mark.parametrize("dtype", ["bool", "int64", "complex128", "bfloat16", "float8_e5m2"])
def test_a_ring_with_tensors(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch queues, in host memory, where a copy is done when the call returns."""
    torch = require("torch")
    framework = arraybridge.framework("torch")
    pinning = torch_pinning()
    monkeypatch.setattr(framework, "pinning", pinning)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", mock.MagicMock)
    monkeypatch.setattr(pinning, "pinned_bytes", lambda nbytes: np.empty(nbytes, np.uint8))
    source = torch.arange(2 * 501).reshape(2, 501).to(getattr(torch, dtype))
    memory = pinning.own_bytes(source)
    assert memory is not None
    target = framework.empty((2, 501), dtype, CPU)
    ring = StagingRing(framework, chunk=100, buffers=3)
    ring.send(memory, target, pinning)
    assert target.dtype == source.dtype
    assert torch.equal(target.view(torch.uint8), source.view(torch.uint8))
    back = np.zeros_like(memory)
    ring.fetch(target, back, pinning)
    np.testing.assert_array_equal(back, memory)


def test_pageable_memory_of_torch_is_not_pinned() -> None:
    require("torch")
    memory = np.zeros(10, np.uint8)
    memory.flags.writeable = False
    assert not torch_pinning().is_pinned(memory)


def test_nothing_is_loaded_for_arrays_on_the_host() -> None:
    """A framework without a card has nothing pinned, and conversions to it stay as they are."""
    torch = require("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a card")
    before = dict(staging._proofs)
    convert_memory(random(2 * MIB), "torch")
    assert dict(staging._proofs) == before
    assert registry.framework("torch").pinning is None
