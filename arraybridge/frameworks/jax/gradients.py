"""Derivatives of JAX, as the caller and as the callee."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from arraybridge.errors import GradientError
from arraybridge.frameworks import autodiff
from arraybridge.types import exact_key

_Jitted = type(jax.jit(lambda: None))
_FLOAT0 = jax.dtypes.float0
_WIDE_DTYPES = (np.dtype("float64"), np.dtype("complex128"))


class JaxAutodiff(autodiff.Autodiff):
    def is_tracked(self, x: Any) -> bool:
        return isinstance(x, jax.core.Tracer)

    def span(self, x: Any) -> autodiff.Extent:
        try:
            start = x.unsafe_buffer_pointer()
        except (AttributeError, ValueError, RuntimeError):  # traced, or on several devices
            return 0, 0
        return start, start + x.size * x.dtype.itemsize

    def apply(self, operation: autodiff.Operation, arrays: list[Any]) -> list[Any]:
        operation.differentiated = False  # until its forward rule is asked for
        try:
            results, _ = _applied(operation, False, [], *arrays)
        except TypeError as error:
            if "forward-mode" not in str(error) or isinstance(error, GradientError):
                raise
            instead = "jax.grad, jax.vjp or jax.jacrev (jacrev(jacrev(f)) in place of jax.hessian)"
            raise autodiff.forward_mode_error(operation.label, instead) from error
        return list(results)

    def linearize(
        self, body: autodiff.Body, arrays: list[Any], active: Sequence[bool], label: str
    ) -> tuple[list[Any], autodiff.Linear]:
        traced = _are_traced(arrays)
        if isinstance(body, autodiff.Call) and isinstance(body.function.fn, _Jitted) and not traced:
            compiled = _compiled(body, arrays, active)
            if compiled is not None:
                return compiled
        results, vjp = _vjp(body, arrays, active)
        captures = not traced and _are_traced(results)
        captured = "an array that is differentiated or traced and none of its arguments" if captures else ""
        return results, _linear(_eager_pull, results, vjp, captured)

    def check_argument(self, x: Any, label: str) -> None:
        _check_precision(x.dtype, label)


AUTODIFF = JaxAutodiff()


def _are_traced(arrays: Sequence[Any]) -> bool:
    return any(isinstance(x, jax.core.Tracer) for x in arrays)


def _check_precision(dtype: np.dtype, label: str) -> None:
    if dtype in _WIDE_DTYPES and not jax.config.jax_enable_x64:
        raise GradientError(
            f"{dtype} while JAX's x64 is off, so that gradients would be narrowed.",
            reason="x64 is off",
            advice="Call it under jax.enable_x64(True), or pass float32.",
            place=f"{label}()",
        )


@jax.tree_util.register_static
class _Static:
    """Anything, in the place of an array: part of what JAX keeps of a trace."""

    def __init__(self, value: Any) -> None:
        self.value = value


# -- the callee ----------------------------------------------------------------------------------------


def _vjp(body: autodiff.Body, arrays: Sequence[Any], active: Sequence[bool]) -> tuple[list[Any], Any]:
    """Results, and JAX's pullback: a container of its residuals, which a program may return."""

    def of_active(*values: Any) -> list[Any]:
        return body(autodiff.substitute(arrays, active, values))

    results, vjp = jax.vjp(of_active, *autodiff.select(arrays, active))
    return results, vjp


def _pull(kinds: tuple[tuple[Any, Any], ...], vjp: Callable[..., Any], cotangents: list[Any]) -> list[Any]:
    """JAX's pullback, with zeros of these shapes and dtypes for the cotangents that are missing."""
    zeros = [jnp.zeros(s, d) if jnp.issubdtype(d, jnp.inexact) else np.zeros(s, _FLOAT0) for s, d in kinds]
    cotangents = [z if c is None else _conj(c) for c, z in zip(cotangents, zeros, strict=True)]
    return list(map(_conj, vjp(cotangents)))


_jitted_pull = jax.jit(_pull, static_argnums=0)


def _eager_pull(
    kinds: tuple[tuple[Any, Any], ...], vjp: Callable[..., Any], cotangents: list[Any]
) -> list[Any]:
    """Pull back outside of a program, and copy the gradients.

    The ``bwd`` of a ``custom_vjp`` may return an array that it keeps. Nothing public tells such an array
    from a new one, short of tracing the pullback again, which takes longer than the copy. A program always
    returns new arrays.
    """
    gradients = _pull(kinds, vjp, cotangents)
    if _are_traced(gradients):
        return gradients
    # One at a time, so that no more than one of them is in memory twice.
    return [_compiled_copy(gradients.pop(0)) for _ in range(len(gradients))]


#: A quarter of what ``jnp.copy`` takes outside of a program: 4 µs.
_compiled_copy = jax.jit(jnp.copy)


def _linear(
    pull: Callable[..., list[Any]], results: list[Any], vjp: Any, captured: str = ""
) -> autodiff.Linear:
    kinds = tuple((y.shape, y.dtype) for y in results)
    residuals = [x for x in jax.tree.leaves(vjp) if isinstance(x, jax.Array)]
    return autodiff.Linear(functools.partial(pull, kinds, vjp), captured, residuals)


def _compiled(
    call: autodiff.Call, arrays: list[Any], active: Sequence[bool]
) -> tuple[list[Any], autodiff.Linear] | None:
    """Run a jitted function by compiled programs for its forward pass and pullback; None if it cannot be.

    Arrays and numbers are arguments of the programs. Numbers that the function reads while JAX traces it
    (``static_argnames``, a shape), and all other values, are constants of a program.
    """
    function = call.function
    # Copies, since other threads may run the same call.
    leaves = [
        autodiff.Leaf(
            leaf.value,
            is_argument=leaf.is_argument,
            is_passed=isinstance(leaf.value, jax.Array) or _is_number(leaf.value),
        )
        for leaf in call.leaves
    ]
    others = tuple(type(leaf.value) if leaf.is_passed else exact_key(leaf.value) for leaf in leaves)
    try:
        form = (function.key(call), tuple(active), others)
        constants = function.constants.get(form)
    except TypeError:  # something in it cannot be hashed
        return None
    if constants is None:
        with suppress(*_NOT_COMPILED):
            return _run_program(call, leaves, arrays, active, form)
        constants = _constant_numbers(call, leaves, arrays, active)
    for leaf, is_constant in zip(leaves, constants, strict=True):
        leaf.is_passed = leaf.is_passed and not is_constant
    try:
        compiled = _run_program(call, leaves, arrays, active, form)
    except _NOT_COMPILED:  # the eager call raises its error
        return None
    if form not in function.constants:
        _remember(function.constants, form, constants)
    return compiled


#: What JAX raises for a traced number whose value is read, and functions for arguments that they refuse.
_NOT_COMPILED = (jax.errors.JAXTypeError, TypeError, ValueError, OverflowError)
#: How many programs one decorated function keeps.
_MOST_PROGRAMS = 128


def _is_number(x: Any) -> bool:
    if isinstance(x, np.generic):
        return bool(jnp.issubdtype(x.dtype, jnp.number) or x.dtype == np.bool_)
    return isinstance(x, (float, int, complex))


def _remember(table: dict[Any, Any], key: Any, value: Any) -> None:
    """Add an entry to a table of programs, in place of the oldest one if it is full."""
    if len(table) >= _MOST_PROGRAMS:
        table.pop(list(table)[0], None)  # noqa: RUF015  # other threads may change the table
    table[key] = value


def _run_program(
    call: autodiff.Call,
    leaves: list[autodiff.Leaf],
    arrays: list[Any],
    active: Sequence[bool],
    form: Any,
) -> tuple[list[Any], autodiff.Linear]:
    key = form, tuple(None if leaf.is_passed else exact_key(leaf.value) for leaf in leaves)
    programs = call.function.programs
    program = programs.get(key)
    if program is None:
        program = _program(call, leaves, active)
        _remember(programs, key, program)
    results, vjp, refill = program(arrays, _passed(leaves))
    call.refill = refill.value
    return results, _linear(_jitted_pull, results, vjp)


def _constant_numbers(
    call: autodiff.Call, leaves: list[autodiff.Leaf], arrays: list[Any], active: Sequence[bool]
) -> list[bool]:
    """Find the leaves that have to be constants: the numbers that cannot be traced, and no others."""
    numbers = [leaf for leaf in leaves if leaf.is_passed and _is_number(leaf.value)]
    for leaf in numbers:
        leaf.is_passed = False
    for leaf in numbers:
        leaf.is_passed = True
        try:
            _program(call, leaves, active).eval_shape(arrays, _passed(leaves))
        except _NOT_COMPILED:
            leaf.is_passed = False
    constants = {id(leaf) for leaf in numbers if not leaf.is_passed}
    return [id(leaf) in constants for leaf in leaves]


def _passed(leaves: list[autodiff.Leaf]) -> list[Any]:
    return [leaf.value for leaf in leaves if leaf.is_passed]


def _program(call: autodiff.Call, leaves: list[autodiff.Leaf], active: Sequence[bool]) -> Any:
    # The program outlives this call, and keeps no array of it.
    empty = [dataclasses.replace(leaf, value=None if leaf.is_passed else leaf.value) for leaf in leaves]
    call = dataclasses.replace(call, leaves=empty, refill=list)

    @jax.jit  # type: ignore[untyped-decorator]  # jax is Any here
    def forward(arrays: list[Any], values: list[Any]) -> tuple[list[Any], Any, _Static]:
        following = iter(values)
        filled = [
            dataclasses.replace(leaf, value=next(following)) if leaf.is_passed else leaf for leaf in empty
        ]
        inner = dataclasses.replace(call, leaves=filled)
        results, vjp = _vjp(inner, arrays, active)
        return results, vjp, _Static(inner.refill)

    return forward


# -- the caller ----------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _applied(
    operation: autodiff.Operation, asked: bool, states: list[Any], *arrays: Any
) -> tuple[list[Any], list[Any]]:
    """The results of an operation, and the callee's random state before its first run.

    ``asked``: whether that state is wanted where JAX traces; ``states``: that of a first run that JAX traced,
    if it draws random numbers.
    """
    if _are_traced(arrays):
        return _called_back(operation, asked, states, arrays)
    for state in states:
        operation = operation.replaying(np.array(state))
    return operation.linearize(list(map(_array, arrays)))[0], states


def _forward(
    operation: autodiff.Operation, asked: bool, primals: list[Any], *operands: Any
) -> tuple[Any, Any]:
    operation.differentiated = True
    # A number of Python stays one here before JAX 0.8.
    states = [x.value for x in primals]
    arrays = [_array(x.value) for x in operands]
    if _are_traced(arrays):
        results, first = _applied(operation, True, states, *arrays)
        return (results, first if asked else states), (arrays, first, _Static(None))
    results, linear = operation.linearize(arrays)
    return (results, states), (arrays, states, _Static(linear))


def _backward(
    operation: autodiff.Operation, _asked: bool, residuals: Any, cotangents: Any
) -> tuple[Any, ...]:
    arrays, states, linear = residuals
    smooth = [None if _is_zero(c) else _conj(_array(c)) for c in cotangents[0]]
    pullback, operands = operation.pullback(arrays, smooth, linear.value)
    results, _ = _applied(pullback, False, states, *operands)
    gradients = map(_conj, results)
    return (None, *(next(gradients) if a else None for a in operation.active))


_applied.defvjp(_forward, _backward, symbolic_zeros=True)


def _is_zero(cotangent: Any) -> bool:
    """Whether it belongs to a result of integers, or to one that is not used."""
    symbolic = isinstance(cotangent, jax.custom_derivatives.SymbolicZero)
    return symbolic or getattr(cotangent, "dtype", None) == _FLOAT0


def _conj(x: Any) -> Any:
    """From JAX's convention for complex numbers to that of the others, and back."""
    return jnp.conj(x) if jnp.iscomplexobj(x) else x


def _array(x: Any) -> Any:
    """JAX differentiates numbers of Python and arrays of NumPy, too."""
    return x if isinstance(x, jax.Array) else jnp.asarray(x)


def _called_back(
    operation: autodiff.Operation, asked: bool, states: list[Any], arrays: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """The operation in a program: its shapes are foretold, and its values come by a callback."""
    shapes = operation.predict([(tuple(x.shape), x.dtype.name) for x in arrays])
    for _, dtype in shapes:
        _check_precision(jnp.dtype(dtype), operation.label)
        if dtype in ("int64", "uint64") and not jax.config.jax_enable_x64:
            raise autodiff.unpredictable_shapes_error(
                operation.label, f"{dtype} while JAX's x64 is off; return int32"
            )
    expected = [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in shapes]
    # Where there is nothing to ask for, a program without the results need not run the function for it.
    asked = asked and bool(operation.draws)
    if asked:  # the random numbers of a card count once it is in use
        operation.enter(np.zeros(1, np.float32))
    first = [jax.ShapeDtypeStruct(operation.random_state().shape, np.uint8)] if asked else []

    # Functions of JAX itself could wait in here for the thread that this occupies.
    def on_host(states: list[Any], *values: Any) -> tuple[list[np.ndarray], list[np.ndarray]]:
        before = [operation.random_state()] if asked else []
        return operation.on_host([np.asarray(x) for x in values], list(map(np.array, states))), before

    results, before = jax.pure_callback(on_host, (expected, first), states, *arrays, vmap_method="sequential")
    return results, before if asked else states
