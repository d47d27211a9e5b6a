"""PyTorch's streams on CUDA (or ROCm) cards, and memory of others that it reads there."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch

from arraybridge.frameworks import driver, loans
from arraybridge.frameworks.loans import Loan
from arraybridge.frameworks.parts import Mark, Streams
from arraybridge.frameworks.torch.dtypes import CARRIERS, NAMES
from arraybridge.types import Device

if torch.backends.cuda.is_built():
    loans.captures.append(torch.cuda.is_current_stream_capturing)


class TorchStreams(Streams):
    has_queues = True

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


class _Interface:
    """Memory of a card in the form in which torch keeps a reference to who owns it."""

    def __init__(self, interface: dict[str, Any], owner: Any) -> None:
        self.__cuda_array_interface__ = interface
        self._owner = owner


def on_loan(lent: torch.Tensor, lender: Streams, borrower: Streams, device: Device) -> torch.Tensor:
    """The same memory, in a tensor with whose end the loan ends in order."""
    if not lent.numel():
        return lent
    shown = lent.view(CARRIERS.get(lent.dtype, lent.dtype))
    interface = {
        "shape": tuple(shown.shape),
        "strides": tuple(step * shown.element_size() for step in shown.stride()),
        "typestr": np.dtype(NAMES[shown.dtype]).str,
        "data": (shown.data_ptr(), False),
        "version": 2,
    }
    owner = Loan(lent, lender, borrower, device)
    return torch.as_tensor(_Interface(interface, owner), device=lent.device).view(lent.dtype)


def from_interface(x: Any, streams: Streams) -> torch.Tensor:
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
    if stream is not None:  # 1 stands for the default stream
        streams.wait_for(Device("gpu", tensor.device.index), 0 if stream == 1 else int(stream))
    return tensor.clone() if is_read_only else tensor
