"""`device_map`: apply a function to many items on several devices at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from numbers import Integral
from typing import Any, Literal, TypeVar

from arraybridge.carriers.sources import source_of
from arraybridge.conversion.convert import convert_memory
from arraybridge.conversion.device_resolution import Placement
from arraybridge.decorators.wrapping import name_of
from arraybridge.device import Device, DeviceLike
from arraybridge.devices.inventory import devices as all_devices
from arraybridge.devices.inventory import find_device
from arraybridge.errors import DeviceNotFoundError, note_on
from arraybridge.interface import registry
from arraybridge.interface.devices import CPU
from arraybridge.interface.framework import Framework
from arraybridge.interface.missing_gpu import find_device_or_host
from arraybridge.interface.registry import loaded
from arraybridge.parallel.current_device import working_on
from arraybridge.parallel.function_devices import placement
from arraybridge.parallel.progress_bar import with_progress
from arraybridge.parallel.stage_chain import Run
from arraybridge.parallel.workers import Work, Worker, note_on_argument_count, noting, source_of_items
from arraybridge.trees import map_arrays
from arraybridge.validation import add_hints, bool_option, whole_number

__all__ = ["device_map"]

T = TypeVar("T")
R = TypeVar("R")

# The maximum number of unreturned items per thread: one in progress, one waiting, two done.
_IN_FLIGHT = 4


@add_hints
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
    """Apply a function to every item, each on any free device, and return an iterator over the results.

    Each device has a thread. The thread moves the arrays of an item to the device within their framework
    (NumPy arrays stay on the host), and selects the device in every loaded framework. A decorated function
    without a device option runs on that device. A decorated function that names a device runs on that one.

    Args:
        fn: A function of one item.
        items: An iterable. The thread that reads the results reads it as devices become free; at most four
            items per thread are read but not yet returned. A source that reuses a buffer must yield copies.
        devices: A list of device strings or accelerator numbers. Defaults to ``"all"``: the accelerators of
            the function's framework, or of all loaded frameworks if the function is not decorated; their CPU
            devices if there are no accelerators.
        per_device: The number of threads per device, each with a separate stream on an accelerator.
        ordered: Whether to return the results in the order of the items. If False, each result is returned as
            soon as it is ready.
        progress: Whether to show a progress bar on the standard error stream.
        processes: Whether to use a spawned process per thread, for functions that hold the GIL. The function,
            the items and the results must be picklable. Data larger than 128 KiB is sent through shared
            memory. Arrays on a GPU stay there if PyTorch is imported (CUDA IPC), otherwise they are copied
            through the host. A script must call `device_map` under ``if __name__ == "__main__":``.
        setup: A function that is called once per worker, on its device, which `get_device` returns there. Its
            return value, such as a model, is passed to ``fn`` before the item.

    Returns:
        An iterator over the results. The threads and processes end when it ends, fails or is deleted.

    Raises:
        TypeError: ``fn`` or ``setup`` is not callable or not picklable, ``items`` is not iterable, or an
            option is of the wrong type.
        ValueError: ``per_device`` or ``devices`` is invalid.
        DeviceNotFoundError: A device does not exist.
        Exception: Any exception raised by ``fn`` or ``items``, with a note that names the item and the
            device. It is raised after the results of the preceding items; with ``ordered=False``, after
            those that are ready.

    >>> import numpy as np
    >>> list(device_map(len, [np.zeros(3), np.zeros(4)], devices=["cpu"]))
    [3, 4]
    >>> def load():
    ...     return np.array([1.0, 10.0])  # a model, on the device of this worker
    >>> [float(y) for y in device_map(np.dot, [np.ones(2), np.ones(2) * 2], devices=["cpu"], setup=load)]
    [11.0, 22.0]
    """
    if not callable(fn):
        raise TypeError(f"device_map expected a function of one item, got {fn!r}.")
    if setup is not None and not callable(setup):
        raise TypeError(f"setup={setup!r} must be a function without arguments.")
    per_device = whole_number("per_device", per_device, least=1)
    for option, value in (("ordered", ordered), ("progress", progress), ("processes", processes)):
        bool_option(option, value)
    source = source_of_items("device_map", items)
    workers = [
        _worker(fn, setup, device, processes)
        for device in _devices_of(fn, devices)
        for _ in range(per_device)
    ]
    results = Run([workers], _IN_FLIGHT * len(workers), ordered=ordered).results(source)
    return with_progress(results, name_of(fn), items) if progress else results


def _worker(fn: Any, setup: Any, device: Device, processes: bool) -> Worker:
    def note(number: int) -> str:
        return f"item {number}, on {device}"

    if not processes:
        return Worker(partial(_in_thread, fn, setup, device), note, "item", name_of(fn), str(device))
    # Imported here, since it is rarely needed.
    from arraybridge.parallel.worker_processes import WorkerProcess

    functions = repr(fn) if setup is None else f"{fn!r} with setup={setup!r}"
    process = WorkerProcess(partial(_in_process, fn, setup, device), functions, str(device))
    return Worker(process.working, note, "item", name_of(fn), str(device), process.stop)


# -- work on one device --------------------------------------------------------------------------


def _own_framework(fn: Any) -> Framework | None:
    """Return the framework of a decorated function; None if ``fn`` is not decorated or converts no arrays."""
    placed = placement(fn)
    if placed is None or placed.framework is None or not placed.converts:
        return None
    return registry.framework(placed.framework)


@contextmanager
def _in_thread(fn: Any, setup: Any, device: Device, worker: Worker) -> Iterator[Work]:
    with working_on(device, worker):
        yield _prepare(fn, setup, device)


def _in_process(fn: Any, setup: Any, device: Device) -> Work:
    """Return the function that a separate process calls with each item."""
    with working_on(device):
        work = _prepare(fn, setup, device)

    def on_device(item: Any) -> Any:
        with working_on(device):
            return work(item)

    return on_device


def _prepare(fn: Any, setup: Any, device: Device) -> Work:
    """Return the function to call with each item, after calling ``setup``."""
    arguments: tuple[Any, ...] = ()
    if setup is not None:
        with noting(f"in setup, on {device}"):
            arguments = (setup(),)
    if _own_framework(fn) is None:
        return lambda item: _call(fn, *arguments, _move(item, device))
    # A decorated function moves its arrays to the device itself, from any framework.
    return lambda item: _call(fn, *arguments, item)


def _call(fn: Any, *args: Any) -> Any:
    try:
        return fn(*args)
    except TypeError as error:
        got = (
            "one argument, the item" if len(args) == 1 else "two arguments, the result of setup= and the item"
        )
        note = (
            f"arraybridge: device_map calls the function with {got}. Set other arguments with"
            " functools.partial."
        )
        note_on_argument_count(error, fn, len(args), note)
        raise


def _move(item: Any, device: Device) -> Any:
    """Return the item with its arrays on the device, each in its framework; NumPy arrays stay on the host."""

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
                f"device_map moves arrays within their framework, but {source.name} does not have {device}."
                " Pass other devices=, or decorate the function for the framework in which it should run.",
            )
            raise

    return map_arrays(item, place)


# -- device options ---------------------------------------------------------------------------------


def _devices_of(fn: Any, devices: Any) -> list[Device]:
    """Return the devices on which to run the function."""
    framework = _own_framework(fn)
    if devices is None or (isinstance(devices, str) and devices == "all"):
        usable = _usable_devices(framework, placement(fn))
        return [device for device in usable if device.kind != "cpu"] or usable or [CPU]
    return _choose_devices(devices, framework)


def _usable_devices(framework: Framework | None, placed: Placement | None) -> list[Device]:
    """Return the device that the decorator sets, otherwise all devices of the function's framework.

    For a function without a framework, return the devices of every loaded framework, except OpenCL devices.
    """
    if framework is None:
        available = all_devices([one.name for one in loaded()])
        return [device for device in available if device.kind != "opencl"]
    fixed = placed.resolve(framework) if placed is not None and placed.is_fixed else None
    return list(framework.devices.available()) if fixed is None else [fixed]


def _choose_devices(devices: Any, framework: Framework | None) -> list[Device]:
    """Return the devices that the caller lists. Raise `ValueError` if a device is listed twice."""
    expected = (
        f"devices={devices!r} must be 'all', a device such as 'cpu' or 'gpu:0', or a list of devices, such as"
        " ['gpu:0', 'gpu:1']."
    )
    if isinstance(devices, Integral):
        raise TypeError(expected)
    is_list = isinstance(devices, Sequence) and not isinstance(devices, str)
    items = devices if is_list else [devices]
    if not items:
        raise ValueError("devices=[] has no device to run on. Pass devices='all', or omit the option.")
    try:
        named = [_parse(item, framework) for item in items]
    except ValueError as error:
        if is_list:
            raise
        raise ValueError(expected) from error
    for i, device in enumerate(named):
        if device in named[:i]:
            raise ValueError(
                f"devices= lists {device} twice. To run two threads per device, pass per_device=2."
            )
    # The host may replace several missing devices, but is returned only once.
    return list(dict.fromkeys(_find(device, framework) for device in named))


def _parse(item: Any, framework: Framework | None) -> Device:
    if not isinstance(item, Integral):
        return Device.parse(item)
    if isinstance(item, bool) or item < 0:
        raise ValueError(
            f"devices= contains {item!r}, which is not a GPU number. Pass 0, 1, … or device strings, such"
            " as 'gpu:0'."
        )
    return Device("gpu", int(item)) if framework is None else framework.devices.accelerator(int(item))


def _find(device: Device, framework: Framework | None) -> Device:
    return find_device(device) if framework is None else find_device_or_host(framework, device)
