"""`prefetch`: read the next items and convert them to a device while the current item is used."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Any

from arraybridge.conversion.convert import Grad
from arraybridge.conversion.device_resolution import check_placement, resolve_device
from arraybridge.conversion.tree_conversion import convert_tree
from arraybridge.device import Device, DeviceLike
from arraybridge.interface import registry
from arraybridge.interface.framework import Framework
from arraybridge.memory.pinned_memory import page_locked_copy
from arraybridge.parallel.progress_bar import with_progress
from arraybridge.parallel.stage_chain import Run
from arraybridge.parallel.streams_between_threads import wait_for_each_other
from arraybridge.parallel.workers import END, Work, Worker, source_of_items
from arraybridge.tracing import trace_log
from arraybridge.trees import map_arrays
from arraybridge.types import FrameworkLike, GpuId
from arraybridge.validation import add_hints, bool_option, whole_number

__all__ = ["prefetch"]

# The maximum number of items that are read ahead, even if depth is greater: a request for each of these
# items is queued at the start.
_MOST = 1000
# Seconds that the interpreter waits for the thread at exit, since a source may block forever.
_FINAL_TIMEOUT = 2.0


@add_hints
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
    """Return an iterator that reads and converts the next items while the current item is used.

    A thread reads and converts up to ``depth`` items ahead. On a GPU, the thread has a separate stream, and
    the stream that uses an item waits for the event that marks the end of its copy. For CuPy and PyTorch,
    arrays in host memory are copied to page-locked memory first, as `pinned` does. A loop that spends 10 ms
    reading and 10 ms using each item then takes 10 ms per item instead of 20.

    Each item is converted before the next one is read. A source may therefore reuse one buffer if the
    conversion copies (``copy=True``, a cast, or a GPU). If the conversion shares memory, all waiting items
    would share that one buffer. A source that never reuses a buffer can also be read during the conversion:
    ``prefetch(prefetch(items, "numpy"), "torch", 0)``.

    Args:
        items: An iterable, such as a generator, a list or a ``torch.utils.data.DataLoader``. A separate
            thread reads it.
        framework: The framework to convert to. Arrays in nested containers are converted too, as in
            `convert_tree`; other values are unchanged.
        gpu_id: The accelerator, as in `convert_memory`.
        device: The device, instead of ``gpu_id``, as in `convert_memory`.
        dtype: The dtype, as in `convert_memory`.
        copy: Whether to copy, as in `convert_memory`.
        grad: How to treat gradients, as in `convert_memory`.
        depth: The maximum number of items that wait, in addition to the current one. Values above 1000
            have the same effect as 1000.
        progress: Whether to show a progress bar on the standard error stream.

    Returns:
        An iterator in the order of the items. The thread ends when the iterator ends, raises or is deleted.

    Raises:
        TypeError: ``items`` is not iterable, ``depth`` is not an int, or ``progress`` is not a bool.
        ValueError: ``depth`` is less than 1, ``gpu_id`` and ``device`` are both passed, or one is invalid.
        UnknownFrameworkError: No framework has that name.
        FrameworkNotInstalledError: The framework is not installed.
        DeviceNotFoundError: The framework does not have the device.
        Exception: Any exception raised by ``items`` or by a conversion, with a note that names the item. It
            is raised after the preceding items.

    >>> import numpy as np
    >>> for batch in prefetch([{"x": np.ones(2), "name": "a"}, {"x": np.zeros(2), "name": "b"}], "torch"):
    ...     print(batch["name"], batch["x"].sum())
    a tensor(2., dtype=torch.float64)
    b tensor(0., dtype=torch.float64)
    """
    depth = whole_number("depth", depth, least=1)
    bool_option("progress", progress)
    number, named = check_placement(gpu_id, device)
    name = registry.framework_name(framework)
    target = registry.framework(name)
    # "auto" is resolved for each item, since free memory changes.
    place = None if number == "auto" else resolve_device(target, number, named)
    options = {"dtype": dtype, "copy": copy, "grad": grad, "gpu_id": gpu_id if place is None else None}
    pins = None if number == "auto" or _is_gpu(target, place) else False
    reader = _Reader(source_of_items("prefetch", items), target, place, options, pins)
    # The limit is one more than the depth, since the item in use counts too.
    run = Run(
        [[Worker(reader.working, reader.note, depth=depth)]],
        min(depth, _MOST) + 1,
        refill=True,
        final_timeout=_FINAL_TIMEOUT,
    )
    results = run.results(repeat(None))
    return with_progress(results, f"to {name}", items) if progress else results


def _is_gpu(target: Framework, place: Device | None) -> bool:
    """Return whether host arrays are sent to a GPU.

    If ``place`` is None, the arrays stay on the host if the framework supports host arrays.
    """
    return not target.has_host if place is None else place.kind == "gpu"


@dataclass(slots=True, eq=False)
class _Reader:
    """The work of the `prefetch` thread: reading and converting the items.

    Attributes:
        source: The items.
        target: The framework to convert to.
        place: The device to convert to; None if it is not known in advance.
        options: Further options of `convert_tree`.
        pins: Whether to pin host arrays; None if it is not yet known whether the framework has page-locked
            memory.
        is_read: Whether the current item has been read and is being converted.
    """

    source: Iterator[Any]
    target: Framework
    place: Device | None
    options: dict[str, Any]
    pins: bool | None
    is_read: bool = False

    def note(self, number: int) -> str:
        """Return the note for an exception raised for an item."""
        if self.is_read:
            return f"while converting item {number} to {self.target.name}"
        return f"while reading item {number}"

    @contextmanager
    def working(self, worker: Worker) -> Iterator[Work]:
        """Yield the function that reads and converts one item.

        If the target device is an accelerator, this thread uses a separate stream on it.
        """
        if self.place is not None and self.place.kind != "cpu":
            worker.use_stream(self.target.streams, self.place)
        yield partial(self._work, worker)

    def _work(self, worker: Worker, _: None) -> Any:
        self.is_read = False
        item = _trace("read", self.place, partial(next, self.source, END))
        if item is END:
            return END
        self.is_read = True
        result = _trace(f"to {self.target.name}", self.place, partial(self._convert, item))
        # The source may reuse the item's memory on the stream of its framework. That stream must therefore
        # wait until other streams have read the memory.
        wait_for_each_other(worker.keep_alive_until_done(item))
        return result

    def _convert(self, item: Any) -> Any:
        if self._is_pinning():
            # The conversion returns when the copy is complete, and the pinned arrays are then freed.
            item = map_arrays(item, partial(page_locked_copy, target=self.target))
        return convert_tree(item, self.target.name, device=self.place, **self.options)

    def _is_pinning(self) -> bool:
        """Return whether to pin host arrays: False until the target framework has initialized a GPU."""
        # Before the framework initializes a GPU, pinning memory would create a context on the current GPU.
        if self.pins is None and self.target.devices.is_started():
            self.pins = self.target.memory.allocate_pinned(1) is not None
        return bool(self.pins)


def _trace(name: str, place: Device | None, work: Callable[[], Any]) -> Any:
    span = trace_log.span("item", name) if trace_log.open_logs else None
    if span is None:
        return work()
    span.device = "" if place is None else str(place)
    with span:
        result = work()
        if result is END:
            span.drop()
    return result
