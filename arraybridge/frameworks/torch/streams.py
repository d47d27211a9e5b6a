"""PyTorch's streams on CUDA and ROCm GPUs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from arraybridge import cuda_driver
from arraybridge.device import Device
from arraybridge.interface import keep_alives
from arraybridge.interface.streams import StreamEvent, Streams

if torch.backends.cuda.is_built():
    keep_alives.captures.append(torch.cuda.is_current_stream_capturing)


@contextmanager
def on_device(index: int) -> Iterator[None]:
    """Make a GPU the current device of this thread in a ``with`` block, for PyTorch and for CUDA.

    If the previous device has no context, `torch.cuda.device` restores it for PyTorch, but not for CUDA
    (pytorch/pytorch#4903), and therefore not for CuPy.
    """
    before = torch.cuda.current_device()
    if before == index or torch.version.hip or cuda_driver.has_context(before):
        with torch.cuda.device(index):
            yield
    else:
        with cuda_driver.primary_context(index), torch.cuda.device(index):
            yield


class TorchStreams(Streams):
    """PyTorch's streams, with one side stream per thread and GPU."""

    has_streams = True

    def __init__(self) -> None:
        self._own = threading.local()

    def stream(self, device: Device) -> AbstractContextManager[Any]:
        return self._side_stream(device.index) if device.kind == "gpu" else nullcontext()

    @contextmanager
    def _side_stream(self, index: int) -> Iterator[None]:
        """Queue work in a ``with`` block on this thread's side stream, in order with the current stream."""
        own: dict[Any, Any] = self._own.__dict__  # GPU number → stream
        if index not in own:
            own[index] = torch.cuda.Stream(index)
        side = own[index]
        outer = torch.cuda.current_stream(index)
        # The waits order the two streams at each switch. Otherwise, memory that is freed on one stream could
        # be reused while the other stream still reads it (pytorch/pytorch#24078).
        side.wait_stream(outer)
        try:
            # On exit, `torch.cuda.stream` alone would select the previous device and create a context on it
            # (pytorch/pytorch#4903).
            with on_device(index), torch.cuda.stream(side):
                yield
        finally:
            outer.wait_stream(side)

    def take_stream(self, device: Device) -> None:
        if device.kind == "gpu":
            with on_device(device.index):  # set_stream also selects the GPU of the stream
                torch.cuda.set_stream(torch.cuda.Stream(device.index))

    def record_event(self, device: Device) -> StreamEvent | None:
        if device.kind != "gpu":
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device.index))

        def wait() -> None:
            event.wait(torch.cuda.current_stream(device.index))

        return StreamEvent(self, device, wait, event.synchronize, event.query)

    def handle(self, device: Device) -> int:
        return int(torch.cuda.current_stream(device.index).cuda_stream)

    def wait_for(self, device: Device, handle: int) -> None:
        stream = torch.cuda.current_stream(device.index)
        if stream.cuda_stream != handle:
            # ExternalStream(0) is a new stream, not the default stream (torch 2.13, pytorch/pytorch#182960).
            default = torch.cuda.default_stream(device.index)
            stream.wait_stream(torch.cuda.ExternalStream(handle, device.index) if handle else default)

    def take_over(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_cuda:
            x.record_stream(torch.cuda.current_stream(x.device))
        return x
