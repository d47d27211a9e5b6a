"""`device_map`: one function over many items, on several devices at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

from arraybridge.devices.discovery import devices as all_devices
from arraybridge.devices.discovery import find_device
from arraybridge.frameworks.base import CPU, find_or_host
from arraybridge.frameworks.registry import loaded
from arraybridge.lines.followed import for_other_threads
from arraybridge.lines.lanes import Lane
from arraybridge.lines.line import Line, Station, here
from arraybridge.lines.on_device import call_setup, move, own_framework, shown, working_on
from arraybridge.lines.progress import with_progress
from arraybridge.options import OneWarning, after_one_warning
from arraybridge.placement import placement
from arraybridge.types import Device, DeviceLike, check_gpu_id

__all__ = ["device_map"]

T = TypeVar("T")
R = TypeVar("R")

# Items a thread that are read and not handed out yet, at most: one in work, one waiting, two done.
_IN_FLIGHT = 4


def device_map(
    fn: Callable[..., R],
    items: Iterable[T],
    devices: Literal["all"] | DeviceLike | Sequence[DeviceLike | int] = "all",
    *,
    per_device: int = 1,
    ordered: bool = True,
    progress: bool = False,
    processes: bool = False,
    setup: Callable[[], Any] | None = None,
) -> Iterator[R]:
    """Apply a function to every item, each on whichever device is free; an iterator of the results.

    Each device has a thread. It moves the arrays of an item to the device (within their framework; NumPy
    arrays stay on the host), and makes the device the current one of every loaded framework. A decorated
    function that names no device runs there too, whatever arrays it gets, and one that names its own runs on
    its own.

    Args:
        fn: a function of one item.
        items: read by the thread that asks for the results, as devices become free; at most four items a
            thread are read and not handed out. Items wait as they are while the next are read: a source that
            fills one buffer anew has to yield copies.
        devices: ``"all"``: the accelerators of the function's framework, or where it is not decorated of all
            loaded frameworks; where there is none, their CPU devices. Else a list of devices in words, or of
            numbers of accelerators.
        per_device: threads a device, each with a stream of its own on an accelerator.
        ordered: give the results in the order of the items; False: as they are ready.
        progress: show a progress bar on the standard error stream.
        processes: a spawned process in place of each thread, for functions that hold Python's lock. Function,
            items and results must pickle; a function that is defined in a module does. They are copied, those
            on a card by way of the host. A script must keep its own start under
            ``if __name__ == "__main__":``.
        setup: is called once in each worker, on its device, which `get_device` tells there; what it returns
            is handed to ``fn`` before the item: a model, of which each device has one.

    Returns:
        an iterator. When it ends, fails or is dropped half-way, the threads and processes end.

    Raises:
        TypeError: ``fn`` or ``setup`` is no function or does not pickle, ``items`` cannot be iterated over.
        ValueError: ``per_device`` or ``devices`` has no sense.
        DeviceNotFoundError: a device is not there.
        Exception: what ``fn`` or ``items`` raise, with a note that names the item and the device. The results
            of the items before it come first; with ``ordered=False`` those that are ready.

    >>> import numpy as np
    >>> list(device_map(len, [np.zeros(3), np.zeros(4)], devices=["cpu"]))
    [3, 4]
    >>> def load():
    ...     return np.array([1.0, 10.0])  # a model, on the device of this worker: get_device()
    >>> [float(y) for y in device_map(np.dot, [np.ones(2), np.ones(2) * 2], devices=["cpu"], setup=load)]
    [11.0, 22.0]
    """
    if not callable(fn):
        raise TypeError(f"device_map takes a function of one item, not {fn!r}")
    if setup is not None and not callable(setup):
        raise TypeError(f"setup={setup!r} must be a function without arguments")
    if isinstance(per_device, bool) or not isinstance(per_device, int):
        raise TypeError(f"per_device={per_device!r} must be a whole number")
    if per_device < 1:
        raise ValueError(f"per_device={per_device!r} must be at least 1")
    try:
        source = iter(items)
    except TypeError:
        raise TypeError(f"device_map takes items to iterate over, not {items!r}") from None
    with OneWarning():
        chosen = [d for d in _chosen(fn, devices) for _ in range(per_device)]
        if processes:
            from arraybridge.lines.processes import process_station

            station = process_station(fn, chosen, setup)
        else:
            station = _thread_station(fn, chosen, setup)
        line = Line([station], _IN_FLIGHT * len(chosen), ordered, at=here())
    total = len(items) if isinstance(items, Sized) else None
    results = line.run(for_other_threads(source))
    name = getattr(fn, "__name__", "device_map")
    return with_progress(results, name, total) if progress else results


# -- which devices -----------------------------------------------------------------------------------


def _chosen(fn: Any, wanted: Any) -> list[Device]:
    framework = own_framework(fn)
    if wanted is None or (isinstance(wanted, str) and wanted == "all"):
        if framework is not None:
            placed = placement(fn)
            own = None if placed is None else placed.named_device()
            if own is not None:
                return [own]
            there: Sequence[Device] = framework.devices()
        else:
            there = [d for d in all_devices([one.name for one in loaded()]) if d.kind != "opencl"]
        accelerators = [d for d in there if d.kind != "cpu"]
        return accelerators or list(there) or [CPU]
    if isinstance(wanted, (str, Device)):
        wanted = [wanted]
    if not isinstance(wanted, Sequence):
        raise TypeError(f"devices={wanted!r} must be 'all', or a list of devices as ['gpu:0', 'gpu:1']")
    if not wanted:
        raise ValueError("devices=[] leaves none to run on; pass 'all', or leave it out")
    asked: list[Device] = []
    found: list[Device] = []
    host = False
    for word in wanted:
        if isinstance(word, (str, Device)):
            device = Device.parse(word)
        else:
            index = check_gpu_id(word)
            if not isinstance(index, int):
                raise ValueError(f"devices={wanted!r} names {word!r}, which is no device; pass 'gpu:0' or 0")
            device = framework.accelerator(index) if framework is not None else Device("gpu", index)
        with after_one_warning(host):
            one = find_device(device) if framework is None else find_or_host(framework, device)
        stands_in = one == CPU and device.kind != "cpu"
        if device in asked or (one in found and not stands_in):
            raise ValueError(f"{device} is given twice; per_device=2 runs two threads on each device")
        asked.append(device)
        if stands_in:
            host = True
        else:
            found.append(one)
    return [*found, CPU] if host and CPU not in found else found  # once, for however many it stands


# -- one thread a device -----------------------------------------------------------------------------


def _thread_station(fn: Callable[..., Any], chosen: list[Device], setup: Callable[[], Any] | None) -> Station:
    decorated = own_framework(fn) is not None
    made: list[tuple[Any, ...]] = [()] * len(chosen)

    def worker(w: int) -> Callable[[Any], Any]:
        # A decorated function brings its arrays to the device by itself, from any framework.
        if setup is None:
            return fn if decorated else lambda item: fn(move(item, chosen[w]))
        return lambda item: fn(*made[w], item if decorated else move(item, chosen[w]))

    @contextmanager
    def enter(w: int, lane: Lane) -> Iterator[None]:
        with working_on(chosen[w], lane):
            if setup is not None:
                made[w] = (call_setup(setup, chosen[w]),)
            try:
                yield
            finally:
                made[w] = ()

    return Station(
        [worker(w) for w in range(len(chosen))],
        len(chosen),
        lambda number, w: f"item {number}, on {chosen[w]}",
        enter,
        shown=shown(fn, chosen),
    )
