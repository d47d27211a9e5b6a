"""`device_map`: one function over many items, on several devices at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from numbers import Integral
from typing import Any, Literal, TypeVar

from arraybridge.carriers.sources import source_of
from arraybridge.conversion.convert import convert_memory
from arraybridge.conversion.placement import Placement, check_gpu_id
from arraybridge.decorators.wrapping import name_of
from arraybridge.devices.inventory import devices as all_devices
from arraybridge.devices.inventory import find_device
from arraybridge.errors import DeviceNotFoundError, note_on
from arraybridge.frameworks import registry
from arraybridge.frameworks.base import CPU, Framework, find_or_host
from arraybridge.frameworks.registry import loaded
from arraybridge.parallel.current_device import working_on
from arraybridge.parallel.function_devices import placement
from arraybridge.parallel.item_sources import source_of_items
from arraybridge.parallel.progress_bar import with_progress
from arraybridge.parallel.workers import Run, Shown, Work, Worker, noting
from arraybridge.trees import map_arrays
from arraybridge.types import Device, DeviceLike
from arraybridge.validation import whole_number

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
    function that names no device runs there too, and one that names its own runs on its own.

    Args:
        fn: a function of one item.
        items: read by the thread that asks for the results, as devices become free; at most four items a
            thread are read and not handed out. A source that fills one buffer anew has to yield copies.
        devices: ``"all"``: the accelerators of the function's framework, or where it is not decorated of all
            loaded frameworks; where there is none, their CPU devices. Else a list of devices in words, or of
            numbers of accelerators.
        per_device: threads a device, each with a stream of its own on an accelerator.
        ordered: give the results in the order of the items; False: as they are ready.
        progress: show a progress bar on the standard error stream.
        processes: a spawned process in place of each thread, for functions that hold Python's lock. Function,
            items and results must pickle; what is larger than 128 KiB goes by shared memory, and what is on a
            card stays there where torch is imported (CUDA IPC), else it goes by way of the host. A script
            must keep its own start under ``if __name__ == "__main__":``.
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
    whole_number("per_device", per_device, least=1)
    source = source_of_items("device_map", items)
    workers = [
        _worker(fn, setup, device, processes)
        for device in _devices_of(fn, devices)
        for _ in range(per_device)
    ]
    results = Run([workers], _IN_FLIGHT * len(workers), ordered=ordered).results(source)
    return with_progress(results, name_of(fn), items) if progress else results


def _worker(fn: Any, setup: Any, device: Device, processes: bool) -> Worker:
    shown = Shown("item", name_of(fn), str(device))

    def note(number: int) -> str:
        return f"item {number}, on {device}"

    if not processes:
        return Worker(partial(_in_thread, fn, setup, device), note, shown)
    from arraybridge.parallel.worker_processes import WorkerProcess  # which most programs do not need

    functions = repr(fn) if setup is None else f"{fn!r} with setup={setup!r}"
    process = WorkerProcess(partial(_in_process, fn, setup, device), functions, str(device))
    return Worker(process.working, note, shown, process.stop)


# -- working for one device --------------------------------------------------------------------------


def _own_framework(fn: Any) -> Framework | None:
    """The framework of a decorated function; None where arrays reach the function as they are."""
    placed = placement(fn)
    if placed is None or placed.framework is None or not placed.converts:
        return None
    return registry.framework(placed.framework)


@contextmanager
def _in_thread(fn: Any, setup: Any, device: Device, worker: Worker) -> Iterator[Work]:
    with working_on(device, worker):
        yield _prepared(fn, setup, device)


def _in_process(fn: Any, setup: Any, device: Device) -> Work:
    """What a process of its own does with each item, which may bring its framework."""
    with working_on(device):
        work = _prepared(fn, setup, device)

    def on_device(item: Any) -> Any:
        with working_on(device):
            return work(item)

    return on_device


def _prepared(fn: Any, setup: Any, device: Device) -> Work:
    """The function of an item, once ``setup`` has made what comes before the item."""
    made: tuple[Any, ...] = ()
    if setup is not None:
        with noting(f"in setup, on {device}"):
            made = (setup(),)
    if _own_framework(fn) is None:
        return lambda item: fn(*made, _move(item, device))
    # A decorated function brings its arrays to the device by itself, from any framework.
    return lambda item: fn(*made, item)


def _move(item: Any, device: Device) -> Any:
    """The item with its arrays on the device, each in its own framework; NumPy's stay on the host."""

    def place(x: Any) -> Any:
        source, array = source_of(x)
        if source.devices.has_only_host:
            return x
        gathered = not source.devices.is_scattered(array)
        if gathered and source.devices.device_of(array) == device:
            return x
        try:
            return convert_memory(x, source.name, device=device)
        except DeviceNotFoundError as error:
            note_on(
                error,
                f"device_map moves arrays within their framework, and {source.name} has no {device};"
                " pass devices= that it has, or decorate the function for the framework that it is to run in",
            )
            raise

    return map_arrays(item, place)


# -- what users pass ---------------------------------------------------------------------------------


def _devices_of(fn: Any, devices: Any) -> list[Device]:
    """Return the devices to run on."""
    framework = _own_framework(fn)
    if devices is None or (isinstance(devices, str) and devices == "all"):
        usable = _usable_devices(framework, placement(fn))
        return [device for device in usable if device.kind != "cpu"] or usable or [CPU]
    return _chosen_devices(devices, framework)


def _usable_devices(framework: Framework | None, placed: Placement | None) -> list[Device]:
    """Return the devices of a decorated function's framework, or of every loaded one."""
    if framework is None:
        found = all_devices([one.name for one in loaded()])
        return [device for device in found if device.kind != "opencl"]
    fixed = placed.resolve(framework) if placed is not None and placed.is_fixed else None
    return list(framework.devices.available()) if fixed is None else [fixed]


def _chosen_devices(devices: Any, framework: Framework | None) -> list[Device]:
    """Return the devices that the caller lists, each once."""
    if isinstance(devices, Integral):
        raise TypeError(f"devices={devices!r} must be 'all', or a list of devices as ['gpu:0', 'gpu:1']")
    is_list = isinstance(devices, Sequence) and not isinstance(devices, str)
    items = devices if is_list else [devices]
    if not items:
        raise ValueError("devices=[] leaves none to run on; pass 'all', or leave it out")
    asked = [_parsed(item, framework) for item in items]
    for i, device in enumerate(asked):
        if device in asked[:i]:
            raise ValueError(f"{device} is given twice; per_device=2 runs two threads on each device")
    # Several that are missing become the host once.
    return list(dict.fromkeys(_found(device, framework) for device in asked))


def _parsed(item: Any, framework: Framework | None) -> Device:
    if not isinstance(item, Integral):
        return Device.parse(item)
    check_gpu_id(item)
    return Device("gpu", int(item)) if framework is None else framework.devices.accelerator(int(item))


def _found(device: Device, framework: Framework | None) -> Device:
    return find_device(device) if framework is None else find_or_host(framework, device)
