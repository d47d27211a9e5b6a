"""Gradients across frameworks, with JAX as the calling or the called framework."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.linear_util import WrappedFun
from jax.sharding import Mesh

from arraybridge.caches import exact_key, remember
from arraybridge.errors import GradientError
from arraybridge.frameworks.jax.surroundings import guard
from arraybridge.interface import autodiff

_Jitted = type(jax.jit(lambda: None))
_FLOAT0 = jax.dtypes.float0
#: The differentiable dtypes that JAX narrows if x64 is off, and the dtypes that it narrows them to.
_64_BIT_DTYPES = {np.dtype("float64"): "float32", np.dtype("complex128"): "complex64"}


class JaxAutodiff(autodiff.Autodiff):
    """JAX's gradients, computed by ``jax.vjp`` and ``jax.custom_vjp``."""

    constant_advice = "use jax.lax.stop_gradient(w) in the function"
    argument_advice = 'to_jax(w, grad="detach"), and list its position in argnums= of jax.grad'

    def is_tracked(self, x: Any) -> bool:
        return isinstance(x, jax.core.Tracer)

    def span(self, x: Any) -> autodiff.Extent:
        try:
            start = x.unsafe_buffer_pointer()
        except (AttributeError, ValueError, RuntimeError):  # the array is traced, or on several devices
            return 0, 0
        return start, start + x.size * x.dtype.itemsize

    def apply(self, operation: autodiff.Operation, arrays: list[Any]) -> list[Any]:
        operation.differentiated = False  # stays False until JAX calls `_forward`
        try:
            results, _ = _apply(operation, False, [], *arrays)
        except TypeError as error:
            if "forward-mode" not in str(error) or isinstance(error, GradientError):
                raise
            instead = "jax.grad, jax.vjp or jax.jacrev (jacrev(jacrev(f)) instead of jax.hessian)"
            raise autodiff.forward_mode_error(operation.label, instead) from error
        return list(results)

    def linearize(
        self, body: autodiff.Body, arrays: list[Any], active: Sequence[bool], label: str
    ) -> tuple[list[Any], autodiff.Linear]:
        traced = _are_traced(arrays)
        if isinstance(body, autodiff.Call) and isinstance(body.function.fn, _Jitted) and not traced:
            compiled = _run_compiled(body, arrays, active)
            if compiled is not None:
                return compiled
        results, vjp = _vjp(body, arrays, active)
        captures = not traced and _are_traced(results)
        captured = "a differentiated or traced array" if captures else ""
        return results, _linear(_eager_pull, results, vjp, captured)

    def check_argument(self, x: Any, label: str) -> None:
        _check_precision(x.dtype, label)


AUTODIFF = JaxAutodiff()


def _are_traced(arrays: Sequence[Any]) -> bool:
    return any(isinstance(x, jax.core.Tracer) for x in arrays)


def _check_precision(dtype: np.dtype, label: str) -> None:
    """Raise an error if JAX would narrow gradients of this dtype."""
    if dtype in _64_BIT_DTYPES and not jax.config.jax_enable_x64:
        raise GradientError(
            f"gradients of {dtype} would be narrowed, because JAX's x64 is off.",
            reason="x64 is off",
            advice=f"Call it inside `with jax.enable_x64(True):`, or pass {_64_BIT_DTYPES[dtype]}.",
            place=f"{label}()",
        )


@jax.tree_util.register_static
class _Static:
    """A wrapper around a static value in a pytree. JAX stores the value with the trace."""

    def __init__(self, value: Any) -> None:
        self.value = value


# -- JAX as the called framework -----------------------------------------------------------------------


def _vjp(body: autodiff.Body, arrays: Sequence[Any], active: Sequence[bool]) -> tuple[list[Any], Any]:
    """Return the results of ``body`` and JAX's pullback, a pytree that a jitted function can return."""

    def run_active(*values: Any) -> list[Any]:
        return body(autodiff.substitute(arrays, active, values))

    results, vjp = jax.vjp(run_active, *autodiff.select(arrays, active))
    return results, vjp


def _pull(kinds: tuple[tuple[Any, Any], ...], vjp: Callable[..., Any], cotangents: list[Any]) -> list[Any]:
    """Return the gradients that JAX's pullback computes, with zeros in place of missing cotangents.

    ``kinds`` contains the shape and dtype of each result.
    """
    zeros = [jnp.zeros(s, d) if jnp.issubdtype(d, jnp.inexact) else np.zeros(s, _FLOAT0) for s, d in kinds]
    cotangents = [z if c is None else _conj(c) for c, z in zip(cotangents, zeros, strict=True)]
    return list(map(_conj, vjp(cotangents)))


_jitted_pull = jax.jit(_pull, static_argnums=0)


def _eager_pull(
    kinds: tuple[tuple[Any, Any], ...], vjp: Callable[..., Any], cotangents: list[Any]
) -> list[Any]:
    """Call `_pull` outside of ``jax.jit``, and return gradients whose memory nothing else holds.

    A Python function in the pullback, such as the ``bwd`` of a ``custom_vjp``, may keep the array that it
    returns or a view of it. Its gradients are copied. Compiled functions always return new arrays.
    """
    gradients = _pull(kinds, vjp, cotangents)
    jaxpr = getattr(vjp, "jaxpr", None)  # not documented (JAX 0.10); without it, gradients are copied
    if _are_traced(gradients) or (jaxpr is not None and not _runs_python(jaxpr)):
        return gradients
    # Gradients are copied one at a time, so that at most one gradient is in memory twice.
    return [_copy(gradients.pop(0)) for _ in range(len(gradients))]


def _runs_python(jaxpr: Any) -> bool:
    """Return whether an operation of a jaxpr has a Python function as a parameter."""
    for value in jax.tree.leaves([equation.params for equation in jaxpr.eqns]):
        inner = getattr(value, "jaxpr", value)  # that of a ClosedJaxpr
        is_function = isinstance(value, WrappedFun) or (callable(value) and not isinstance(value, Mesh))
        if is_function or (hasattr(inner, "eqns") and _runs_python(inner)):
            return True
    return False


#: Copies an array in 4 µs, a quarter of the time that ``jnp.copy`` takes outside of ``jax.jit``.
_compiled_copy = jax.jit(jnp.copy)


def _copy(x: Any) -> Any:
    with guard(x):
        return _compiled_copy(x)


def _linear(
    pull: Callable[..., list[Any]], results: list[Any], vjp: Any, captured: str = ""
) -> autodiff.Linear:
    kinds = tuple((y.shape, y.dtype) for y in results)
    residuals = [x for x in jax.tree.leaves(vjp) if isinstance(x, jax.Array)]
    pull_back = functools.partial(pull, kinds, vjp)
    shardings = [None if _are_traced([y]) else y.sharding for y in results]
    if any(sharding is not None and len(sharding.device_set) > 1 for sharding in shardings):
        pull_back = functools.partial(_pull_over_devices, pull_back, shardings)
    return autodiff.Linear(pull_back, captured, residuals)


def _pull_over_devices(
    pull_back: Callable[[list[Any]], list[Any]], shardings: list[Any], cotangents: list[Any]
) -> list[Any]:
    """Place cotangents, which come from one device, on the devices of the results, and pull them back."""
    for i, (cotangent, sharding) in enumerate(zip(cotangents, shardings, strict=True)):
        if cotangent is not None and sharding is not None:
            with guard(cotangent):
                cotangents[i] = jax.device_put(cotangent, sharding)
    return pull_back(cotangents)


def _run_compiled(
    call: autodiff.Call, arrays: list[Any], active: Sequence[bool]
) -> tuple[list[Any], autodiff.Linear] | None:
    """Run a jitted function with compiled forward and backward passes; return None if that fails.

    Arrays and numbers are arguments of the compiled programs. All other values are constants, and so are
    numbers that the function needs while JAX traces it, such as ``static_argnames`` and shapes.
    """
    function = call.function
    # The leaves are copied, because other threads may run the same call.
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
        signature = (function.key(call), tuple(active), others)
        constants = function.constants.get(signature)
    except TypeError:  # an unhashable value
        return None
    if constants is None:
        with suppress(*_NOT_COMPILED):
            return _run_program(call, leaves, arrays, active, signature)
        constants = _constant_numbers(call, leaves, arrays, active)
    for leaf, is_constant in zip(leaves, constants, strict=True):
        leaf.is_passed = leaf.is_passed and not is_constant
    try:
        compiled = _run_program(call, leaves, arrays, active, signature)
    except _NOT_COMPILED:  # the eager call raises the error
        return None
    if signature not in function.constants:
        remember(function.constants, signature, constants, _MOST_PROGRAMS)
    return compiled


#: Errors that JAX raises if a traced number is read, and that functions raise for traced arguments.
_NOT_COMPILED = (jax.errors.JAXTypeError, TypeError, ValueError, OverflowError)
#: The largest number of cached programs per decorated function.
_MOST_PROGRAMS = 128


def _is_number(x: Any) -> bool:
    if isinstance(x, np.generic):
        return bool(jnp.issubdtype(x.dtype, jnp.number) or x.dtype == np.bool_)
    return isinstance(x, (float, int, complex))


def _run_program(
    call: autodiff.Call,
    leaves: list[autodiff.Leaf],
    arrays: list[Any],
    active: Sequence[bool],
    signature: Any,
) -> tuple[list[Any], autodiff.Linear]:
    """Return the results and derivative of a call. Its program is compiled on first use and then cached."""
    key = signature, tuple(None if leaf.is_passed else exact_key(leaf.value) for leaf in leaves)
    programs = call.function.programs
    program = programs.get(key)
    if program is None:
        program = remember(programs, key, _program(call, leaves, active), _MOST_PROGRAMS)
    results, vjp, refill = program(arrays, _values_to_pass(leaves))
    call.refill = refill.value
    return results, _linear(_jitted_pull, results, vjp)


def _constant_numbers(
    call: autodiff.Call, leaves: list[autodiff.Leaf], arrays: list[Any], active: Sequence[bool]
) -> list[bool]:
    """Return, for each leaf, whether it is a number that cannot be traced."""
    numbers = [leaf for leaf in leaves if leaf.is_passed and _is_number(leaf.value)]
    for leaf in numbers:
        leaf.is_passed = False
    for leaf in numbers:
        leaf.is_passed = True
        try:
            _program(call, leaves, active).eval_shape(arrays, _values_to_pass(leaves))
        except _NOT_COMPILED:
            leaf.is_passed = False
    constants = {id(leaf) for leaf in numbers if not leaf.is_passed}
    return [id(leaf) in constants for leaf in leaves]


def _values_to_pass(leaves: list[autodiff.Leaf]) -> list[Any]:
    return [leaf.value for leaf in leaves if leaf.is_passed]


def _program(call: autodiff.Call, leaves: list[autodiff.Leaf], active: Sequence[bool]) -> Any:
    """Return a jitted function of a call's arrays and of the values that are not compiled as constants."""
    # The program outlives this call, so it must not keep the arrays alive.
    empty = [leaf.with_value(None if leaf.is_passed else leaf.value) for leaf in leaves]
    call = call.with_leaves(empty)

    @jax.jit  # type: ignore[untyped-decorator]  # jax is Any here
    def forward(arrays: list[Any], values: list[Any]) -> tuple[list[Any], Any, _Static]:
        following = iter(values)
        filled = [leaf.with_value(next(following)) if leaf.is_passed else leaf for leaf in empty]
        inner = call.with_leaves(filled)
        results, vjp = _vjp(inner, arrays, active)
        return results, vjp, _Static(inner.refill)

    return forward


# -- JAX as the calling framework ----------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _apply(
    operation: autodiff.Operation, needs_state: bool, states: list[Any], *arrays: Any
) -> tuple[list[Any], list[Any]]:
    """Return the results of an operation, and the called framework's random state before the first run.

    ``needs_state`` states whether a traced call returns that state. If the first run was traced and the
    function draws random numbers, ``states`` contains the random state before that run.
    """
    if _are_traced(arrays):
        return _call_back(operation, needs_state, states, arrays)
    return _with_state(operation, states).linearize(list(map(_array, arrays)))[0], states


def _with_state(operation: autodiff.Operation, states: list[Any]) -> autodiff.Operation:
    """Return an operation with the random state before its first run, if ``states`` contains it."""
    return operation.copy_with_state(np.array(states[0])) if states else operation


def _forward(
    operation: autodiff.Operation, needs_state: bool, primals: list[Any], *operands: Any
) -> tuple[Any, Any]:
    """Return the results and the residuals, as the forward rule of `_apply`."""
    operation.differentiated = True
    # jax < 0.8 does not convert Python numbers to arrays here.
    states = [x.value for x in primals]
    arrays = [_array(x.value) for x in operands]
    if _are_traced(arrays):
        results, first = _apply(operation, True, states, *arrays)
        return (results, first if needs_state else states), (arrays, first, _Static(None))
    results, linear = operation.linearize(arrays)
    return (results, states), (arrays, states, _Static(linear))


def _backward(
    operation: autodiff.Operation, _needs_state: bool, residuals: Any, cotangents: Any
) -> tuple[Any, ...]:
    """Return the gradients, as the backward rule of `_apply`."""
    arrays, states, linear = residuals
    smooth = [None if _is_zero(c) else _conj(_array(c)) for c in cotangents[0]]
    pullback, operands = operation.pullback(arrays, smooth, linear.value)
    results, _ = _apply(pullback, False, states, *operands)
    gradients = map(_conj, results)
    return (None, *(next(gradients) if a else None for a in operation.active))


_apply.defvjp(_forward, _backward, symbolic_zeros=True)


def _is_zero(cotangent: Any) -> bool:
    """Return whether a cotangent belongs to an integer result or to an unused one."""
    symbolic = isinstance(cotangent, jax.custom_derivatives.SymbolicZero)
    return symbolic or getattr(cotangent, "dtype", None) == _FLOAT0


def _conj(x: Any) -> Any:
    """Convert between JAX's convention for complex gradients (jax-ml/jax#9110) and that of the others."""
    if not jnp.iscomplexobj(x):
        return x
    with guard(x):
        return jnp.conj(x)


def _array(x: Any) -> Any:
    """Return ``x`` as a JAX array; JAX also differentiates Python numbers and NumPy arrays."""
    return x if isinstance(x, jax.Array) else jnp.asarray(x)


def _call_back(
    operation: autodiff.Operation, needs_state: bool, states: list[Any], arrays: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """Call an operation from a traced program: predict its shapes, and compute its values in a callback."""
    shapes = operation.predict([(tuple(x.shape), x.dtype.name) for x in arrays])
    for _, dtype in shapes:
        _check_precision(jnp.dtype(dtype), operation.label)
        if dtype in ("int64", "uint64") and not jax.config.jax_enable_x64:
            raise autodiff.unpredictable_shapes_error(
                operation.label, f"a result cannot be {dtype}, because JAX's x64 is off; return int32"
            )
    expected = [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in shapes]
    # Without random draws, no state is returned, and a program that ignores the results skips the call.
    needs_state = needs_state and bool(operation.draws)
    if needs_state:  # a GPU has a random state only after its first use
        operation.enter(np.zeros(1, np.float32))
    first = [jax.ShapeDtypeStruct(operation.random_state().shape, np.uint8)] if needs_state else []

    # This callback must not call JAX functions, because they may wait for the thread that it occupies
    # (jax-ml/jax#24255).
    def on_host(states: list[Any], *values: Any) -> tuple[list[np.ndarray], list[np.ndarray]]:
        before = [operation.random_state()] if needs_state else []
        return _with_state(operation, states).on_host([np.asarray(x) for x in values]), before

    results, before = jax.pure_callback(on_host, (expected, first), states, *arrays, vmap_method="sequential")
    return results, before if needs_state else states
