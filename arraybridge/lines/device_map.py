"""`device_map`: one function over many items, on several devices at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import Any, Literal, TypeVar

from arraybridge.devices.discovery import devices as all_devices
from arraybridge.devices.discovery import find_device
from arraybridge.frameworks.base import CPU, find_or_host
from arraybridge.frameworks.registry import loaded
from arraybridge.functions.wrap import name_of
from arraybridge.lines.followed import for_other_threads
from arraybridge.lines.on_device import Job, own_framework
from arraybridge.lines.run import Run, Worker
from arraybridge.options import OneWarning, after_one_warning
from arraybridge.placement import placement
from arraybridge.types import Device, DeviceLike, check_gpu_id

__all__ = ["device_map", "source_of_items", "whole_number", "with_progress"]

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
            items and results must pickle; what is larger than 1 MiB goes by shared memory, and what is on a
            card by way of the host. A script must keep its own start under ``if __name__ == "__main__":``.
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
    whole_number("per_device", per_device)
    source = source_of_items("device_map", items)
    with OneWarning():
        chosen = [d for d in _chosen(fn, devices) for _ in range(per_device)]
        if processes:
            from arraybridge.lines.processes import process_jobs

            jobs: Sequence[Any] = process_jobs(fn, setup, chosen)
        else:
            jobs = [Job(fn, setup, device) for device in chosen]
        workers = [_worker(fn, job, device) for job, device in zip(jobs, chosen, strict=True)]
        run = Run([workers], _IN_FLIGHT * len(chosen), ordered=ordered)
    results = run.results(for_other_threads(source))
    return with_progress(results, getattr(fn, "__name__", "device_map"), items) if progress else results


def _worker(fn: Any, job: Any, device: Device) -> Worker:
    shown = ("item", name_of(fn), str(device))
    return Worker(job, lambda number: f"item {number}, on {device}", shown, job.working)


# -- what users pass ---------------------------------------------------------------------------------


def whole_number(name: str, value: Any, least: int | None = 1) -> None:
    """Refuse what is no number of something."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r} must be a whole number")
    if least is not None and value < least:
        raise ValueError(f"{name}={value!r} must be at least {least}")


def source_of_items(who: str, items: Any) -> Iterator[Any]:
    """What is read item by item."""
    try:
        return iter(items)
    except TypeError:
        raise TypeError(f"{who} takes items to iterate over, not {items!r}") from None


def with_progress(results: Iterator[Any], name: str, items: Any) -> Iterator[Any]:
    """The results, with a bar on the standard error stream that counts them."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(name, total=len(items) if isinstance(items, Sized) else None)
        try:
            for result in results:
                bar.advance(task)
                yield result
        finally:
            results.close()  # type: ignore[attr-defined]  # a generator


def _chosen(fn: Any, wanted: Any) -> list[Device]:
    """The devices to run on."""
    framework = own_framework(fn)
    if wanted is None or (isinstance(wanted, str) and wanted == "all"):
        if framework is None:
            usable: Sequence[Device] = all_devices([one.name for one in loaded()])
            usable = [device for device in usable if device.kind != "opencl"]
        else:
            placed = placement(fn)
            own = None if placed is None else placed.named_device()
            usable = framework.devices() if own is None else [own]
        return [device for device in usable if device.kind != "cpu"] or list(usable) or [CPU]
    if not isinstance(wanted, Sequence) or isinstance(wanted, str):
        if not isinstance(wanted, (str, Device)):
            raise TypeError(f"devices={wanted!r} must be 'all', or a list of devices as ['gpu:0', 'gpu:1']")
        wanted = [wanted]
    if not wanted:
        raise ValueError("devices=[] leaves none to run on; pass 'all', or leave it out")
    asked: list[Device] = []
    chosen: list[Device] = []
    host = False
    for word in wanted:
        device = _parsed(word, framework)
        with after_one_warning(host):
            one = find_device(device) if framework is None else find_or_host(framework, device)
        stands_in = one == CPU and device.kind != "cpu"
        if device in asked or (one in chosen and not stands_in):
            raise ValueError(f"{device} is given twice; per_device=2 runs two threads on each device")
        asked.append(device)
        host = host or stands_in
        if not stands_in:
            chosen.append(one)
    return [*chosen, CPU] if host and CPU not in chosen else chosen  # once, for however many it stands


def _parsed(word: Any, framework: Any) -> Device:
    if not hasattr(word, "__index__"):
        return Device.parse(word)
    index = check_gpu_id(word)
    assert isinstance(index, int)
    return framework.accelerator(index) if framework is not None else Device("gpu", index)
