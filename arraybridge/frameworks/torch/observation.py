"""Properties of PyTorch tensors that traces read before and after framework calls."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from arraybridge.device import Device
from arraybridge.interface.runtime import Observation

if TYPE_CHECKING:
    from arraybridge.interface.framework import Framework

# A private name (pytorch/pytorch#92012): within any public context manager, reading a tensor may call
# `__torch_function__` of its class or the program's function modes. PyTorch's guide to subclasses uses a
# similar private name.
_unseen = getattr(getattr(torch, "_C", None), "DisableTorchFunction", nullcontext)


class TorchObservation(Observation):
    """The dtype, size, address and device of PyTorch tensors."""

    has_strides = True

    def read(self, owner: Framework, x: torch.Tensor) -> tuple[Any, int, int | None, Device]:
        nbytes = x.nbytes
        address = x.data_ptr()
        if nbytes and not address:
            raise ValueError("meta tensors have no memory")
        return x.dtype, nbytes, address, owner.devices.device_of(x)

    def is_idle(self) -> bool:
        # PyTorch computes synchronously on the CPU. Reading the device of a tensor would take 3 µs.
        return not torch.cuda.is_initialized()

    def pause_observation(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = _unseen()
        return context
