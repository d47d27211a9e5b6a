"""PyTorch on accelerators: what it holds there, page-locked memory of the host, and CUDA's streams."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch

from arraybridge import machine
from arraybridge.frameworks import cardmemory
from arraybridge.frameworks.base import CPU
from arraybridge.frameworks.parts import Holding, Mark, Pool, Streams
from arraybridge.types import Device

if torch.backends.cuda.is_built():
    cardmemory.captures.append(torch.cuda.is_current_stream_capturing)


def torch_device(device: Device) -> torch.device:
    """Torch's own object for a device that `find_device` has seen."""
    accelerator = None if device.kind == "cpu" else torch.accelerator.current_accelerator()
    return torch.device("cpu") if accelerator is None else torch.device(accelerator.type, device.index)


def _numbers(device: Device | None = None) -> list[int]:
    """Numbers of the cards to ask, where torch has opened CUDA; all, or that of one device."""
    count = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
    return [i for i in range(count) if device is None or device == Device("gpu", i)]


class TorchPool(Pool):
    def native_device(self, device: Device) -> Any:
        return torch_device(device)

    def is_started(self) -> bool:
        # CUDA's driver is woken by the question whether there is a card, and this process could not be forked
        # any more: only builds for other accelerators are asked.
        has_others = torch.version.cuda is None and torch.version.hip is None
        return torch.cuda.is_initialized() or (has_others and torch.accelerator.is_available())

    def free_cache(self, device: Device | None, compiled: bool = False) -> int:
        cards = _numbers(device)
        before = sum(torch.cuda.memory_reserved(i) for i in cards)
        if cards:
            torch.cuda.empty_cache()
        elif self.is_started() and hasattr(torch.accelerator, "empty_cache"):  # torch 2.9
            torch.accelerator.empty_cache()
        freed = before - sum(torch.cuda.memory_reserved(i) for i in cards)
        if cards and hasattr(torch.accelerator, "empty_host_cache"):  # torch 2.12
            locked = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
            torch.accelerator.empty_host_cache()
            freed += int(locked - torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))
        return freed

    def usage(self) -> list[Holding]:
        rows = []
        for i in _numbers():
            stats = torch.cuda.memory_stats_as_nested_dict(i)
            if stats:
                used, reserved = (stats[k]["all"] for k in ("allocated_bytes", "reserved_bytes"))
                cached = reserved["current"] - used["current"]
                rows.append(Holding(f"gpu:{i}", "torch", used["current"], cached, used["peak"]))
        return rows

    def card_memory(self, device: Device) -> tuple[int, int] | None:
        return torch.cuda.mem_get_info(device.index) if torch.cuda.is_available() else None

    def reset_peak(self) -> None:
        for i in _numbers():
            torch.cuda.reset_peak_memory_stats(i)

    def pinned_bytes(self, nbytes: int) -> np.ndarray | None:
        if not torch.cuda.is_available():
            return None
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True).numpy()

    def synchronize(self) -> None:
        if torch.cuda.is_initialized():
            for i in _numbers():
                if torch.version.hip or cardmemory.has_context(i):  # any other would be opened
                    torch.cuda.synchronize(i)
        elif self.is_started():
            torch.accelerator.synchronize()

    def allocator(self) -> tuple[Callable[[int, int, int], int], Callable[[int], None]]:
        return torch.cuda.caching_allocator_alloc, torch.cuda.caching_allocator_delete

    def read_device(self, x: Any) -> Device | None:
        if not isinstance(x, torch.device) or x.type == "meta":
            return None
        if x.type == "cpu":
            return CPU
        return Device("gpu", torch.accelerator.current_device_index() if x.index is None else x.index)

    def card_of(self, device: Device) -> tuple[str, str, int | None]:
        if not _numbers(device):
            return "", "", None  # asking would open the cards
        facts = torch.cuda.get_device_properties(device.index)
        return facts.name, f"GPU-{facts.uuid}", int(facts.total_memory)

    def visible_devices(self) -> tuple[Device, ...] | None:
        # Asking torch initialises the driver, after which this process can't be forked.
        if torch.version.cuda is None or cardmemory.is_awake():
            return None
        return (CPU, *(Device("gpu", card.index) for card in machine.cards()))

    def oom_error(self) -> Exception:
        return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. (a rehearsal)")


class TorchStreams(Streams):
    has_queues = True

    def __init__(self) -> None:
        self._own = threading.local()

    def stream(self, device: Device) -> AbstractContextManager[Any]:
        return self._side_stream(device.index) if device.kind == "gpu" else nullcontext()

    @contextmanager
    def _side_stream(self, index: int) -> Iterator[None]:
        own: dict[Any, Any] = self._own.__dict__  # card → stream
        if index not in own:
            own[index] = torch.cuda.Stream(index)
        side, outer = own[index], torch.cuda.current_stream(index)
        # What was allocated on one stream and freed may be reused before the other is done with it only where
        # nothing orders the two. These waits do, at each change from one to the other.
        side.wait_stream(outer)
        try:
            with torch.cuda.stream(side):
                yield
        finally:
            outer.wait_stream(side)

    def take_stream(self, device: Device) -> None:
        if device.kind == "gpu":
            with torch.cuda.device(device.index):  # set_stream selects the card of the stream, too
                torch.cuda.set_stream(torch.cuda.Stream(device.index))

    def mark(self, device: Device) -> Mark | None:
        if device.kind != "gpu":
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device.index))

        def wait() -> None:
            event.wait(torch.cuda.current_stream(device.index))

        return Mark(self, device, wait, event.synchronize, event.query)

    def handle(self, device: Device) -> int:
        return int(torch.cuda.current_stream(device.index).cuda_stream)

    def wait_for(self, device: Device, handle: int) -> None:
        stream = torch.cuda.current_stream(device.index)
        if stream.cuda_stream != handle:
            # ExternalStream(0) is a new stream, and not the default one.
            default = torch.cuda.default_stream(device.index)
            stream.wait_stream(torch.cuda.ExternalStream(handle, device.index) if handle else default)

    def take_over(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_cuda:
            x.record_stream(torch.cuda.current_stream(x.device))
        return x
