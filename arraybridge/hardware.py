"""Query the NVIDIA GPUs and the memory of this machine through nvidia-ml-py and psutil.

No function here imports a framework, creates a CUDA context or initializes the CUDA driver. The process can
therefore still be forked afterwards.

Both packages are imported on first use, because importing them takes 0.1 s.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from arraybridge import cuda_driver


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU, or one MIG slice of a GPU.

    Attributes:
        index: The CUDA device number in this process.
        name: The product name that the driver reports.
        uuid: ``"GPU-…"``, or ``"MIG-…"`` for a slice.
        pci: The PCI bus address, such as ``"0000:3b:00.0"``. A slice has the address of its GPU.
        total: The GPU memory in bytes, or None for GPUs that share the host's memory.
    """

    index: int
    name: str
    uuid: str
    pci: str
    total: int | None


@dataclass(frozen=True, slots=True)
class GpuReading:
    """The state of a GPU at one moment. Values that the GPU does not report are None.

    Attributes:
        total: The GPU memory in bytes.
        free: The free GPU memory in bytes.
        load: The utilization in percent.
        temperature: The temperature in degrees Celsius.
        memory_by_process: The bytes that each process uses, by process id. Empty if the driver does not
            report sizes. Inside a container it may include processes from outside.
    """

    total: int | None
    free: int | None
    load: int | None
    temperature: int | None
    memory_by_process: Mapping[int, int]

    @property
    def used(self) -> int | None:
        """The GPU memory in use, in bytes."""
        return None if self.total is None or self.free is None else self.total - self.free


@dataclass(frozen=True, slots=True)
class Driver:
    """The state of the NVIDIA driver.

    Attributes:
        version: The driver version, or ``""`` if no driver is installed or it does not respond.
        cuda: The newest CUDA version that the driver supports, as (major, minor).
        reason: The reason why the driver cannot be used or its version is unknown; ``""`` if there is none.
        is_silent: True if a driver is installed but does not respond.
    """

    version: str = ""
    cuda: tuple[int, int] | None = None
    reason: str = ""
    is_silent: bool = False


# -- GPUs --------------------------------------------------------------------------------------------


def gpus() -> tuple[Gpu, ...]:
    """Return the GPUs that CUDA makes visible to this process.

    CUDA reads ``CUDA_VISIBLE_DEVICES`` and ``CUDA_DEVICE_ORDER`` once, when the first framework uses a GPU.
    From then on, the numbers are those of the CUDA driver. Before, they follow the current values of the
    variables. By default, CUDA numbers the fastest GPU first (CUDA_DEVICE_ORDER in the CUDA Programming
    Guide), by a rule that NVIDIA does not document. For GPUs of different models, only
    ``CUDA_DEVICE_ORDER=PCI_BUS_ID`` makes these numbers reliable.

    >>> [gpu.index for gpu in gpus()] == [*range(len(gpus()))]
    True
    """
    uuids = cuda_driver.visible_uuids()
    numbered = None if uuids is None else _gpus_by_uuid(uuids)
    if numbered is not None:
        return numbered
    return _visible_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("CUDA_DEVICE_ORDER", ""))


def gpus_for(cuda: int) -> tuple[Gpu, ...]:
    """Return the GPUs, numbered as in `gpus`, that programs built for this CUDA major version can use.

    The result is empty if the driver is too old for that version, because CUDA then finds no GPU.
    """
    newest = driver().cuda
    return () if newest is not None and newest[0] < cuda else gpus()


def read_gpu(gpu: Gpu) -> GpuReading:
    """Return the current state of a GPU."""
    handle = _query("nvmlDeviceGetHandleByUUID", gpu.uuid)
    memory_by_process: Counter[int] = Counter()
    for process in _query("nvmlDeviceGetComputeRunningProcesses", handle) or []:
        if process.usedGpuMemory is not None:
            memory_by_process[process.pid] += int(process.usedGpuMemory)
    return GpuReading(
        total=_query("nvmlDeviceGetMemoryInfo", handle, field="total"),
        free=_query("nvmlDeviceGetMemoryInfo", handle, field="free"),
        load=_query("nvmlDeviceGetUtilizationRates", handle, field="gpu"),
        temperature=_query("nvmlDeviceGetTemperature", handle, 0),  # NVML_TEMPERATURE_GPU
        memory_by_process=memory_by_process,
    )


def free_memory(index: int) -> int | None:
    """Return the free bytes of a GPU, or None if the GPU does not exist or does not report them."""
    uuid = next((gpu.uuid for gpu in gpus() if gpu.index == index), None)
    handle = _query("nvmlDeviceGetHandleByUUID", uuid)
    free: int | None = _query("nvmlDeviceGetMemoryInfo", handle, field="free")
    return free


def driver() -> Driver:
    """Return the state of the NVIDIA driver, with the reason if it cannot be used."""
    nvml = _nvml()
    if isinstance(nvml, Driver):
        return nvml
    version = _query("nvmlSystemGetDriverVersion")
    cuda = _query("nvmlSystemGetCudaDriverVersion_v2")
    newest = None if cuda is None else (cuda // 1000, cuda % 1000 // 10)
    reason = "" if version else "the NVIDIA driver does not report its version"
    return Driver(version or "", newest, reason=reason)


@cache
def _nvml() -> Any:
    """Initialize NVIDIA's management library (NVML) once per process, and return it.

    If it cannot be initialized, return a `Driver` with the reason.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        if getattr(error, "value", None) == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND:
            return Driver(reason="no NVIDIA driver is installed")
        return Driver(reason=f"the NVIDIA driver does not respond: {error}", is_silent=True)
    return pynvml


def _query(function: str, *arguments: Any, field: str = "") -> Any:
    """Call an NVML function and return its result, or one field of the result.

    Returns:
        The value, or None if the GPU does not report it, the driver is too old, or an argument is None.
    """
    library = _nvml()
    if isinstance(library, Driver) or None in arguments:
        return None
    try:
        result = getattr(library, function)(*arguments)
    except library.NVMLError:
        return None
    return getattr(result, field) if field else result


@cache
def _gpus_by_uuid(uuids: tuple[str, ...]) -> tuple[Gpu, ...] | None:
    """Return the GPUs that the CUDA driver lists; None if NVML does not list one of them."""
    listed = {gpu.uuid.partition("-")[2].replace("-", ""): gpu for group in _all_gpus() for gpu in group}
    if not listed.keys() >= set(uuids):
        return None
    return tuple(replace(listed[uuid], index=index) for index, uuid in enumerate(uuids))


def _all_gpus() -> list[list[Gpu]]:
    """Return every GPU that NVML lists, each followed by its MIG slices."""
    return list(filter(None, map(_gpu_with_slices, range(_query("nvmlDeviceGetCount") or 0))))


@cache
def _visible_gpus(visible: str | None, order: str) -> tuple[Gpu, ...]:
    """Return the GPUs that CUDA makes visible for these values of the two environment variables."""
    groups = _all_gpus()
    # NVML numbers GPUs by PCI address. CUDA does the same for GPUs of the same model, which are equally fast.
    if order != "PCI_BUS_ID" and len({gpu.name for gpu, *_ in groups}) > 1:
        groups.sort(key=_speed, reverse=True)
    usable = [next(iter(slices), gpu) for gpu, *slices in groups]
    candidates = [gpu for group in groups for gpu in group]
    chosen = usable if visible is None else _select(visible, usable, candidates)
    # If a MIG slice is visible, CUDA gives the process only that one slice and no whole GPU.
    slices = [gpu for gpu in chosen if gpu.uuid.startswith("MIG-")]
    return tuple(replace(gpu, index=index) for index, gpu in enumerate(slices[:1] or chosen))


def _gpu_with_slices(index: int) -> list[Gpu]:
    """Return the GPU with this NVML number, followed by its MIG slices; empty if it does not respond."""
    handle = _query("nvmlDeviceGetHandleByIndex", index)
    address = _query("nvmlDeviceGetPciInfo", handle, field="busIdLegacy") or ""
    is_divided = (_query("nvmlDeviceGetMigMode", handle) or (0, 0))[0]
    count = _query("nvmlDeviceGetMaxMigDeviceCount", handle) if is_divided else 0
    slices = [_query("nvmlDeviceGetMigDeviceHandleByIndex", handle, i) for i in range(count or 0)]
    group = []
    for device in (handle, *slices):
        name = _query("nvmlDeviceGetName", device) or ""
        uuid = _query("nvmlDeviceGetUUID", device)
        total = _query("nvmlDeviceGetMemoryInfo", device, field="total")
        if uuid is not None:
            group.append(Gpu(index, name, uuid, address.lower(), total))
    return group


def _speed(group: list[Gpu]) -> int:
    """Return the number of cores times the clock rate, by which CUDA seems to order GPUs."""
    handle = _query("nvmlDeviceGetHandleByUUID", group[0].uuid)
    cores = _query("nvmlDeviceGetNumGpuCores", handle)
    clock = _query("nvmlDeviceGetMaxClockInfo", handle, 1)
    return int(cores or 0) * int(clock or 0)


def _select(visible: str, usable: list[Gpu], candidates: list[Gpu]) -> list[Gpu]:
    """Return the GPUs and slices in ``CUDA_VISIBLE_DEVICES``, up to the first entry that matches none."""
    chosen: list[Gpu] = []
    for entry in map(str.strip, visible.split(",")):
        if entry.isdigit():
            matches = usable[int(entry) : int(entry) + 1]
        else:
            # CUDA accepts the beginning of a UUID if it is unambiguous.
            matches = [gpu for gpu in candidates if entry and gpu.uuid.startswith(entry)]
        if len(matches) != 1:
            break
        chosen += matches
    return chosen if len(set(chosen)) == len(chosen) else []  # no GPU is visible if an entry is repeated


# -- the host ----------------------------------------------------------------------------------------


def host_memory() -> Any:
    """Return the memory of the host, with the attributes ``total`` and ``available`` in bytes."""
    import psutil

    return psutil.virtual_memory()


def process_memory() -> tuple[int, int]:
    """Return the current and the peak host memory of this process in bytes."""
    import psutil

    now = psutil.Process().memory_info()
    if sys.platform == "win32":
        return now.rss, now.peak_wset
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return now.rss, max(now.rss, peak)
