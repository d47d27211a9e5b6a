"""The NVIDIA cards of this machine as CUDA counts them, asked of the driver without opening one.

``CUDA_VISIBLE_DEVICES`` and ``CUDA_DEVICE_ORDER`` are minded by the driver itself, so that a number here is
the number that CuPy, PyTorch, JAX and TensorFlow use. OpenCL counts on its own: its devices are put into the
order of these cards, by their PCI addresses, in `arraybridge.frameworks.pyclesperanto.arrays`.
"""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from functools import cache

__all__ = ["Card", "card_at", "cards", "driver", "free_memory", "is_awake", "pci_address"]


@dataclass(frozen=True, slots=True)
class Card:
    """One card: its number, name, memory in bytes, compute capability, and what identifies it."""

    index: int
    name: str
    #: As NVML writes it: ``"GPU-…"``.
    uuid: str
    #: As `pci_address` writes it.
    pci: str
    total: int
    capability: tuple[int, int]


def pci_address(domain: int, bus: int, slot: int) -> str:
    """The address of a card on the PCI bus, in the one form in which they are compared.

    >>> pci_address(0, 59, 0)
    '0000:3b:00.0'
    """
    return f"{domain:04x}:{bus:02x}:{slot:02x}.0"


# Numbers of CUdevice_attribute.
_CAPABILITY = (75, 76)
_PCI = (50, 33, 34)  # domain, bus, slot
# The one of CUpointer_attribute.
_DEVICE_ORDINAL = 9


@cache
def driver() -> ctypes.CDLL | None:
    """CUDA's driver as it is, not initialised by this; None without one."""
    try:
        return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return None


def is_awake() -> bool:
    """Whether something in this process has initialised CUDA's driver.

    A process that is forked afterwards cannot use CUDA, so that nobody should do it without need.
    """
    known = driver()
    return known is not None and known.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) == 0


@cache
def cards() -> tuple[Card, ...]:
    """The cards that CUDA shows to this process; empty without a driver. No context is created.

    CUDA reads ``CUDA_VISIBLE_DEVICES`` once in a process, and so does this. Where nothing has initialised the
    driver yet, a process of its own does and answers, so that this one may still be forked.
    """
    known = driver()
    if known is None:
        return ()
    import json  # with the next one 5 ms, which `import arraybridge` shall not take
    import subprocess

    if not is_awake() and sys.executable and not getattr(sys, "frozen", False):
        # Isolated, and thus without the names of this folder, which are those of frameworks.
        command = [sys.executable, "-I", "-S", __file__]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
            return tuple(
                Card(index, name, known_as, pci, total, (major, minor))
                for index, name, known_as, pci, total, (major, minor) in json.loads(done.stdout)
            )
        except (OSError, subprocess.SubprocessError, ValueError):
            pass  # it could not be started here: this process asks
    return _ask(known)


def card_at(address: int) -> int | None:
    """The number of the card on which memory lies; None where the driver does not know. Opens none.

    The runtime's question for it, which frameworks ask, opens the current card.
    """
    known, found = driver(), ctypes.c_int()
    if known is None or not address:
        return None
    failed = known.cuPointerGetAttribute(ctypes.byref(found), _DEVICE_ORDINAL, ctypes.c_ulonglong(address))
    return None if failed else found.value


def _ask(known: ctypes.CDLL) -> tuple[Card, ...]:
    count = ctypes.c_int()
    if known.cuInit(0) or known.cuDeviceGetCount(ctypes.byref(count)):
        return ()
    return tuple(_card(known, i) for i in range(count.value))


def free_memory(index: int) -> int | None:
    """Free bytes of a card as NVML tells them, which opens nothing; None where NVML is missing."""
    known = cards()
    library = _nvml()
    if library is None or index >= len(known):
        return None
    handle, memory = ctypes.c_void_p(), (ctypes.c_ulonglong * 3)()  # total, free, used
    address = known[index].pci.encode()
    if library.nvmlDeviceGetHandleByPciBusId_v2(address, ctypes.byref(handle)):
        return None
    return None if library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) else int(memory[1])


@cache
def _nvml() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL("nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1")
    except OSError:
        return None
    return None if library.nvmlInit_v2() else library


def _card(driver: ctypes.CDLL, index: int) -> Card:
    from uuid import UUID

    device, name, raw = ctypes.c_int(), ctypes.create_string_buffer(256), (ctypes.c_ubyte * 16)()
    total = ctypes.c_size_t()
    driver.cuDeviceGet(ctypes.byref(device), index)
    driver.cuDeviceGetName(name, len(name), device)
    # The second version tells slices of a card (MIG) apart; it came with CUDA 11.4.
    ask = getattr(driver, "cuDeviceGetUuid_v2", None) or driver.cuDeviceGetUuid
    known = ask(ctypes.byref(raw), device) == 0
    driver.cuDeviceTotalMem_v2(ctypes.byref(total), device)
    major, minor = (_attribute(driver, device, number) for number in _CAPABILITY)
    domain, bus, slot = (_attribute(driver, device, number) for number in _PCI)
    return Card(
        index,
        name.value.decode(errors="replace"),
        f"GPU-{UUID(bytes=bytes(raw))}" if known else "",
        pci_address(domain, bus, slot),
        total.value,
        (major, minor),
    )


def _attribute(driver: ctypes.CDLL, device: ctypes.c_int, number: int) -> int:
    value = ctypes.c_int()
    driver.cuDeviceGetAttribute(ctypes.byref(value), number, device)
    return value.value


if __name__ == "__main__":
    import json

    _known = driver()
    _found = _ask(_known) if _known is not None else ()
    print(json.dumps([[c.index, c.name, c.uuid, c.pci, c.total, c.capability] for c in _found]))
