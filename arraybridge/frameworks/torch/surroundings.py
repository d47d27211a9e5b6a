"""Context managers within which PyTorch computes independently of the caller's modes and transforms."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch

from arraybridge.interface.runtime import NO_CONTEXT

__all__ = ["count_modes", "guard", "isolate", "retry_in_isolation"]

T = TypeVar("T")

# Within transforms such as torch.func.grad, .numpy() raises for every tensor (pytorch/pytorch#91810, torch
# 2.13). The functions that find and leave them have no public names.
try:
    from torch._C._functorch import peek_interpreter_stack
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
except ImportError:
    # It never returns None, so `isolate` always enters both context managers.
    peek_interpreter_stack = nullcontext  # type: ignore[assignment, unused-ignore]
    temporarily_clear_interpreter_stack = nullcontext

# The number of active dispatch modes (private function of torch 2.6 to 2.14). One of them may be make_fx.
count_modes = torch._C._len_torch_dispatch_stack  # noqa: SLF001  # it has no public name


def isolate() -> AbstractContextManager[Any]:
    """Return a context manager outside of FakeTensorMode and the transforms of ``torch.func``."""
    if not count_modes() and peek_interpreter_stack() is None:
        return NO_CONTEXT  # entering the others takes 4 µs
    return _leave_modes()


@contextmanager
def _leave_modes() -> Iterator[None]:
    with temporarily_clear_interpreter_stack(), _without_fake_mode():
        yield


@contextmanager
def guard(x: torch.Tensor) -> Iterator[None]:
    """Leave FakeTensorMode and autocast for an operation on a tensor."""
    kind = x.device.type
    # For "meta" and others without autocast, is_autocast_enabled() raises.
    has_autocast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    with torch.autocast(kind, enabled=False) if has_autocast else nullcontext(), _without_fake_mode():
        yield


def retry_in_isolation(fn: Callable[..., T], *args: Any) -> T:
    """Return ``fn(*args)``, computed outside of FakeTensorMode and transforms if it raises within them."""
    try:
        return fn(*args)
    except (AssertionError, RuntimeError):
        with isolate():
            return fn(*args)


def _without_fake_mode() -> AbstractContextManager[Any]:
    """Return a context manager outside of FakeTensorMode, which has no public name (torch 2.13)."""
    module = sys.modules.get("torch._subclasses.fake_tensor")
    return getattr(module, "unset_fake_temporarily", nullcontext)()
