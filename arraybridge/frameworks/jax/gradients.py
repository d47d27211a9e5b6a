"""JAX's half of gradients across frameworks."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager
from functools import partial
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
    no_forward_mode,
)
from arraybridge.frameworks.holders import held_by_one, kept_among
from arraybridge.frameworks.jax.calls import NO_CALL, is_checkpointed, is_staged, number_in, number_of_call
from arraybridge.frameworks.jax.pullback import (
    Known,
    Pullback,
    is_array,
    is_smooth,
    linear_of_jitted,
    placed,
    places_of,
    pulled_back,
    refuse_hidden,
    traced_apart,
    value_of,
)
from arraybridge.frameworks.tokens import token_of

__all__ = ["JaxAutodiff"]

_WIDE = frozenset(("float64", "complex128"))
_Jitted = type(jax.jit(lambda: None))


class JaxAutodiff(Autodiff):
    transposes = True

    def is_differentiated(self, x: Any) -> bool:
        return isinstance(x, jax.core.Tracer)

    def is_smooth(self, x: Any) -> bool:
        return is_smooth(x.dtype)

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

    def scalar(self, x: np.generic) -> Any:
        # While x64 is off, JAX has no such array; as the number that it is, nothing of it is lost.
        try:
            return np.asarray(x) if jax.dtypes.canonicalize_dtype(x.dtype) == x.dtype else x
        except TypeError:  # it has none at all
            return x

    def admit(self, x: Any, label: str) -> None:
        if x.dtype.name in _WIDE:
            _refuse_wide(x.dtype.name, label)

    # -- as the caller -----------------------------------------------------------------------------

    def apply(self, operation: Operation, arrays: Sequence[Any]) -> list[Any]:
        number = NO_CALL
        if not operation.quiet and is_staged():
            number = number_of_call(operation.next_call, arrays)
        try:
            results, _ = _bridge(operation, None, *arrays, number)
        except TypeError as error:
            if "forward-mode" in str(error) and not isinstance(error, GradientError):
                raise no_forward_mode(operation.label) from error
            raise
        return list(results)

    def is_checkpointed(self) -> bool:
        return is_checkpointed()

    def traced_apart(self, mark: Hashable) -> AbstractContextManager[Any]:
        return traced_apart(mark)

    # -- as the callee -----------------------------------------------------------------------------

    def linearise(self, body: Any, arrays: list[Any], wanted: tuple[bool, ...], label: str) -> Linear:
        if isinstance(getattr(body, "fn", None), _Jitted) and not body.own and not jax.config.jax_disable_jit:
            found = linear_of_jitted(body, arrays, wanted)
            if found is not None:
                return found
        outs: list[Any] = []

        def smooth(*inputs: Any) -> list[Any]:
            given = iter(inputs)
            leaves, spec = body([next(given) if w else x for x, w in zip(arrays, wanted, strict=True)])
            refuse_hidden(leaves, label)
            outs[:] = [leaves, spec]
            return [x for x in leaves if is_array(x) and is_smooth(x.dtype)]

        results, pullback = jax.vjp(smooth, *(x for x, w in zip(arrays, wanted, strict=True) if w))
        linear = Pullback(pullback, [(x.shape, x.dtype) for x in results], places_of(results))
        found = iter(results)
        linear.leaves = [next(found) if is_array(x) and is_smooth(x.dtype) else value_of(x) for x in outs[0]]
        linear.spec = outs[1]
        constant = frozenset(
            i for i, x in enumerate(outs[0]) if is_array(x) and not isinstance(x, jax.core.Tracer)
        )
        outs.clear()  # tracers, which hold the results, too
        residuals = linear.residuals()  # the pullback holds each once, too
        # What does not depend on an argument may be memory of something that the function keeps.
        linear.kept = constant | kept_among(linear.leaves, results, residuals, residuals)
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
                return [x for x in leaves if is_array(x) and is_smooth(x.dtype)]

            results, pull = jax.vjp(smooth, *(x for x, t in zip(arrays, takes, strict=False) if t))
            given = iter(arrays[count:])
            cotangents = placed([next(given) if p else None for p in present], places_of(results))
            return pulled_back(pull, cotangents, [(x.shape, x.dtype) for x in results]), None

        return pullback

    def is_held(self, x: Any) -> bool:
        return sys.getrefcount(x) > held_by_one()


def _refuse_wide(dtype: str, label: str) -> None:
    if not jax.config.jax_enable_x64:
        raise GradientError(
            f"{label}(): JAX narrows {dtype} in its backward while x64 is off, and gradients would be wrong"
            " by 1e-7; call it inside `with jax.enable_x64(True):` (jax.experimental.enable_x64() in older"
            " releases), set JAX_ENABLE_X64=1, or cast to float32 first",
            target_type="jax",
            reason=f"{dtype} while x64 is off",
        )


# -- the operation ---------------------------------------------------------------------------------------


#: For each argument whether a backward pass asks for its gradient; None where there is none yet.
_Needed = tuple[bool, ...] | None


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _bridge(operation: Operation, needed: _Needed, *arrays: Any) -> tuple[list[Any], Any]:
    """An operation of another framework in JAX: its results, and a number for its pullback to know it by.

    Values are passed as they are where there are any, and through a callback where JAX traces. Behind the
    arrays comes the number of the call, and behind that of a pullback, which gradients are asked for.
    """
    if any(isinstance(x, jax.core.Tracer) for x in arrays):
        return _called_back(operation, needed, arrays)
    number = arrays[-2] if operation.is_pullback else arrays[-1]
    # JAX before 0.10 hands over Python's own floats.
    plain = [
        x if isinstance(x, jax.Array) else jnp.asarray(x, getattr(x, "dtype", None))
        for x in arrays[: -2 if operation.is_pullback else -1]
    ]
    if operation.is_pullback:
        operation.recall(number_in(np.asarray(number)))
    if needed is None:
        return operation.run(plain), NO_CALL
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
    asked = np.array([w and x.perturbed for w, x in zip(operation.wanted, given, strict=False)], np.float32)
    dtypes = Known(*(y.dtype for y in results))
    return (results, number), (arrays, number, asked, dtypes)


def _backward_rule(operation: Operation, needed: _Needed, residuals: Any, cotangents: Any) -> tuple[Any, ...]:
    arrays, number, asked, dtypes = residuals
    known = not isinstance(asked, jax.core.Tracer)
    takes = tuple(map(bool, np.asarray(asked))) if known else operation.wanted
    if not isinstance(number, jax.core.Tracer) and any(
        isinstance(x, jax.core.Tracer) for x in (*arrays, *cotangents[0])
    ):
        number = np.asarray(number)  # which belongs to no device, as `jax.jacrev` needs it outside of `jit`
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
    gradients = placed(gradients, places_of(inputs))
    return (*gradients, *(None for _ in range(len(arrays) - len(takes))))


def _cotangent(x: Any, dtype: Any) -> Any:
    return x if isinstance(x, jax.Array) else jnp.asarray(x, dtype)  # a number of Python's: ``pullback(1.0)``


_bridge.defvjp(_forward_rule, _backward_rule, symbolic_zeros=True)


def _varies(x: Any) -> bool:
    """Whether JAX follows that a value differs between the devices of a `jax.shard_map`."""
    kind = getattr(x, "aval", None)
    return bool(getattr(getattr(kind, "mat", None), "varying", None) or getattr(kind, "vma", None))


def _called_back(operation: Operation, needed: _Needed, arrays: Sequence[Any]) -> tuple[list[Any], Any]:
    """The operation where JAX traces: shapes are foretold, values come by a callback through the host."""
    inputs, number = (arrays[:-2], arrays[-2]) if operation.is_pullback else (arrays[:-1], arrays[-1])
    if any(map(_varies, arrays)):
        # A callback says nothing of that, and JAX would leave out the sum over devices in the backward.
        raise GradientError(
            f"{operation.label}(): inside jax.shard_map JAX follows which values differ between devices, and"
            " a function of another framework does not tell; pass check_vma=False to shard_map",
            source_type="jax",
            reason="values that differ between devices",
        )
    keep = needed is not None
    asked_for = (needed or (False,) * len(inputs))[: len(inputs)]
    shapes = operation.foretell([(tuple(x.shape), x.dtype.name) for x in inputs], asked_for)
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
    def on_host(*values: Any) -> list[np.ndarray]:
        views = [np.asarray(x) for x in values]
        asked = tuple(map(bool, views.pop())) if operation.is_pullback else ()
        results = operation.on_host(views[:-1], keep, number_in(views[-1]), asked)
        for result, (shape, dtype) in zip(results, shapes, strict=True):
            if result.shape != shape or result.dtype.name != dtype:
                raise GradientError(
                    f"{operation.label}(): for jax.jit a result of shape {shape} and dtype {dtype} was"
                    f" foretold, and shape {result.shape} and dtype {result.dtype.name} came"
                )
        return results

    results = jax.pure_callback(on_host, expected, *arrays, vmap_method="sequential")
    # What a token keeps is the pullback that this is, and not this one's own.
    return list(results), number if number.dtype == NO_CALL.dtype else NO_CALL


AUTODIFF = JaxAutodiff()
