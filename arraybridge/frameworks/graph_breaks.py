"""Graph breaks for torch.compile. It cannot trace conversions, because traced tensors have no memory."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

__all__ = ["break_graph_before", "call_untraced", "is_compiling"]

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
#: The reason for a graph break. torch.compile quotes it in its error if called with ``fullgraph=True``.
NO_FULL_GRAPH = (
    "arraybridge converts between frameworks outside of a graph. Do not pass fullgraph=True. To compile a"
    " decorated function, write @torch.compile below its decorator."
)
# `_call`, wrapped so that torch.compile does not trace it. The list is empty until the first use.
_untraced: list[Callable[..., Any]] = []


def is_compiling() -> bool:
    """Return whether torch.compile is tracing the caller."""
    return "torch._dynamo" in sys.modules and bool(sys.modules["torch"].compiler.is_dynamo_compiling())


def call_untraced(fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Call ``fn`` outside of the graph, and return its result. Call this only if `is_compiling` returns true.

    Neither ``fn`` nor the functions that it calls are traced.
    """
    if not _untraced:
        # PyTorch releases whose graph_break has no msg= break the graph, and then raise TypeError.
        with suppress(TypeError):
            sys.modules["torch._dynamo"].graph_break(msg=NO_FULL_GRAPH)
        # After the break, this line runs as ordinary Python. torch.compile cannot trace it.
        _untraced.append(_disable_tracing(_call))
    result: T = _untraced[0](fn, args, kwargs)
    return result


def break_graph_before(fn: F) -> F:
    """Mark ``fn`` so that torch.compile breaks the graph before each call to it, and return ``fn`` itself.

    The marks are the attributes that ``torch.compiler.disable`` sets; they cost no time in other calls. After
    the break, torch.compile may trace ``fn`` separately, so ``fn`` also has to call `call_untraced`.
    """
    vars(fn).update(_torchdynamo_disable=True, _torchdynamo_disable_msg=NO_FULL_GRAPH)
    return fn


def _disable_tracing(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``fn`` wrapped so that torch.compile breaks the graph instead of tracing it."""
    disable = sys.modules["torch"].compiler.disable
    try:
        return disable(fn, reason=NO_FULL_GRAPH)
    except TypeError:  # torch 2.6 has no reason=
        return disable(fn)


def _call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return fn(*args, **kwargs)
