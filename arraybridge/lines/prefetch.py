"""`prefetch`: the next items are read, and converted to a device, while the present one is used."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import Any

from arraybridge.conversion.convert import Grad, convert_tree
from arraybridge.frameworks import registry
from arraybridge.frameworks.base import Framework, find_or_host
from arraybridge.lines.lanes import Lane
from arraybridge.lines.line import BURST, Line, Shown, Station, here
from arraybridge.lines.progress import with_progress
from arraybridge.types import Device, DeviceLike, FrameworkLike, GpuId, check_gpu_id

__all__ = ["prefetch"]

#: What takes the place of an item where there is none any more.
_END = object()


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

    One thread reads, another converts, as far ahead as ``depth`` allows. On a card the second has a stream of
    its own, and the stream of the thread that uses an item waits for the event behind its copy. A loop that
    spends 10 ms in reading an item and 10 ms in using it so takes 10 ms an item, not 20.

    An item is converted before the next one is read: a source may fill one buffer again and again where the
    conversion copies (``copy=True``, a cast, a card), as in a loop that converts. Where it shares memory, the
    items waiting here are that one buffer. A source that never fills a buffer anew may be read during the
    conversion too: ``prefetch(prefetch(items, "numpy"), "torch", 0)``.

    Args:
        items: anything to iterate over: a generator, a list, a ``torch.utils.data.DataLoader``, the files of
            a folder. It is read in a thread of its own.
        framework: the framework to convert to. Arrays in nested containers are converted too, as
            `convert_tree` does; what is no array stays as it is.
        gpu_id: as for `convert_memory`.
        device: as for `convert_memory`.
        depth: how many items are read and wait, besides the one that is used, at most.
        dtype: as for `convert_memory`.
        copy: as for `convert_memory`.
        grad: as for `convert_memory`.
        progress: show a progress bar on the standard error stream.

    Returns:
        an iterator, in the order of the items. When it ends, fails or is dropped half-way, the threads end.

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
    if isinstance(depth, bool) or not isinstance(depth, int):
        raise TypeError(f"depth={depth!r} must be a whole number")
    if depth < 1:
        raise ValueError(f"depth={depth!r} must be at least 1")
    if gpu_id is not None and device is not None:
        raise ValueError(f"pass gpu_id={gpu_id!r} or device={device!r}, not both")
    name = registry.framework_name(framework)
    target = registry.framework(name)
    place = _place(target, gpu_id, device)
    try:
        reader = _Reader(iter(items))
    except TypeError:
        raise TypeError(f"prefetch takes items to iterate over, not {items!r}") from None

    def convert(item: Any) -> Any:
        if item is _END:
            return item
        if place is not None:
            return convert_tree(item, name, device=place, dtype=dtype, copy=copy, grad=grad)
        return convert_tree(item, name, gpu_id, dtype=dtype, copy=copy, grad=grad)

    @contextmanager
    def enter(_: int, lane: Lane) -> Iterator[None]:
        if place is not None and place.kind != "cpu":
            lane.use_stream(target.streams, place)
        yield

    stations = [
        Station(
            [reader.read],
            min(depth, BURST),
            lambda number, _: f"while item {number} was read",
            shown=Shown("item", "read", [""], _END),
        ),
        Station(
            [convert],
            depth,
            lambda number, _: f"item {number}, on its way to {name}",
            enter,
            depth=depth,
            in_step=True,
            shown=Shown("item", f"to {name}", ["" if place is None else str(place)], _END),
        ),
    ]
    results = _given_out(Line(stations, depth, refill=True, at=here()), reader.asked())
    total = len(items) if isinstance(items, Sized) else None
    return with_progress(results, f"to {name}", total) if progress else results


def _place(target: Framework, gpu_id: GpuId, device: DeviceLike | None) -> Device | None:
    """The device that is asked for, where it is known beforehand."""
    index = check_gpu_id(gpu_id)
    if device is not None:
        wanted = Device.parse(device)
    elif isinstance(index, int) and target.name != "numpy":
        wanted = target.accelerator(index)
    else:
        return None
    return find_or_host(target, wanted)


class _Reader:
    """What is read, in a thread that is asked for one item after the other."""

    def __init__(self, source: Iterator[Any]) -> None:
        self.source = source
        self.ended = False

    def asked(self) -> Iterator[None]:
        """Something for each item, until none is left."""
        while not self.ended:
            yield None

    def read(self, _: None) -> Any:
        if self.ended:
            return _END
        try:
            item = next(self.source, _END)
        except BaseException:
            self.ended = True
            raise
        self.ended = item is _END
        return item


def _given_out(line: Line, asked: Iterator[None]) -> Iterator[Any]:
    results = line.run(asked)
    try:
        for item in results:
            if item is _END:
                return
            yield item
            del item
    finally:
        results.close()  # type: ignore[attr-defined]  # a generator
