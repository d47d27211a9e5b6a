"""JAX's half of gradients across frameworks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from arraybridge.errors import GradientError
from arraybridge.frameworks import hostmemory
from arraybridge.frameworks.autodiff import (
    Autodiff,
    Body,
    Linear,
    Operation,
    Span,
    held_by_one,
    kept_among,
    no_forward_mode,
    runs_again,
)
from arraybridge.frameworks.tokens import token_of

__all__ = ["JaxAutodiff"]

_WIDE = frozenset(("float64", "complex128"))
_Jitted = type(jax.jit(lambda: None))
#: Arguments of a compiled function that are no arrays: passed on as numbers, or fixed in the program.
_NUMBERS = (int, float, complex, bool)
_FIXED = (str, bytes, type(None))
_MOST_PROGRAMS = 256


class JaxAutodiff(Autodiff):
    transposes = True

    def is_differentiated(self, x: Any) -> bool:
        return isinstance(x, jax.core.Tracer)

    def is_smooth(self, x: Any) -> bool:
        return _is_smooth(x.dtype)

    def span(self, x: Any) -> Span | None:
        if not isinstance(x, jax.Array):
            return (0, 0)  # no memory that anybody knows
        try:
            start = x.unsafe_buffer_pointer()
        except (ValueError, RuntimeError, jax.errors.JAXTypeError):
            return None
        return start, start + x.size * x.dtype.itemsize

    def conjugate(self, x: Any) -> Any:
        return jnp.conj(x) if jnp.issubdtype(x.dtype, jnp.complexfloating) else x

    def admit(self, x: Any, label: str) -> None:
        if x.dtype.name in _WIDE:
            _refuse_wide(x.dtype.name, label)

    # -- as the caller -----------------------------------------------------------------------------

    def apply(self, operation: Operation, arrays: Sequence[Any]) -> list[Any]:
        try:
            results, _ = _bridge(operation, None, *arrays)
        except TypeError as error:
            if "forward-mode" in str(error) and not isinstance(error, GradientError):
                raise no_forward_mode(operation.label) from error
            raise
        return list(results)

    # -- as the callee -----------------------------------------------------------------------------

    def linearise(self, body: Any, arrays: list[Any], wanted: tuple[bool, ...], label: str) -> Linear:
        if isinstance(getattr(body, "fn", None), _Jitted) and not body.own:
            found = _compiled(body, arrays, wanted)
            if found is not None:
                return found
        outs: list[Any] = []

        def smooth(*inputs: Any) -> list[Any]:
            given = iter(inputs)
            leaves, spec = body([next(given) if w else x for x, w in zip(arrays, wanted, strict=True)])
            outs[:] = [leaves, spec]
            return [x for x in leaves if _is_array(x) and _is_smooth(x.dtype)]

        with _traced_apart(1 + runs_again.get()):
            results, pullback = jax.vjp(smooth, *(x for x, w in zip(arrays, wanted, strict=True) if w))
        linear = _Pullback(pullback, [(x.shape, x.dtype) for x in results], _places(results))
        found = iter(results)
        linear.leaves = [next(found) if _is_array(x) and _is_smooth(x.dtype) else _value(x) for x in outs[0]]
        linear.spec = outs[1]
        outs.clear()  # tracers, which hold the results, too
        residuals = linear.residuals()  # the pullback holds each once, too
        linear.kept = kept_among(linear.leaves, results, residuals, residuals)
        if any(isinstance(x, jax.core.Tracer) for x in linear.leaves):
            raise GradientError(
                f"{label}(): it depends on a traced array of JAX that is none of its arguments; pass it",
                target_type="jax",
                reason="captured tracer",
            )
        # Else they may be computed from the caller's memory while the caller writes to it.
        jax.block_until_ready(residuals)
        return linear

    def pulled(
        self, body: Body, count: int, takes: tuple[bool, ...], present: tuple[bool, ...], whole: bool = False
    ) -> Body:
        def pullback(arrays: list[Any]) -> tuple[list[Any], Any]:
            def smooth(*inputs: Any) -> list[Any]:
                given = iter(inputs)
                leaves, _ = body(
                    [next(given) if t else x for x, t in zip(arrays[:count], takes, strict=True)]
                )
                return [x for x in leaves if _is_array(x) and _is_smooth(x.dtype)]

            with _traced_apart(2):
                results, pull = jax.vjp(smooth, *(x for x, t in zip(arrays, takes, strict=False) if t))
            given = iter(arrays[count:])
            cotangents = _placed([next(given) if p else None for p in present], _places(results))
            return _pulled_back(pull, cotangents, [(x.shape, x.dtype) for x in results]), None

        return pullback

    def is_held(self, x: Any) -> bool:
        return sys.getrefcount(x) > held_by_one()


#: Functions under `jax.jit` are traced again where another framework differentiates them: a program of theirs
#: that was made without, under torch.no_grad(), say, has what they capture as constants, unseen by anybody.
#: And once more where it runs again, for a pullback, and random numbers of functions inside would be others.
_traced_apart: Callable[[int], AbstractContextManager[Any]] = (
    jax.make_user_context(0) if hasattr(jax, "make_user_context") else nullcontext
)


@cache
def _is_smooth(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.inexact))


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array)


def _refuse_wide(dtype: str, label: str) -> None:
    if not jax.config.jax_enable_x64:
        raise GradientError(
            f"{label}(): JAX narrows {dtype} in its backward while x64 is off, and gradients would be wrong"
            " by 1e-7; call it inside `with jax.enable_x64(True):` (jax.experimental.enable_x64() in older"
            " releases), set JAX_ENABLE_X64=1, or cast to float32 first",
            target_type="jax",
            reason=f"{dtype} while x64 is off",
        )


def _value(x: Any) -> Any:
    """A result that needs no derivative, without the tracers of `jax.vjp` around it."""
    return jax.lax.stop_gradient(x) if isinstance(x, jax.core.Tracer) else x


def _places(arrays: Sequence[Any]) -> list[Any]:
    """The sharding of each array, which says on which devices it is; None where it has no value yet."""
    return [getattr(_primal(x), "sharding", None) for x in arrays]


def _primal(x: Any) -> Any:
    """The value that JAX differentiates at; None where it traces a program (`jax.jit`)."""
    while isinstance(x, jax.core.Tracer):
        x = getattr(x, "primal", None)
    return x


def _placed(arrays: Sequence[Any], places: Sequence[Any]) -> list[Any]:
    """The arrays where others were, with which JAX computes on the same devices alone."""
    return [
        x if place is None or here in (place, None) else jax.device_put(x, place)
        for x, here, place in zip(arrays, _places(arrays), places, strict=True)
    ]


class _Pullback(Linear):
    """A function of JAX at a point: its pullback, a pytree whose leaves are the residuals."""

    def __init__(
        self, pullback: Any, results: list[Any], places: list[Any], *, compiled: bool = False
    ) -> None:
        self._pullback, self._results, self._places, self.fresh = pullback, results, places, compiled

    def pull(self, cotangents: list[Any]) -> list[Any]:
        cotangents = _placed(cotangents, self._places)
        if self.fresh:
            return list(_pull_compiled(self._pullback, cotangents, tuple(self._results)))
        return _pulled_back(self._pullback, cotangents, self._results)

    def residuals(self) -> list[Any]:
        return jax.tree_util.tree_leaves(self._pullback)

    def rebuild(self) -> Callable[[list[Any]], Linear]:
        residuals, treedef = jax.tree_util.tree_flatten(self._pullback)
        results, places, compiled = self._results, self._places, self.fresh
        theirs = _places(residuals)
        return lambda leaves: _Pullback(
            treedef.unflatten(_placed(leaves, theirs)), results, places, compiled=compiled
        )


@partial(jax.jit, static_argnums=2)
def _pull_compiled(pullback: Any, cotangents: list[Any], results: tuple[Any, ...]) -> Any:
    return _pulled_back(pullback, cotangents, results)


def _pulled_back(pullback: Any, cotangents: Sequence[Any], results: Sequence[Any]) -> list[Any]:
    """The gradients; where there is no cotangent, by zeros, which JAX need not compute with if it knows."""
    if all(c is not None for c in cotangents):
        return list(pullback(list(cotangents)))
    zero = _symbolic_zero()
    try:
        return list(pullback(_with_zeros(cotangents, results, zero)))
    except _NO_SYMBOLS:
        # jax.lax.scan does not take them for what it stacks, in JAX 0.10.
        if zero is jnp.zeros:
            raise
        return list(pullback(_with_zeros(cotangents, results, jnp.zeros)))


def _with_zeros(
    cotangents: Sequence[Any], results: Sequence[Any], zero: Callable[[tuple[int, ...], Any], Any]
) -> list[Any]:
    return [
        c if c is not None else zero(shape, dtype)
        for c, (shape, dtype) in zip(cotangents, results, strict=True)
    ]


#: What JAX raises where it does not take a symbolic zero.
_NO_SYMBOLS = (TypeError, ValueError, AttributeError, AssertionError)


@cache
def _symbolic_zero() -> Callable[[tuple[int, ...], Any], Any]:
    """What stands for a cotangent of zeros: that of JAX itself where its pullbacks take it, else an array."""
    from jax.interpreters import ad

    def symbolic(shape: tuple[int, ...], dtype: Any) -> Any:
        return ad.Zero(jax.core.ShapedArray(shape, dtype))

    try:
        _, pullback = jax.vjp(lambda x: (x, x), jnp.float32(1))
        pullback((jnp.float32(1), symbolic((), np.dtype(np.float32))))
    except _NO_SYMBOLS:
        return jnp.zeros
    return symbolic


# -- what is compiled ----------------------------------------------------------------------------------


@jax.tree_util.register_static
class _Known:
    """What is known of a compiled program's results while it is traced."""

    def __init__(self, *facts: Any) -> None:
        self.facts = facts

    def __hash__(self) -> int:
        return hash(self.facts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Known) and vars(self) == vars(other)


def _compiled(body: Any, arrays: list[Any], wanted: tuple[bool, ...]) -> Linear | None:
    """The linear form of a function under `jax.jit`, by two programs that are compiled once a structure.

    None where an argument is an object that the programs could not be told apart by.
    """
    numbers, fixed = [], []
    for i, leaf in enumerate(body.fixed):
        cls = type(leaf)
        if cls in _NUMBERS:
            numbers.append(i)
        elif cls in _FIXED:
            fixed.append((i, leaf))
        elif i not in body.others:
            return None
    smooth = [x for x, w in zip(arrays, wanted, strict=True) if w]
    rest = [x for x, w in zip(arrays, wanted, strict=True) if not w]
    others = [body.fixed[i] for i in body.others]
    values = [body.fixed[i] for i in numbers]
    key = (body.spec.key(), tuple(body.live), wanted, tuple(numbers), tuple(fixed), runs_again.get())
    try:
        program = body.programs.get(key)
    except TypeError:  # a key or a field that cannot be hashed
        return None
    if program is None:
        if len(body.programs) >= _MOST_PROGRAMS:
            body.programs.clear()
        program = body.programs[key] = jax.jit(_forward(body, wanted, numbers))
    if values:
        exact = (*key, *map(repr, values), "static")
        static = body.programs.get(exact)
        if static is None:
            try:
                return _linear(program(smooth, rest, others, values))
            except (TypeError, ValueError, OverflowError, jax.errors.JAXTypeError):
                # A number that the function wants to know while it is traced (static_argnums), of any size.
                static = body.programs[exact] = jax.jit(_forward(body, wanted, []))
        return _linear(static(smooth, rest, others, []))
    return _linear(program(smooth, rest, others, values))


def _linear(found: Any) -> Linear:
    results, aux, pullback, known = found
    spec, is_smooth = known.facts
    linear = _Pullback(pullback, [(x.shape, x.dtype) for x in results], _places(results), compiled=True)
    first, second = iter(results), iter(aux)
    linear.leaves = [next(first) if s else next(second) for s in is_smooth]
    linear.spec = spec
    return linear


def _forward(body: Any, wanted: tuple[bool, ...], numbers: list[int]) -> Callable[..., Any]:
    run, places = body.emptied().run, body.others
    fixed = [None if i in numbers or i in places else leaf for i, leaf in enumerate(body.fixed)]

    def forward(smooth: list[Any], rest: list[Any], others: list[Any], values: list[Any]) -> Any:
        template = list(fixed)
        for i, x in zip((*places, *numbers), (*others, *values), strict=True):
            template[i] = x

        def function(*inputs: Any) -> Any:
            first, second = iter(inputs), iter(rest)
            leaves, spec = run(template, [next(first) if w else next(second) for w in wanted])
            is_smooth = tuple(_is_array(x) and _is_smooth(x.dtype) for x in leaves)
            known[:] = [spec, is_smooth]
            return (
                [x for x, s in zip(leaves, is_smooth, strict=True) if s],
                [x for x, s in zip(leaves, is_smooth, strict=True) if not s],
            )

        known: list[Any] = []
        with _traced_apart(1 + runs_again.get()):
            results, pullback, aux = jax.vjp(function, *smooth, has_aux=True)
        return results, aux, pullback, _Known(*known)

    return forward


# -- the operation ---------------------------------------------------------------------------------------


#: For each argument whether a backward pass asks for its gradient; None where there is none yet.
_Needed = tuple[bool, ...] | None


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _bridge(operation: Operation, needed: _Needed, *arrays: Any) -> tuple[list[Any], Any]:
    """An operation of another framework in JAX: its results, and a number for its pullback to know it by.

    Values are passed as they are where there are any, and through a callback where JAX traces.
    """
    if any(isinstance(x, jax.core.Tracer) for x in arrays):
        return _called_back(operation, needed is not None, arrays)
    if operation.is_pullback:
        arrays = arrays[:-1]  # which gradients are asked for is known here
    # JAX before 0.10 hands over Python's own floats.
    plain = [x if isinstance(x, jax.Array) else jnp.asarray(x, getattr(x, "dtype", None)) for x in arrays]
    if operation.is_pullback:
        operation.recall(int(np.asarray(plain.pop())[0]))
    if needed is None:
        return operation.run(plain), np.zeros(1, np.int32)
    operation.wanted = tuple(w and n for w, n in zip(operation.wanted, needed, strict=False))
    results, linear = operation.linearise(plain)
    return results, _adopted(token_of(linear))


def _adopted(token: Any) -> jax.Array:
    """The token as an array of JAX in the same memory."""
    return jax.dlpack.from_dlpack(hostmemory.HostCapsule(token.__dlpack__()))


def _forward_rule(operation: Operation, needed: _Needed, *given: Any) -> tuple[Any, Any]:
    arrays = [x.value for x in given]
    # Transformations within one another each come here, for arguments of their own.
    needed = tuple(n or x.perturbed for n, x in zip(needed or (False,) * len(given), given, strict=True))
    results, number = _bridge(operation, needed, *arrays)
    # As an array: what is static, JAX takes from whichever trace of a program (`jax.jit`) came last.
    asked = np.array([w and x.perturbed for w, x in zip(operation.wanted, given, strict=False)])
    dtypes = _Known(*(y.dtype for y in results))
    return (results, number), (arrays, number, asked, dtypes)


def _backward_rule(operation: Operation, needed: _Needed, residuals: Any, cotangents: Any) -> tuple[Any, ...]:
    arrays, number, asked, dtypes = residuals
    known = not isinstance(asked, jax.core.Tracer)
    takes = tuple(map(bool, np.asarray(asked))) if known else operation.wanted
    given = [
        None if isinstance(c, jax.custom_derivatives.SymbolicZero) or not s else _cotangent(c, dtype)
        for c, s, dtype in zip(cotangents[0], operation.smooth, dtypes.facts, strict=True)
    ]
    present = tuple(c is not None for c, s in zip(given, operation.smooth, strict=True) if s)
    there = [c for c in given if c is not None]
    if not there or not any(takes):
        return (None,) * len(arrays)
    if operation.flips:
        there = [AUTODIFF.conjugate(c) for c in there]
    inputs = arrays[: len(takes)]  # without what the pullback that this may be is given besides
    pullback = operation.pulled(None, present, takes)
    results, _ = _bridge(pullback, None, *inputs, *there, number, asked)
    found = iter(pullback.assemble(results))
    gradients = [next(found) if t else None for t in takes]
    if operation.flips:
        gradients = [None if g is None else AUTODIFF.conjugate(g) for g in gradients]
    return (*gradients, *(None for _ in range(len(arrays) - len(takes))))


def _cotangent(x: Any, dtype: Any) -> Any:
    return x if isinstance(x, jax.Array) else jnp.asarray(x, dtype)  # a number of Python's: ``pullback(1.0)``


_bridge.defvjp(_forward_rule, _backward_rule, symbolic_zeros=True)


def _called_back(operation: Operation, keep: bool, arrays: Sequence[Any]) -> tuple[list[Any], Any]:
    """The operation where JAX traces: shapes are foretold, values come by a callback through the host."""
    inputs = arrays[:-2] if operation.is_pullback else arrays
    shapes = operation.foretell([(tuple(x.shape), x.dtype.name) for x in inputs], keep)
    for _, dtype in shapes:
        if dtype in _WIDE:
            _refuse_wide(dtype, operation.label)
        if dtype in ("int64", "uint64") and not jax.config.jax_enable_x64:
            raise GradientError(
                f"{operation.label}(): inside jax.jit JAX has no {dtype} while x64 is off, and a result has"
                " it; cast it to int32, or enable x64",
                source_type="jax",
                reason=f"{dtype} while x64 is off",
            )
    expected = [jax.ShapeDtypeStruct(shape, hostmemory.np_dtype(dtype)) for shape, dtype in shapes]

    # JAX's own functions may not be called in here: they can wait for the thread that this occupies.
    def on_host(*values: Any) -> tuple[list[np.ndarray], np.ndarray]:
        views = [np.asarray(x) for x in values]
        asked = views.pop().tolist() if operation.is_pullback else ()
        number = int(views.pop()[0]) if operation.is_pullback else 0
        results, number = operation.on_host(views, keep, number, asked)
        for result, (shape, dtype) in zip(results, shapes, strict=True):
            if result.shape != shape or result.dtype.name != dtype:
                raise GradientError(
                    f"{operation.label}(): for jax.jit a result of shape {shape} and dtype {dtype} was"
                    f" foretold, and shape {result.shape} and dtype {result.dtype.name} came"
                )
        return results, np.array([number], np.int32)

    token = jax.ShapeDtypeStruct((1,), np.dtype(np.int32))
    results, number = jax.pure_callback(on_host, (expected, token), *arrays, vmap_method="sequential")
    return list(results), number


AUTODIFF = JaxAutodiff()
