"""What torch.compile makes of a decorated function."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from arraybridge.frameworks import registry
from arraybridge.placement import card_meant
from arraybridge.types import Device, GpuId

__all__ = ["being_compiled", "stays_traced", "untraced"]


def being_compiled() -> bool:
    """Whether torch.compile traces the function that asks."""
    # It loads this module when it is first used, and before that nobody is asked.
    return "torch._dynamo" in sys.modules and bool(sys.modules["torch"].compiler.is_compiling())


def stays_traced(value: Any, device: Device | None = None, gpu_id: GpuId = None) -> bool:
    """Whether a function of torch takes or returns this as it is, so that torch.compile may go on tracing.

    That is a tensor, where the decorator wants it, what surely is no array, and containers of them.
    """
    torch = sys.modules["torch"]
    if isinstance(value, torch.Tensor):
        place = str(value.device).replace("cuda", "gpu")
        return place == (f"gpu:{card_meant(gpu_id)}" if gpu_id is not None else str(device or place))
    if isinstance(value, (dict, list, tuple)):
        children = value.values() if isinstance(value, dict) else value
        return all(stays_traced(child, device, gpu_id) for child in children)
    plain = (int, float, complex, str, type(None), torch.dtype, torch.device, torch.nn.Module)
    return isinstance(value, plain)


def untraced(call: Callable[..., Any], *args: Any) -> Any:
    """Call it outside of the graph: arrays that change the framework have memory, and tracers have none."""
    if not _outside:
        _outside.append(registry.framework("torch").untraced(_called))
    return _outside[0](call, *args)


def _called(call: Callable[..., Any], *args: Any) -> Any:
    return call(*args)


#: `_called` as torch.compile leaves it alone, once that was needed.
_outside: list[Callable[..., Any]] = []
