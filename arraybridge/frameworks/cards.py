"""The NVIDIA cards of this machine as CUDA counts them, asked of the driver without opening one.

``CUDA_VISIBLE_DEVICES`` and ``CUDA_DEVICE_ORDER`` are minded by the driver itself, so that a number here is
the number that CuPy, PyTorch, JAX and TensorFlow use. OpenCL counts on its own: its devices are put into the
order of these cards, by their PCI addresses, in `arraybridge.frameworks.pyclesperanto`.
"""

from __future__ import annotations

import ctypes
import sys
import uuid
from dataclasses import dataclass
from functools import cache

__all__ = ["Card", "cards", "driver", "pci_address"]


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


@cache
def cards() -> tuple[Card, ...]:
    """The cards that CUDA shows to this process; empty without a driver. No context is created.

    CUDA reads ``CUDA_VISIBLE_DEVICES`` once in a process, and so does this.
    """
    cuda = driver()
    count = ctypes.c_int()
    if cuda is None or cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
        return ()
    return tuple(_card(cuda, i) for i in range(count.value))


@cache
def driver() -> ctypes.CDLL | None:
    """CUDA's driver, not started yet; None without one."""
    try:
        return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return None


def _card(driver: ctypes.CDLL, index: int) -> Card:
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
        f"GPU-{uuid.UUID(bytes=bytes(raw))}" if known else "",
        pci_address(domain, bus, slot),
        total.value,
        (major, minor),
    )


def _attribute(driver: ctypes.CDLL, device: ctypes.c_int, number: int) -> int:
    value = ctypes.c_int()
    driver.cuDeviceGetAttribute(ctypes.byref(value), number, device)
    return value.value
