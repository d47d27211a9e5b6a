"""`convert_memory` for the arguments and results of decorated functions, which torch.compile may trace."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from arraybridge.conversion import plans, trace
from arraybridge.conversion.convert import Grad, convert_memory
from arraybridge.frameworks import registry
from arraybridge.types import Cache, DeviceLike, GpuId

__all__ = ["being_compiled", "convert", "owner_name"]

#: Type → the name of the framework that owns its values, "" where none does.
_names: Cache[type, str] = Cache()


def _owner_name(x: Any) -> str:
    """The framework whose own array this is; "" for one of a library that is no framework here."""
    owner = registry.find_owner(x)
    return "" if owner is None else owner.name


def owner_name(x: Any) -> str:
    """As `_owner_name`, remembered by type."""
    cls = type(x)
    if cls is np.ndarray:
        return "numpy"  # not asked: torch.compile would hand over the tensor with which it traces NumPy
    name = _names.get(cls)
    return _names.keep(cls, _owner_name(x)) if name is None else name


def being_compiled() -> bool:
    """Whether torch.compile traces the function that asks."""
    # By the mark below it calls this while it traces, and else nobody of torch does.
    return "torch._dynamo" in sys.modules and str(sys._getframe(1).f_globals.get("__name__")).startswith(
        "torch."
    )


# As `trees._look`: torch.compile calls them while it traces, and traces what their callers do with that.
# (To look into sys.modules, it would go through all of it, which fails where an import is going on.)
_owner_name._dynamo_marked_constant = True  # type: ignore[attr-defined]
being_compiled._dynamo_marked_constant = True  # type: ignore[attr-defined]


def convert(
    x: Any,
    target: str,
    grad: Grad = "error",
    gpu_id: GpuId = None,
    device: DeviceLike | None = None,
    dtype: str | None = None,
) -> Any:
    """`convert_memory`, into which torch.compile does not look where it leaves a framework.

    torch.compile traces the rest of a decorated function, and it, too, traces NumPy; but not what happens to
    the memory behind the arrays.
    """
    plain = gpu_id is None and device is None and dtype is None
    if plain and grad == "error" and not being_compiled():
        if not trace.open_logs:
            try:
                return plans.by_form[target][type(x)](x)  # what convert_memory does first
            except plans.declined:
                pass
        return convert_memory(x, target)
    compiled = being_compiled()
    if plain and owner_name(x) == target and (compiled or not trace.open_logs):
        return x  # as convert_memory does, which would look who listens
    if compiled:
        if not _untraced:
            _untraced.append(registry.framework("torch").scopes.untraced(convert_memory))
        return _untraced[0](x, target, grad=grad, gpu_id=gpu_id, device=device, dtype=dtype)
    return convert_memory(x, target, grad=grad, gpu_id=gpu_id, device=device, dtype=dtype)


#: `convert_memory` as torch.compile leaves it alone, once that was needed.
_untraced: list[Callable[..., Any]] = []
