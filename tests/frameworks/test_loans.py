"""Memory that one framework lends to another: in which order it goes back. No card is needed for that."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import free_memory
from arraybridge.frameworks import loans
from arraybridge.frameworks.base import Framework
from arraybridge.frameworks.parts import Mark, Streams
from arraybridge.types import Device
from tests.helpers import require

CARD = Device("gpu", 0)


class Queue(Streams):
    """A queue that is done when it is told so, and writes down who waits for it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.done = False
        self.waited: list[int] = []

    def handle(self, device: Device) -> int:
        return self.number

    def wait_for(self, device: Device, handle: int) -> None:
        self.waited.append(handle)

    def mark(self, device: Device) -> Mark | None:
        return Mark(self, device, lambda: None, lambda: setattr(self, "done", True), lambda: self.done)


class Memory:
    """Stands for a framework's array."""


def lend(lender: Streams, borrower: Streams) -> tuple[loans.Loan, weakref.ref[Any]]:
    memory = Memory()
    return loans.Loan(memory, lender, borrower, CARD), weakref.ref(memory)


def test_the_lenders_queue_waits_for_the_borrowers_and_the_memory_goes_at_once() -> None:
    lender, borrower = Queue(1), Queue(2)
    loan, memory = lend(lender, borrower)
    assert memory() is not None
    assert lender.waited == []
    del loan
    gc.collect()
    assert lender.waited == [2]
    assert memory() is None


def test_a_lender_without_queues_has_its_memory_kept_until_it_was_read() -> None:
    borrower = Queue(2)
    loan, memory = lend(Streams(), borrower)
    del loan
    gc.collect()
    loans.release()
    assert memory() is not None
    borrower.done = True
    loans.release()
    gc.collect()
    assert memory() is None


def test_what_was_lent_on_another_queue_is_kept_until_it_was_read() -> None:
    """In a pipeline a loan may end in another thread, and the memory goes back to the queue of the first."""
    lender, borrower = Queue(1), Queue(2)
    loan, memory = lend(lender, borrower)
    lender.number = 3
    del loan
    gc.collect()
    loans.release()
    assert lender.waited == []
    assert memory() is not None
    borrower.done = True
    loans.release()
    gc.collect()
    assert memory() is None


def test_each_threads_default_stream_has_the_same_handle_and_is_another_one() -> None:
    lender, borrower = Queue(2), Queue(3)
    loan, memory = lend(lender, borrower)
    del loan
    gc.collect()
    assert lender.waited == []
    assert memory() is not None
    loans.settle()
    gc.collect()
    assert memory() is None


def test_what_cannot_be_asked_is_kept_and_keeps_nothing_else() -> None:
    kept, memory, broken = loans.Kept(), Memory(), True
    seen = weakref.ref(memory)

    def is_done() -> bool:
        if broken:
            raise RuntimeError("an illegal memory access was encountered")
        return True

    kept.keep(memory, is_done, lambda: None)
    kept.keep(Memory(), lambda: True, lambda: None)
    del memory
    kept.release()
    assert len(kept) == 1
    assert seen() is not None
    broken = False
    kept.release()
    assert len(kept) == 0
    assert seen() is None


def test_freeing_memory_waits_for_what_is_still_read() -> None:
    borrower = Queue(2)
    loan, memory = lend(Streams(), borrower)
    del loan
    gc.collect()
    assert memory() is not None
    free_memory()
    assert borrower.done
    assert memory() is None


def test_a_card_that_has_failed_hides_no_error_of_ones_own() -> None:
    class Broken(Queue):
        def mark(self, device: Device) -> Mark | None:
            raise RuntimeError("an illegal memory access was encountered")

    loan, memory = lend(Streams(), Broken(3))
    del loan  # an error here would be a warning, and so fail the test
    gc.collect()
    assert memory() is None


def test_what_jax_was_lent_is_kept_until_its_queue_has_got_there() -> None:
    jax = require("jax")
    from arraybridge.frameworks.jax import arrays as room

    memory = Memory()
    seen = weakref.ref(memory)
    lent = jax.device_put(np.arange(3))
    room._lend_to_jax(memory, lent, jax.devices("cpu")[0])
    del memory
    gc.collect()
    assert seen() is not None, "JAX's array is alive"
    del lent
    gc.collect()
    assert seen() is not None, "nobody has asked JAX's queue yet"
    loans.settle()
    gc.collect()
    assert seen() is None


def test_jaxs_queue_may_be_asked_inside_jit() -> None:
    jax = require("jax")
    from arraybridge.frameworks.jax import arrays as room

    memory = Memory()
    seen = weakref.ref(memory)
    lent = jax.device_put(np.arange(3))
    room._lend_to_jax(memory, lent, jax.devices("cpu")[0])
    del memory, lent
    gc.collect()

    @jax.jit
    def traced(x: Any) -> Any:
        loans.release()
        return x + 1

    assert traced(1.0) == 2.0
    loans.release()
    loans.settle()
    gc.collect()
    assert seen() is None


def test_what_tensorflow_was_lent_is_kept_until_its_queue_has_got_there() -> None:
    tf = require("tensorflow")
    from arraybridge.frameworks.tensorflow import arrays as room

    memory = Memory()
    seen = weakref.ref(memory)
    lent = tf.constant([1, 2, 3])
    room._lend_to_tensorflow(memory, lent, Device("cpu", 0))
    del memory
    gc.collect()
    assert seen() is not None, "TensorFlow's tensor is alive"
    del lent
    gc.collect()
    loans.release()
    assert seen() is not None, "its queue was asked for the first time"
    loans.release()
    gc.collect()
    assert seen() is None


@pytest.mark.parametrize("name", ["jax", "tensorflow"])
def test_frameworks_without_queues_keep_what_they_adopt_on_a_card(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On host memory that passes for a card's: torch lends from the card that is selected, and no other."""
    module = require(name)
    framework = arraybridge.framework(name)
    done: list[str] = []

    class Source(Framework):
        """Where the memory comes from, which writes down what it is asked."""

        name = "source"

        def owns(self, x: Any) -> bool:
            return False

        def from_host(self, view: np.ndarray, device: Device) -> Any:
            raise NotImplementedError

        @contextmanager
        def selected(self, device: Device) -> Iterator[None]:
            done.append(f"selected {device}")
            yield
            done.append("left")

        def settle(self, x: Any) -> None:
            done.append("settled")

    if name == "jax":
        from arraybridge.frameworks.jax import arrays as room

        monkeypatch.setattr(room, "jax_device", lambda device: module.devices("cpu")[0])
    else:
        from arraybridge.frameworks.tensorflow import arrays as other

        monkeypatch.setattr(other, "_lend_to_tensorflow", _on_the_cpu(other._lend_to_tensorflow))
    memory = arraybridge.aligned((16,), "float32")
    memory[:] = np.arange(16)
    seen = weakref.ref(memory)
    lent = framework.adopt(memory, Source(), CARD)
    assert done == (["selected gpu:0", "left"] if name == "jax" else ["selected gpu:0", "settled", "left"])
    np.testing.assert_array_equal(np.asarray(lent), np.arange(16, dtype=np.float32))
    del memory, lent
    gc.collect()
    assert seen() is not None, "its queue may still read it"
    loans.settle()
    gc.collect()
    assert seen() is None


def _on_the_cpu(lend: Callable[[Any, Any, Device], None]) -> Callable[[Any, Any, Device], None]:
    return lambda x, lent, device: lend(x, lent, Device("cpu", 0))
