"""`prefetch`: the next items are read, and converted to a device, while the present one is used."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import repeat
from typing import Any

from arraybridge.conversion.convert import Grad, convert_tree
from arraybridge.conversion.placement import check_placement, resolve_device
from arraybridge.frameworks import registry
from arraybridge.frameworks.base import Framework
from arraybridge.parallel.item_sources import source_of_items
from arraybridge.parallel.progress_bar import with_progress
from arraybridge.parallel.stream_synchronization import wait_for_each_other
from arraybridge.parallel.workers import END, Run, Work, Worker
from arraybridge.tracing import trace_log
from arraybridge.types import Device, DeviceLike, FrameworkLike, GpuId
from arraybridge.validation import whole_number

__all__ = ["prefetch"]

# Items that are read ahead at most, whatever depth is asked for: each has its turn from the beginning.
_MOST = 1000
# Seconds that the end of the program waits for the thread: a source may be stuck for ever.
_FINAL_TIMEOUT = 2.0


def prefetch(
    items: Iterable[Any],
    framework: FrameworkLike,
    gpu_id: GpuId = None,
    *,
    device: DeviceLike | None = None,
    depth: int = 2,
    dtype: Any = None,
    copy: bool | None = None,
    grad: Grad = "error",
    progress: bool = False,
) -> Iterator[Any]:
    """Keep the next items converted, and on the device, while the present one is used.

    A thread reads and converts, as far ahead as ``depth`` allows. On a card it has a stream of its own, and
    the stream of the thread that uses an item waits for the event behind its copy. A loop that spends 10 ms
    in reading an item and 10 ms in using it so takes 10 ms an item, not 20.

    An item is converted before the next one is read: a source may fill one buffer again and again where the
    conversion copies (``copy=True``, a cast, a card), as in a loop that converts. Where it shares memory, the
    items waiting here are that one buffer. A source that never fills a buffer anew may be read during the
    conversion too: ``prefetch(prefetch(items, "numpy"), "torch", 0)``.

    Args:
        items: anything to iterate over: a generator, a list, a ``torch.utils.data.DataLoader``, the files of
            a folder. It is read in a thread of its own.
        framework: the framework to convert to. Arrays in nested containers are converted too, as
            `convert_tree` does; what is no array stays as it is.
        gpu_id: the accelerator, as for `convert_memory`.
        device: any device instead, as for `convert_memory`.
        dtype: as for `convert_memory`.
        copy: as for `convert_memory`.
        grad: as for `convert_memory`.
        depth: how many items are read and wait, besides the one that is used, at most; never over 1000.
        progress: show a progress bar on the standard error stream.

    Returns:
        an iterator, in the order of the items. When it ends, fails or is dropped half-way, the thread ends.

    Raises:
        TypeError: ``items`` cannot be iterated over, ``depth`` is no whole number.
        ValueError: ``depth`` is below 1, ``gpu_id`` and ``device`` are given both, or have no sense.
        UnknownFrameworkError, FrameworkNotInstalledError: there is no such framework.
        DeviceNotFoundError: it has no such device.
        Exception: what ``items`` raises, or the conversion of an item, with a note that says the item's
            number; the items before it are given out first.

    >>> import numpy as np
    >>> for batch in prefetch([{"x": np.ones(2), "name": "a"}, {"x": np.zeros(2), "name": "b"}], "torch"):
    ...     print(batch["name"], batch["x"].sum())
    a tensor(2., dtype=torch.float64)
    b tensor(0., dtype=torch.float64)
    """
    whole_number("depth", depth, least=1)
    number, named = check_placement(gpu_id, device)
    name = registry.framework_name(framework)
    target = registry.framework(name)
    # "auto" is resolved for each item, since free memory changes.
    place = None if number == "auto" else resolve_device(target, number, named)
    options = {"dtype": dtype, "copy": copy, "grad": grad, "gpu_id": gpu_id if place is None else None}
    reader = _Reader(source_of_items("prefetch", items), target, place, options)
    # The item that is used is one of them, from when it is asked for.
    run = Run(
        [[Worker(reader.working, reader.note, depth=depth)]],
        min(depth, _MOST) + 1,
        refill=True,
        final_timeout=_FINAL_TIMEOUT,
    )
    results = run.results(repeat(None))
    return with_progress(results, f"to {name}", items) if progress else results


class _Reader:
    """Reads items in a thread and converts them.

    Args:
        source: the items.
        target: the framework to convert to.
        place: the device to convert to, if it is known beforehand.
        options: further options of `convert_tree`.
    """

    def __init__(
        self, source: Iterator[Any], target: Framework, place: Device | None, options: dict[str, Any]
    ) -> None:
        self.source = source
        self.target = target
        self.place = place
        self.options = options
        #: Whether the present item has been read, and is being converted.
        self.is_read = False

    def note(self, number: int) -> str:
        """Return the note on an error at an item."""
        if self.is_read:
            return f"item {number}, on its way to {self.target.name}"
        return f"while item {number} was read"

    @contextmanager
    def working(self, worker: Worker) -> Iterator[Work]:
        """Work in this thread, on a separate stream of an accelerator."""
        if self.place is not None and self.place.kind != "cpu":
            worker.use_stream(self.target.streams, self.place)
        yield partial(self._work, worker)

    def _work(self, worker: Worker, _: None) -> Any:
        self.is_read = False
        item = _traced("read", self.place, self._read)
        if item is END:
            return END
        self.is_read = True
        result = _traced(f"to {self.target.name}", self.place, partial(self._convert, item))
        # The source fills its memory anew on its framework's stream, after what reads it on others.
        wait_for_each_other(worker.keep_alive_until_done(item))
        return result

    def _read(self) -> Any:
        return next(self.source, END)

    def _convert(self, item: Any) -> Any:
        return convert_tree(item, self.target.name, device=self.place, **self.options)


def _traced(name: str, place: Device | None, work: Callable[[], Any]) -> Any:
    span = trace_log.span("item", name) if trace_log.open_logs else None
    if span is None:
        return work()
    span.device = "" if place is None else str(place)
    with span:
        result = work()
        if result is END:
            span.drop()
    return result
