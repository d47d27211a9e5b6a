"""PyTorch's CUDA (or ROCm) cards: the memory that it holds there, its streams, and page-locked memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch

from arraybridge import machine
from arraybridge.frameworks import driver, hostmemory
from arraybridge.frameworks.base import CPU
from arraybridge.frameworks.loans import Loan
from arraybridge.frameworks.parts import Mark, Pinning, Pool, Streams, Usage
from arraybridge.types import Device

__all__ = ["TorchPinning", "TorchPool", "TorchStreams"]


class TorchPool(Pool):
    def native_device(self, device: Device) -> Any:
        kind = "cpu" if device.kind == "cpu" else torch.accelerator.current_accelerator().type
        return torch.device("cpu") if kind == "cpu" else torch.device(kind, device.index)

    def is_started(self) -> bool:
        # CUDA's driver is woken by the question whether there is a card, and this process could not be forked
        # any more: only builds for other accelerators are asked.
        has_others = torch.version.cuda is None and torch.version.hip is None
        return torch.cuda.is_initialized() or (has_others and torch.accelerator.is_available())

    def _opened(self, device: Device | None = None) -> list[int]:
        """Numbers of the cards to ask, of which none is opened by asking."""
        if device is not None and device.kind != "gpu":
            return []
        count = torch.accelerator.device_count() if self.is_started() else 0
        return [i for i in range(count) if device is None or device.index == i]

    def free_cache(self, device: Device | None, compiled: bool = False) -> int:
        freed = 0
        cards = self._opened(device)
        if cards and hasattr(torch.accelerator, "empty_cache"):  # torch 2.9
            before = sum(torch.accelerator.memory_reserved(i) for i in cards)
            torch.accelerator.empty_cache()
            freed = before - sum(torch.accelerator.memory_reserved(i) for i in cards)
        elif cards and torch.cuda.is_initialized():
            before = sum(torch.cuda.memory_reserved(i) for i in cards)
            torch.cuda.empty_cache()
            freed = before - sum(torch.cuda.memory_reserved(i) for i in cards)
        if cards and torch.cuda.is_initialized():
            freed += _free_pinned_cache()
        return freed

    def usage(self) -> list[Usage]:
        found = []
        for i in self._opened() if torch.cuda.is_initialized() else []:
            stats = torch.cuda.memory_stats_as_nested_dict(i)
            if stats:
                used, reserved = (stats[k]["all"] for k in ("allocated_bytes", "reserved_bytes"))
                cached = reserved["current"] - used["current"]
                found.append(Usage(Device("gpu", i), used["current"], cached, used["peak"]))
        return found

    def card_memory(self, device: Device) -> tuple[int, int] | None:
        if device.kind != "gpu" or not torch.cuda.is_initialized():
            return None
        return torch.cuda.mem_get_info(device.index)

    def reset_peak(self, device: Device) -> bool:
        for i in self._opened(device) if torch.cuda.is_initialized() else []:
            torch.cuda.reset_peak_memory_stats(i)
            return True
        return False

    def synchronize(self) -> None:
        for i in self._opened():
            torch.accelerator.synchronize(i)

    def allocator(self) -> tuple[Callable[[int, int, int], int], Callable[[int], None]]:
        return torch.cuda.caching_allocator_alloc, torch.cuda.caching_allocator_delete

    def read_device(self, x: Any) -> Device | None:
        if not isinstance(x, torch.device) or x.type == "meta":
            return None
        if x.type == "cpu":
            return Device("cpu")
        return Device("gpu", torch.accelerator.current_device_index() if x.index is None else x.index)

    def card_of(self, device: Device) -> tuple[str, str, int | None]:
        if device.kind != "gpu" or not torch.cuda.is_initialized():
            return "", "", None  # asking would open the cards
        facts = torch.cuda.get_device_properties(device.index)
        uuid = getattr(facts, "uuid", None)  # torch 2.5
        return facts.name, "" if uuid is None else f"GPU-{uuid}", int(facts.total_memory)

    def visible_devices(self) -> tuple[Device, ...] | None:
        # Asking torch initialises the driver, after which this process can't be forked.
        if torch.version.cuda is None or driver.is_awake():
            return None
        return (CPU, *(Device("gpu", card.index) for card in machine.cards()))

    def free_memory_of(self, device: Device) -> int:
        known = machine.free_memory(device.index) if torch.version.cuda is not None else None
        if known is not None and device.kind == "gpu":
            return known
        has_cuda = device.kind == "gpu" and torch.cuda.is_available()
        return torch.cuda.mem_get_info(device.index)[0] if has_cuda else 0

    def oom_error(self) -> Exception:
        return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. (a rehearsal)")


class TorchStreams(Streams):
    def stream(self, device: Device) -> AbstractContextManager[Any]:
        return _side_stream(device.index) if device.kind == "gpu" else nullcontext()

    def take_stream(self, device: Device) -> None:
        if device.kind == "gpu":
            with torch.cuda.device(device.index):  # set_stream selects the card of the stream, too
                torch.cuda.set_stream(torch.cuda.Stream(device.index))

    def mark(self, device: Device) -> Mark | None:
        if device.kind != "gpu":
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device.index))
        return Mark(
            self,
            device,
            lambda: event.wait(torch.cuda.current_stream(device.index)),
            event.synchronize,
            # A query would break off the graph that this thread captures.
            lambda: not torch.cuda.is_current_stream_capturing() and event.query(),
        )

    def handle(self, device: Device) -> int:
        return int(torch.cuda.current_stream(device.index).cuda_stream)

    def wait_for(self, device: Device, handle: int) -> None:
        _wait_for(device.index, handle)

    def take_over(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_cuda:
            x.record_stream(torch.cuda.current_stream(x.device))
        return x


def _wait_for(index: int, handle: int) -> None:
    stream = torch.cuda.current_stream(index)
    if stream.cuda_stream != handle:
        # ExternalStream(0) is a new stream, and not the default one.
        other = torch.cuda.ExternalStream(handle, index) if handle else torch.cuda.default_stream(index)
        stream.wait_stream(other)


# -- memory of others ----------------------------------------------------------------------------------


class _Interface:
    """Memory of a card in the form in which torch keeps a reference to who owns it."""

    def __init__(self, interface: dict[str, Any], owner: Any) -> None:
        self.__cuda_array_interface__ = interface
        self._owner = owner


def on_loan(lent: torch.Tensor, lender: Streams, borrower: Streams, device: Device) -> torch.Tensor:
    """The same memory, in a tensor with whose end the loan ends in order."""
    if not lent.numel():
        return lent
    size = lent.element_size()
    # The interface has no name for bfloat16 and float8: as integers of their size.
    code = {1: "|u1", 2: "<i2"}.get(size, "") if lent.dtype in _NAMELESS else _CODES[lent.dtype]
    interface = {
        "shape": tuple(lent.shape),
        "strides": tuple(step * size for step in lent.stride()),
        "typestr": code,
        "data": (lent.data_ptr(), False),
        "version": 2,
    }
    loan = _Interface(interface, Loan(lent, lender, borrower, device))
    tensor = torch.as_tensor(loan, device=lent.device)
    return tensor.view(lent.dtype) if tensor.dtype != lent.dtype else tensor


_CODES = {
    getattr(torch, name): np.dtype(name).str
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
    if hasattr(torch, name)
}
_NAMELESS = {
    getattr(torch, name)
    for name in (
        *("bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
        "float8_e8m0fnu",
    )
    if hasattr(torch, name)
}


def from_interface(x: Any) -> torch.Tensor:
    """The memory behind ``__cuda_array_interface__``, which torch takes without minding its stream.

    What is read-only, which torch refuses, is copied.
    """
    interface = dict(x.__cuda_array_interface__)
    address, is_read_only = interface["data"]
    interface["data"] = (address, False)
    stream = interface.pop("stream", None)
    card = driver.card_at(address)
    device = "cuda" if card is None else f"cuda:{card}"  # without a number the current one
    tensor = torch.as_tensor(_Interface({**interface, "version": 2}, x), device=device)
    if stream is not None:
        handle = 0 if stream == 1 else int(stream)  # 1 stands for the default stream
        _wait_for(tensor.device.index, handle)
    return tensor.clone() if is_read_only else tensor


class TorchPinning(Pinning):
    def pinned_bytes(self, nbytes: int) -> np.ndarray | None:
        if not torch.cuda.is_available():
            return None
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True).numpy()

    def is_pinned(self, memory: np.ndarray) -> bool:
        return torch.from_numpy(hostmemory.writable_alias(memory)).is_pinned()


def _empty_pinned_cache() -> Callable[[], object] | None:
    """The call that gives torch's pinned cache back: public since 2.12, and under this name before."""
    public: Callable[[], object] | None = getattr(torch.accelerator, "empty_host_cache", None)
    return public or getattr(torch._C, "_host_emptyCache", None)


def _free_pinned_cache() -> int:
    """Give back the pinned host memory that torch keeps; returns its bytes. Only with CUDA open."""
    empty = _empty_pinned_cache()
    stats = getattr(torch.cuda, "host_memory_stats", None)
    if empty is None or stats is None:  # before torch 2.9
        return 0
    before = stats().get("allocated_bytes.current", 0)
    empty()
    return int(before - stats().get("allocated_bytes.current", 0))


_streams = threading.local()


@contextmanager
def _side_stream(index: int) -> Iterator[None]:
    """This thread's own stream on the card, as `Streams.stream` describes."""
    own: dict[Any, Any] = _streams.__dict__  # card → stream
    side = own.get(index)
    if side is None:
        side = own[index] = torch.cuda.Stream(index)
    outer = torch.cuda.current_stream(index)
    # What was allocated on one stream and freed may be reused before the other is done with it only where
    # nothing orders the two. These waits do, at each change from one to the other.
    side.wait_stream(outer)
    try:
        with torch.cuda.stream(side):
            yield
    finally:
        outer.wait_stream(side)
