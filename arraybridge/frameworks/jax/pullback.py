"""Functions of JAX at a point: their pullbacks, and the programs for functions under `jax.jit`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from arraybridge.frameworks.autodiff import Linear, hidden, runs_again
from arraybridge.frameworks.within import found_within

__all__ = [
    "Known",
    "Pullback",
    "is_array",
    "is_smooth",
    "linear_of_jitted",
    "placed",
    "places_of",
    "pulled_back",
    "refuse_hidden",
    "traced_apart",
    "value_of",
]

#: Arguments of a compiled function that are no arrays: passed on as numbers, or fixed in the program.
_NUMBERS = (int, float, complex, bool)
_FIXED = (str, bytes, type(None))
_MOST_PROGRAMS = 256

#: Functions under `jax.jit` are traced again where another framework differentiates them: a program of theirs
#: that was made without, under torch.no_grad(), say, has what they capture as constants, unseen by anybody.
#: And once more where it runs again, for a pullback, and random numbers of functions inside would be others.
traced_apart: Callable[[Any], AbstractContextManager[Any]] = (
    jax.make_user_context(None) if hasattr(jax, "make_user_context") else nullcontext
)


@cache
def is_smooth(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.inexact))


def is_array(x: Any) -> bool:
    return isinstance(x, jax.Array)


def refuse_hidden(leaves: list[Any], label: str) -> None:
    """Refuse tracers inside of results that are no containers here, though they may be such to JAX."""
    if found_within((x for x in leaves if not is_array(x)), _is_tracer) is not None:
        raise hidden("jax", label)


def _is_tracer(x: Any) -> bool:
    return issubclass(type(x), jax.core.Tracer)


def value_of(x: Any) -> Any:
    """A result that needs no derivative, without the tracers of `jax.vjp` around it."""
    return jax.lax.stop_gradient(x) if isinstance(x, jax.core.Tracer) else x


def places_of(arrays: Sequence[Any]) -> list[Any]:
    """The sharding of each array that belongs to devices; None where it may go anywhere, or has no value."""
    return [x.sharding if getattr(x, "committed", False) else None for x in map(_primal, arrays)]


def _primal(x: Any) -> Any:
    """The value that JAX differentiates at; None where it traces a program (`jax.jit`)."""
    while isinstance(x, jax.core.Tracer):
        x = getattr(x, "primal", None)
    return x


def placed(arrays: Sequence[Any], places: Sequence[Any]) -> list[Any]:
    """The arrays where others were, with which JAX computes on the same devices alone."""
    return [
        x if place is None or here in (place, None) else jax.device_put(x, place)
        for x, here, place in zip(arrays, places_of(arrays), places, strict=True)
    ]


class Pullback(Linear):
    """A function of JAX at a point: its pullback, a pytree whose leaves are the residuals."""

    def __init__(
        self, pullback: Any, results: list[Any], places: list[Any], *, compiled: bool = False
    ) -> None:
        self._pullback, self._results, self._places, self.fresh = pullback, results, places, compiled

    def pull(self, cotangents: list[Any]) -> list[Any]:
        cotangents = placed(cotangents, self._places)
        if self.fresh:
            return list(_pull_compiled(self._pullback, cotangents, tuple(self._results)))
        return pulled_back(self._pullback, cotangents, self._results)

    def residuals(self) -> list[Any]:
        return jax.tree_util.tree_leaves(self._pullback)

    def rebuild(self) -> Callable[[list[Any]], Linear]:
        residuals, treedef = jax.tree_util.tree_flatten(self._pullback)
        results, places, compiled = self._results, self._places, self.fresh
        theirs = places_of(residuals)
        return lambda leaves: Pullback(
            treedef.unflatten(placed(leaves, theirs)), results, places, compiled=compiled
        )


@partial(jax.jit, static_argnums=2)
def _pull_compiled(pullback: Any, cotangents: list[Any], results: tuple[Any, ...]) -> Any:
    return pulled_back(pullback, cotangents, results)


def pulled_back(pullback: Any, cotangents: Sequence[Any], results: Sequence[Any]) -> list[Any]:
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
class Known:
    """What is known of a compiled program's results while it is traced."""

    def __init__(self, *facts: Any) -> None:
        self.facts = facts

    def __hash__(self) -> int:
        return hash(self.facts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Known) and vars(self) == vars(other)


def linear_of_jitted(body: Any, arrays: list[Any], wanted: tuple[bool, ...]) -> Linear | None:
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
    programs = body.programs
    key = (
        body.mark,
        runs_again.get(),
        body.spec.key(),
        tuple(body.live),
        wanted,
        tuple(numbers),
        tuple(fixed),
    )
    try:
        static = programs.get((key, "static"), ())
    except TypeError:  # a key or a field that cannot be hashed
        return None
    if len(programs) >= _MOST_PROGRAMS:
        programs.clear()
    arguments = smooth, rest, others
    if not static:
        try:
            return _run(body, key, wanted, numbers, (), arguments)
        except _WANTS_A_NUMBER:
            if not numbers:
                raise
            static = _static_among(body, wanted, numbers, arguments)
    found = _run(body, key, wanted, numbers, static, arguments)
    programs[key, "static"] = static
    return found


#: What JAX raises where a function wants to know a number while it is traced, or where one is too large.
_WANTS_A_NUMBER = (TypeError, ValueError, OverflowError, jax.errors.JAXTypeError)


def _static_among(
    body: Any, wanted: tuple[bool, ...], numbers: list[int], arguments: tuple[list[Any], ...]
) -> tuple[int, ...]:
    """The numbers that the function wants to know while it is traced (`static_argnums`), of any size."""
    static = list(numbers)
    for i in numbers:
        passed = [j for j in numbers if j not in static or j == i]
        try:
            jax.eval_shape(_forward(body, wanted, passed), *arguments, [body.fixed[j] for j in passed])
        except _WANTS_A_NUMBER:
            continue
        static.remove(i)
    return tuple(static)


def _run(
    body: Any,
    key: Any,
    wanted: tuple[bool, ...],
    numbers: list[int],
    static: tuple[int, ...],
    arguments: tuple[list[Any], ...],
) -> Linear:
    """The program that has the static numbers in it and is given the others, run."""
    passed = [i for i in numbers if i not in static]
    known = (key, tuple(repr(body.fixed[i]) for i in static))
    program = body.programs.get(known)
    if program is None:
        program = body.programs[known] = jax.jit(_forward(body, wanted, passed))
    return _linear(program(*arguments, [body.fixed[i] for i in passed]))


def _linear(found: Any) -> Linear:
    results, aux, pullback, known = found
    spec, differentiable = known.facts
    linear = Pullback(pullback, [(x.shape, x.dtype) for x in results], places_of(results), compiled=True)
    first, second = iter(results), iter(aux)
    linear.leaves = [next(first) if s else next(second) for s in differentiable]
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
            refuse_hidden(leaves, body.label)
            differentiable = tuple(is_array(x) and is_smooth(x.dtype) for x in leaves)
            known[:] = [spec, differentiable]
            return (
                [x for x, s in zip(leaves, differentiable, strict=True) if s],
                [x for x, s in zip(leaves, differentiable, strict=True) if not s],
            )

        known: list[Any] = []
        results, pullback, aux = jax.vjp(function, *smooth, has_aux=True)
        return results, aux, pullback, Known(*known)

    return forward
