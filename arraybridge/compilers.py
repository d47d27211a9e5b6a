"""Exempt the functions of this package from compilers: torch.compile, and AutoGraph (``tf.function``).

Neither can compile a conversion, because traced values have no memory. Two decorators exempt a function:

- `exempt` marks a function, at no cost per call. torch.compile breaks its graph before each call, and
  AutoGraph does not rewrite the function.
- `run_eagerly` also runs the function, and all functions that it calls, as ordinary Python.

A mark does not exempt the functions that a marked function calls. While compiled code runs, Python calls a
hook of torch.compile for every function that starts, also inside functions that are not traced. The hook
traces each function with a tensor or a NumPy array among its arguments (torch 2.13). The hook makes read-only
NumPy arrays writable (pytorch/pytorch#112524) and raises AssertionError if it cannot. JAX operations fail in
functions that it traces.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

__all__ = ["exempt", "find_untraced_call", "hook_getter", "run_eagerly"]

F = TypeVar("F", bound=Callable[..., Any])
#: A function that takes another function and its arguments, and calls it.
Call = Callable[..., Any]
#: The reason for a graph break, which torch.compile quotes in its error if a break is not allowed
#: (pytorch/pytorch#144908).
NO_FULL_GRAPH = (
    "arraybridge converts between frameworks outside of a graph. Do not pass fullgraph=True. With"
    " torch.export, which implies it, convert before or after the exported function. To compile a decorated"
    " function, write @torch.compile below the decorator of arraybridge."
)
_DYNAMO = "torch._dynamo"
#: The function that returns torch.compile's hook in this thread. While this list is empty, ``torch._dynamo``
#: is not imported, and callers do not call `find_untraced_call`. Testing the list takes 10 ns.
hook_getter: list[Callable[[], object]] = []


def exempt(fn: F) -> F:
    """Mark ``fn`` so that torch.compile breaks its graph before each call and AutoGraph does not rewrite it.

    The marks are the attributes that ``torch.compiler.disable`` and AutoGraph set on their own functions
    (torch/_dynamo/decorators.py, tensorflow/python/autograph/impl/api.py).
    """
    vars(fn).update(_torchdynamo_disable=True, _torchdynamo_disable_msg=NO_FULL_GRAPH, autograph_info__={})
    return fn


def run_eagerly(fn: F, on_error: Callable[..., object] | None = None) -> F:
    """Return ``fn`` wrapped so that no compiler traces or rewrites the function or any that it calls.

    If a call raises ``TypeError`` or ``ValueError``, the wrapper calls ``on_error(fn, args, kwargs)``, which
    may raise a clearer error. The wrapper takes 0.1 µs, and 0.5 µs inside compiled code.
    """

    @functools.wraps(fn)
    def eager(*args: Any, **kwargs: Any) -> Any:
        if hook_getter:
            try:
                call = find_untraced_call()
            finally:
                # This ``try`` statement is deliberate. If the hook starts at `eager`, torch.compile, which
                # cannot break its graph inside of such a statement (2.14), runs `eager` as ordinary Python,
                # without inspecting the arguments.
                pass
            if call is not None:
                return call(eager, *args, **kwargs)
        try:
            return fn(*args, **kwargs)
        except (TypeError, ValueError):
            if on_error is not None:
                on_error(fn, args, kwargs)
            raise

    return cast("F", exempt(eager))


@exempt
def find_untraced_call() -> Call | None:
    """Return a function that calls others outside of torch.compile; None if it traces nothing now.

    Call this inside a ``try`` statement, and only if `hook_getter` is filled; see `run_eagerly`.
    """
    return _untraced_call() if hook_getter[0]() else None


@functools.cache
def _untraced_call() -> Call:
    """Return a function that calls another one, wrapped by ``torch.compiler.disable``."""

    def call(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    disable = sys.modules["torch"].compiler.disable
    try:
        return cast("Call", disable(call, reason=NO_FULL_GRAPH))
    except TypeError:  # torch 2.6 has no reason=, pytorch/pytorch#150341
        return cast("Call", disable(call))


class _ImportObserver:
    """A finder in ``sys.meta_path`` that finds no module. It fills `hook_getter` for ``torch._dynamo``."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == _DYNAMO and not hook_getter:
            add_hook_getter()


def add_hook_getter() -> None:
    """Fill `hook_getter`, when ``torch._dynamo`` is imported."""
    # ``import torch`` has loaded this compiled module. Its private function returns None if there is no hook
    # (torch 2.6 to 2.14). If a release has no such function, calls run as if there were no hook, and the
    # tests of first calls in compiled code fail.
    module = sys.modules.get("torch._C._dynamo.eval_frame")
    hook_getter.append(getattr(module, "get_eval_frame_callback", _no_hook))


def _no_hook() -> None:
    return None


if _DYNAMO in sys.modules:
    add_hook_getter()
else:
    sys.meta_path.insert(0, _ImportObserver())
