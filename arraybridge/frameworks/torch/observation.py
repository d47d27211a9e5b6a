"""How a trace reads PyTorch's tensors around calls of other libraries."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from arraybridge.frameworks.base import Observation
from arraybridge.types import Device

if TYPE_CHECKING:
    from arraybridge.frameworks.base import Framework

# A private name of torch, though its guide to subclasses shows one like it: nothing public reads a tensor
# unseen by `__torch_function__` of its class and by function modes, which belong to the program.
_unseen = getattr(getattr(torch, "_C", None), "DisableTorchFunction", nullcontext)


class TorchObservation(Observation):
    has_strides = True

    def read(self, owner: Framework, x: torch.Tensor) -> tuple[Any, int, int | None, Device]:
        nbytes = x.nbytes
        address = x.data_ptr()
        if nbytes and not address:
            raise ValueError("a meta tensor")
        return x.dtype, nbytes, address, owner.devices.device_of(x)

    def is_idle(self) -> bool:
        # On the CPU nothing is pending, and reading the tensor takes 3 µs.
        return not torch.cuda.is_initialized()

    def unobserved(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = _unseen()
        return context
