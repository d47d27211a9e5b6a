"""Pinned buffers through which pageable memory travels to a card and back, in overlapping steps."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import numpy as np

from arraybridge.frameworks import hostmemory
from arraybridge.frameworks.base import Framework
from arraybridge.frameworks.parts import Pinning
from arraybridge.types import Device

__all__ = ["BUFFERS", "CHUNK", "StagingRing", "as_bytes", "fetched", "pinning_of", "sent"]

#: Bytes of one staging buffer, and how many there are: 64 MiB in all.
CHUNK = 4 << 20
BUFFERS = 16


class StagingRing:
    """A few pinned buffers through which pageable memory travels, each used again when its copy is done.

    While one chunk is on the bus, threads copy the next ones between their buffers and pageable memory.
    One transfer at a time goes through a ring: whoever uses it holds its ``lock``.

    Args:
        owner: the framework that locks the pages; others that share its cards may use the ring as well.
        chunk: bytes of a buffer.
        buffers: how many.

    Raises:
        ValueError: the framework has no pinned memory here.
    """

    def __init__(self, owner: Framework, chunk: int = CHUNK, buffers: int = BUFFERS) -> None:
        self.owner = owner
        self.lock = threading.Lock()
        self._chunk = chunk
        pinning = owner.pinning or Pinning()
        memory = [pinning.pinned_bytes(chunk) for _ in range(buffers)]
        self._buffers = [one for one in memory if one is not None]
        if len(self._buffers) < buffers:
            raise ValueError(f"{owner.name} has no card here for which memory could be pinned")
        from concurrent.futures import ThreadPoolExecutor

        # They end with the ring.
        self._threads = ThreadPoolExecutor(
            min(8, buffers, os.cpu_count() or 1), thread_name_prefix="arraybridge-staging"
        )

    @property
    def nbytes(self) -> int:
        """Bytes of its buffers."""
        return self._chunk * len(self._buffers)

    def _step(self, size: int) -> int:
        """Bytes to move at a time: less than a buffer holds where the array would fill only a few of them."""
        return max(1, min(self._chunk, max(self._chunk // 16, -(-size // len(self._buffers)))))

    def send(self, source: np.ndarray, target: Any, by: Pinning) -> None:
        """Copy packed host bytes (uint8, 1-D) into the packed array ``target`` on a card of ``by``.

        Complete on return, and ordered after the work of this thread's current stream.
        """
        buffers, step = len(self._buffers), self._step(source.size)
        pending: list[Callable[[], None] | None] = [None] * buffers

        def fill(n: int) -> np.ndarray:
            waiting = pending[n % buffers]
            if waiting is not None:
                waiting()  # for the copy that used this buffer last
            part = source[n * step : (n + 1) * step]
            staged = self._buffers[n % buffers][: part.size]
            np.copyto(staged, part)
            return staged

        chunks = -(-source.size // step)
        filling: deque[Any] = deque()
        asked = 0
        try:
            for n in range(chunks):
                # Chunk k needs the buffer of chunk k - buffers, whose copy has to be queued before.
                while asked < min(n + buffers, chunks):
                    filling.append(self._threads.submit(fill, asked))
                    asked += 1
                staged = filling.popleft().result()
                pending[n % buffers] = by.enqueue_copy(staged, target, n * step, False)
        finally:
            _finish(filling, pending)

    def fetch(self, source: Any, target: np.ndarray, by: Pinning) -> None:
        """Copy the packed array ``source`` on a card of ``by`` into packed host bytes (uint8, 1-D).

        Complete on return, and ordered after the work of this thread's current stream.
        """
        buffers, step = len(self._buffers), self._step(target.size)
        pending: list[Callable[[], None] | None] = [None] * buffers
        emptied: deque[Any] = deque()

        def empty(i: int, start: int, wait: Callable[[], None]) -> None:
            wait()
            part = target[start : start + step]
            np.copyto(part, self._buffers[i][: part.size])

        try:
            for n, start in enumerate(range(0, target.size, step)):
                if len(emptied) == buffers:
                    emptied.popleft().result()
                i = n % buffers
                size = min(step, target.size - start)
                wait = by.enqueue_copy(self._buffers[i][:size], source, start, True)
                pending[i] = wait
                emptied.append(self._threads.submit(empty, i, start, wait))
            while emptied:
                emptied.popleft().result()
        finally:
            _finish(emptied, pending)


def _finish(futures: Iterable[Any], pending: list[Callable[[], None] | None]) -> None:
    """Leave no thread and no copy behind that still uses the buffers, also after an error."""
    for future in futures:
        future.exception()
    with ExitStack() as stack:  # calls them all, also after one that raises
        for wait in pending:
            if wait is not None:
                stack.callback(wait)


def pinning_of(owner: Framework) -> Pinning:
    """What the framework answers; one without that part has no pinned memory."""
    return owner.pinning or Pinning()


def sent(ring: StagingRing, owner: Framework, source: np.ndarray, device: Device) -> Any:
    """A packed host array on a card of ``owner``, by way of the ring, whose lock the caller holds."""
    target = owner.empty(source.shape, source.dtype.name, device)
    ring.send(as_bytes(source), target, pinning_of(owner))
    return target


def fetched(ring: StagingRing, owner: Framework, x: Any) -> np.ndarray:
    """A packed array of ``owner`` in host memory of its own, by way of the ring."""
    result = hostmemory.packed(owner.shape(x), hostmemory.np_dtype(owner.dtype_name(x)))
    ring.fetch(x, as_bytes(result), pinning_of(owner))
    return result


def as_bytes(array: np.ndarray) -> np.ndarray:
    """The bytes of a packed array, uint8 1-D."""
    return np.asarray(array).reshape(-1).view(np.uint8)
