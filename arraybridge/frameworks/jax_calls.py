"""Numbers of calls inside programs of JAX, by which several runs of one call draw the same random numbers.

JAX runs a function for its value and for its pullback, and under `jax.checkpoint` once more, in an order that
nothing tells, and with arguments that XLA may round otherwise. What they have in common is a number that the
program asks for once for each call, and that a checkpoint keeps instead of asking again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from types import FrameType
from typing import Any

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir, partial_eval

from arraybridge.frameworks.autodiff import LOST_CALL

try:
    from jax.extend.core import set_current_trace, take_current_trace
except ImportError:  # JAX before 0.10
    from jax.core import set_current_trace, take_current_trace

__all__ = ["NO_CALL", "is_checkpointed", "is_staged", "number_in", "number_of_call", "told"]


def told(number: int) -> np.ndarray:
    """A number from 0 down as an array: of floats, since JAX has no cotangents for integers to add up."""
    return np.array(divmod(-number, 1 << 16), np.float32)


def number_in(array: np.ndarray) -> int:
    """The number that `told` put into an array, or that of a token."""
    if array.dtype.kind == "i":
        return int(array[0])
    high, low = array.tolist()
    return -int(high * (1 << 16) + low)


#: In place of the number of a call, where there is none.
NO_CALL = told(0)

# The identity, whose result is kept where jax.checkpoint, whatever its policy, keeps nothing else.
_kept = Primitive("arraybridge_kept")
_kept.def_impl(lambda x: x)
_kept.def_abstract_eval(lambda x: x)
mlir.register_lowering(_kept, lambda _, x: [x])
batching.defvectorized(_kept)


def _keep(_saveable: Any, unknown: Sequence[bool], given: Sequence[bool], equation: Any) -> tuple[Any, ...]:
    """What JAX asks of a primitive: where it is computed, and what the second run is given of it."""
    inputs = [x for x, is_given in zip(equation.invars, given, strict=True) if not is_given]
    if any(unknown):
        return None, equation, [True], [True], inputs
    # The second run of a while_loop can be given nothing. One that draws is refused; see `number_of_call`.
    if any(frame.f_code.co_name == "_while_partial_eval_custom" for frame in _stack()):
        return equation, equation, [False], [True], inputs
    return equation, None, [False], [False], []


partial_eval.partial_eval_jaxpr_custom_rules[_kept] = _keep


def _stack() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def is_checkpointed() -> bool:
    """Whether what JAX traces now is under `jax.checkpoint`; JAX does not tell, but the stack."""
    return any(map(_is_checkpoint, _stack()))


def _is_checkpoint(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__") == "jax._src.ad_checkpoint"


def is_staged() -> bool:
    """Whether JAX traces what is called now, to run it later; derivatives alone are taken of values."""
    with take_current_trace() as current:
        trace = current
        while type(trace).__name__ in ("JVPTrace", "LinearizeTrace"):
            trace = trace.parent_trace
        return type(trace).__name__ != "EvalTrace"


def number_of_call(next_call: Callable[[], int], arrays: Sequence[Any]) -> Any:
    """The number, as of `told`, that the program asks for whenever it comes here with ``arrays``.

    In a while_loop under a checkpoint, where it would ask twice for one call, it is `LOST_CALL`.
    """
    around, in_loop = None, False
    for frame in _stack():
        name = frame.f_code.co_name
        if name == "foretell":  # what lies below traces another program
            break
        if name == "while_loop":
            in_loop = True
        elif in_loop and _is_checkpoint(frame):
            return told(LOST_CALL)
        elif name in ("process_custom_jvp_call", "process_custom_vjp_call"):
            trace = frame.f_locals["self"]
            around = trace if type(trace).__name__ == "DynamicJaxprTrace" else around

    def ask(*_: Any) -> np.ndarray:
        return told(next_call())

    little = []
    if around is None:
        # Of each array a little, so that it asks for each element of a batch, and in each step of a loop.
        plain = [x for x in arrays if not jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended)]
        little = [jax.lax.stop_gradient(x[(slice(0, 1),) * x.ndim]) for x in plain]
    # Outside of functions with a rule of their own: a checkpoint takes these as one step, and runs it again.
    with nullcontext() if around is None else set_current_trace(around):
        number = jax.ShapeDtypeStruct(NO_CALL.shape, NO_CALL.dtype)
        return _kept.bind(jax.pure_callback(ask, number, *little, vmap_method="sequential"))
