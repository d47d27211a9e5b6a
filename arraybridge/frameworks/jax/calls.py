"""Numbers of calls inside programs of JAX, by which several runs of one call draw the same random numbers.

JAX runs a function for its value and for its pullback, and under `jax.checkpoint` once more, in an order that
nothing tells, and with arguments that XLA may round otherwise. What they have in common is a number that the
program asks for once for each call, and that a checkpoint keeps instead of asking again.

Names of JAX's own frames and traces are read here, for which it has no question;
``tests/functions/gradients/test_calls.py`` tells whether a release has others.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir, partial_eval

from arraybridge.frameworks.autodiff import LOST_CALL

try:
    from jax.extend.core import take_current_trace
except ImportError:  # JAX before 0.10
    from jax.core import take_current_trace

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


#: Functions, and modules, of JAX that make one step of a function for which a checkpoint has no rule.
_ONE_STEP = ("while_loop", "linear_call", "composite")
_OF_ONE_STEP = ("jax._src.custom_batching", "jax._src.lax.control_flow.solves")


def number_of_call(next_call: Callable[[], int], arrays: Sequence[Any]) -> Any:
    """The number, as of `told`, that the program asks for whenever it comes here with ``arrays``.

    Where it would ask twice for one call, it is `LOST_CALL`: in a while_loop, or a function with a rule of
    its own, under a checkpoint, which takes these as one step and runs them again as a whole.
    """
    is_one_step = False
    for frame in _stack():
        name = frame.f_code.co_name
        if name == "foretell":  # what lies below traces another program
            break
        if name in ("process_custom_jvp_call", "process_custom_vjp_call"):
            is_one_step |= type(frame.f_locals["self"]).__name__ == "DynamicJaxprTrace"
        is_one_step |= name in _ONE_STEP or frame.f_globals.get("__name__") in _OF_ONE_STEP
        if is_one_step and _is_checkpoint(frame):
            return told(LOST_CALL)

    def ask(*_: Any) -> np.ndarray:
        return told(next_call())

    number = jax.ShapeDtypeStruct(NO_CALL.shape, NO_CALL.dtype)
    little = [y for x in arrays for y in _little_of(x)]
    return _kept.bind(jax.pure_callback(ask, number, *little, vmap_method="sequential"))


def _little_of(x: Any) -> list[Any]:
    """The first, middle and last element: what differs between elements of a batch, or steps of a loop.

    XLA asks once for all steps where it sees that they are the same in each, as in zeros around an image.
    """
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended):
        return []
    x = jax.lax.stop_gradient(x)
    corners = [[0] * x.ndim, [n // 2 for n in x.shape], [max(n - 1, 0) for n in x.shape]]
    return [x[tuple(slice(i, i + 1) for i in corner)] for corner in corners]
