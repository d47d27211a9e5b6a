"""The NVIDIA cards and the memory of this machine, by nvidia-ml-py and psutil.

Nothing here imports a framework, opens a card or wakes CUDA's driver: the process may be forked afterwards.

Both packages are imported by the first question, since they take 0.1 s.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from types import ModuleType
from typing import Any


@dataclass(frozen=True, slots=True)
class Card:
    """One card, or one slice of a card (MIG).

    Attributes:
        index: its number, as CUDA counts in this process.
        name: as the driver calls it.
        uuid: ``"GPU-…"``, of a slice ``"MIG-…"``.
        pci: its address on the bus, as in ``"0000:3b:00.0"``; of a slice that of its card.
        total: bytes of its memory; None for cards that share the host's.
    """

    index: int
    name: str
    uuid: str
    pci: str
    total: int | None


@dataclass(frozen=True, slots=True)
class Reading:
    """A card now: bytes, per cent, degrees Celsius. None stands for what it does not tell.

    ``holders``: bytes by process id. It is empty where the driver tells no sizes; inside a container the
    driver may count processes from outside.
    """

    total: int | None
    free: int | None
    load: int | None
    temperature: int | None
    holders: Mapping[int, int]

    @property
    def used(self) -> int | None:
        return None if self.total is None or self.free is None else self.total - self.free


@dataclass(frozen=True, slots=True)
class Driver:
    """The NVIDIA driver.

    Attributes:
        version: its version; ``""`` if there is none, or it does not answer.
        cuda: the newest CUDA that it runs.
        reason: why there is no version.
        is_silent: whether a driver is installed that does not answer.
    """

    version: str = ""
    cuda: tuple[int, int] | None = None
    reason: str = ""
    is_silent: bool = False


# -- cards -------------------------------------------------------------------------------------------


def cards() -> tuple[Card, ...]:
    """The cards that CUDA shows to this process.

    The numbers follow ``CUDA_VISIBLE_DEVICES`` and ``CUDA_DEVICE_ORDER`` as they are now. (CUDA reads them
    once, when the first framework opens a card.) CUDA counts the fastest card first, by a rule that NVIDIA
    does not tell: where they differ, only ``CUDA_DEVICE_ORDER=PCI_BUS_ID`` makes the numbers certain.

    >>> [card.index for card in cards()] == [*range(len(cards()))]
    True
    """
    return _counted(os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("CUDA_DEVICE_ORDER", ""))


def cards_for(cuda: int) -> tuple[Card, ...]:
    """Return the cards that programs built for this major version of CUDA can use, as `cards` numbers them.

    Empty if the driver is older: CUDA then finds no GPU. Wakes no driver.
    """
    newest = driver().cuda
    return () if newest is not None and newest[0] < cuda else cards()


def reading(card: Card) -> Reading:
    """What a card of `cards` tells now."""
    handle = _ask("nvmlDeviceGetHandleByUUID", card.uuid)
    holders: Counter[int] = Counter()
    for process in _ask("nvmlDeviceGetComputeRunningProcesses", handle) or []:
        if process.usedGpuMemory is not None:
            holders[process.pid] += int(process.usedGpuMemory)
    return Reading(
        total=_ask("nvmlDeviceGetMemoryInfo", handle, part="total"),
        free=_ask("nvmlDeviceGetMemoryInfo", handle, part="free"),
        load=_ask("nvmlDeviceGetUtilizationRates", handle, part="gpu"),
        temperature=_ask("nvmlDeviceGetTemperature", handle, 0),  # NVML_TEMPERATURE_GPU
        holders=holders,
    )


def free_memory(index: int) -> int | None:
    """Free bytes of the card of that number; None where there is none, or nobody tells."""
    uuid = next((card.uuid for card in cards() if card.index == index), None)
    handle = _ask("nvmlDeviceGetHandleByUUID", uuid)
    free: int | None = _ask("nvmlDeviceGetMemoryInfo", handle, part="free")
    return free


def driver() -> Driver:
    """The NVIDIA driver, or why there is none."""
    version = _ask("nvmlSystemGetDriverVersion")
    cuda = _ask("nvmlSystemGetCudaDriverVersion_v2")
    nvml = _nvml()
    newest = None if cuda is None else (cuda // 1000, cuda % 1000 // 10)
    return Driver(version or "", newest, reason=nvml.reason, is_silent=nvml.is_silent)


@dataclass(frozen=True, slots=True)
class _Nvml:
    """NVIDIA's management library, or why it does not start."""

    library: ModuleType | None
    reason: str = ""
    #: Whether a driver is installed that does not answer.
    is_silent: bool = False


@cache
def _nvml() -> _Nvml:
    """Start NVIDIA's management library once."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        if getattr(error, "value", None) == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND:
            return _Nvml(None, "there is no NVIDIA driver")
        return _Nvml(None, f"the NVIDIA driver does not answer: {error}", is_silent=True)
    return _Nvml(pynvml)


def _ask(question: str, *arguments: Any, part: str = "") -> Any:
    """An answer of NVML, or a part of it; None for what a card does not tell, or a driver is too old for."""
    library = _nvml().library
    if library is None or None in arguments:
        return None
    try:
        answer = getattr(library, question)(*arguments)
    except library.NVMLError:
        return None
    return getattr(answer, part) if part else answer


@cache
def _counted(visible: str | None, order: str) -> tuple[Card, ...]:
    """The cards under these variables."""
    groups = list(filter(None, map(_with_slices, range(_ask("nvmlDeviceGetCount") or 0))))
    # NVML counts by address. Equal cards are as fast as one another, and CUDA counts them by address, too.
    if order != "PCI_BUS_ID" and len({card.name for card, *_ in groups}) > 1:
        groups.sort(key=_speed, reverse=True)
    usable = [next(iter(slices), card) for card, *slices in groups]
    every = [card for group in groups for card in group]
    chosen = usable if visible is None else _named(visible, usable, every)
    # CUDA shows one slice to a process, and no card beside it.
    slices = [card for card in chosen if card.uuid.startswith("MIG-")]
    return tuple(replace(card, index=index) for index, card in enumerate(slices[:1] or chosen))


def _with_slices(index: int) -> list[Card]:
    """A card as NVML counts, and its slices (MIG) after it; nothing where it does not answer."""
    handle = _ask("nvmlDeviceGetHandleByIndex", index)
    address = _ask("nvmlDeviceGetPciInfo", handle, part="busIdLegacy") or ""
    is_divided = (_ask("nvmlDeviceGetMigMode", handle) or (0, 0))[0]
    count = _ask("nvmlDeviceGetMaxMigDeviceCount", handle) if is_divided else 0
    parts = [_ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, i) for i in range(count or 0)]
    group = []
    for one in (handle, *parts):
        name = _ask("nvmlDeviceGetName", one) or ""
        uuid = _ask("nvmlDeviceGetUUID", one)
        total = _ask("nvmlDeviceGetMemoryInfo", one, part="total")
        if uuid is not None:
            group.append(Card(index, name, uuid, address.lower(), total))
    return group


def _speed(group: list[Card]) -> int:
    """Cores times clock, which is what CUDA's own order agrees with as far as is known."""
    handle = _ask("nvmlDeviceGetHandleByUUID", group[0].uuid)
    cores = _ask("nvmlDeviceGetNumGpuCores", handle)
    clock = _ask("nvmlDeviceGetMaxClockInfo", handle, 1)
    return int(cores or 0) * int(clock or 0)


def _named(visible: str, usable: list[Card], every: list[Card]) -> list[Card]:
    """Cards and slices that ``CUDA_VISIBLE_DEVICES`` names, up to the first word that names none."""
    chosen: list[Card] = []
    for word in map(str.strip, visible.split(",")):
        # The beginning of an identity is enough, where it is the only one that begins so.
        alike = [card for card in every if word and card.uuid.startswith(word)]
        matches = usable[int(word) : int(word) + 1] if word.isdigit() else alike
        if len(matches) != 1:
            break
        chosen += matches
    return chosen if len(set(chosen)) == len(chosen) else []  # CUDA refuses one that is named twice


# -- the host ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes of host memory: all, and those that are available without swapping."""

    total: int
    available: int


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Bytes of host memory that a process uses: now, and at most so far."""

    used: int
    peak: int


def host_memory() -> HostMemory:
    """Return total and available host memory."""
    import psutil

    memory = psutil.virtual_memory()
    return HostMemory(total=int(memory.total), available=int(memory.available))


def own_memory() -> ProcessMemory:
    """Return the host memory of this process."""
    import psutil

    now = psutil.Process().memory_info()
    if sys.platform == "win32":
        return ProcessMemory(used=int(now.rss), peak=int(now.peak_wset))
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return ProcessMemory(used=int(now.rss), peak=max(int(now.rss), peak))
