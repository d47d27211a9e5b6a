"""MLX's half of gradients across frameworks."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import mlx.core as mx
import numpy as np

from arraybridge.errors import GradientError
from arraybridge.frameworks import hostmemory
from arraybridge.frameworks.autodiff import (
    Autodiff,
    Body,
    Linear,
    Operation,
    Span,
    draws_again,
    no_forward_mode,
)
from arraybridge.frameworks.holders import kept_among

__all__ = ["MlxAutodiff"]


class MlxAutodiff(Autodiff):
    """``settle``: computes an array, or says why that cannot be."""

    def __init__(self, settle: Callable[[Any], None]) -> None:
        self._settle = settle

    def is_differentiated(self, x: Any) -> bool:
        # What a transformation follows keeps its graph when it is computed; there is no other sign.
        self._settle(x)
        graph = io.StringIO()
        mx.export_to_dot(graph, x)
        return "shape=rectangle" in graph.getvalue()

    def is_smooth(self, x: Any) -> bool:
        return bool(mx.issubdtype(x.dtype, mx.inexact))

    def span(self, x: Any) -> Span | None:
        self._settle(x)
        dtype = hostmemory.np_dtype(str(x.dtype).removeprefix("mlx.core."))
        view = hostmemory.from_capsule(x.__dlpack__(), dtype)
        start = stop = hostmemory.address(view)
        for extent, step in zip(view.shape, view.strides, strict=True):
            start += min((extent - 1) * step, 0)
            stop += max((extent - 1) * step, 0)
        return (start, stop + view.itemsize) if view.size else (start, start)

    def conjugate(self, x: Any) -> Any:
        return mx.conj(x) if x.dtype == mx.complex64 else x

    def alike(self, x: Any) -> Any:
        return x[...]  # a write in place (``x += 1``) gives the object that it is made to other memory

    # -- as the caller -----------------------------------------------------------------------------

    def apply(self, operation: Operation, arrays: Sequence[Any]) -> list[Any]:
        operation.wanted = tuple(
            wanted and self.is_differentiated(x) for wanted, x in zip(operation.wanted, arrays, strict=True)
        )
        results, linear = operation.linearise(arrays)
        if not any(operation.wanted) or not any(operation.smooth):
            return results
        several = sum(operation.smooth) > 1
        arrived: set[int] = set()

        def pullback(xs: Any, cotangents: Any, _: Any) -> list[Any]:
            xs, given = _listed(xs), _listed(cotangents)
            if several:
                given = [c if i in arrived else None for i, c in enumerate(given)]
                arrived.clear()
            found = self.pull_back(operation, xs, given, linear, xs)
            return [mx.zeros_like(x) if g is None else g for x, g in zip(xs, found, strict=True)]

        def refuse(*_: Any) -> Any:
            raise no_forward_mode(operation.label)

        call = mx.custom_function(lambda *_: results)
        call.vjp(pullback)
        call.jvp(refuse)
        found = list(call(*arrays))
        if several:
            found = [_arriving(y, i, arrived) if operation.smooth[i] else y for i, y in enumerate(found)]
        return found

    # -- as the callee -----------------------------------------------------------------------------

    def linearise(self, body: Body, arrays: list[Any], wanted: tuple[bool, ...], label: str) -> Linear:
        state = self.random_state()
        leaves, spec = body(list(map(self.alike, arrays)))
        kept = kept_among(leaves)
        found = [x for x in leaves if isinstance(x, mx.array)]
        drew = self.random_state() != state
        if any(map(self.is_differentiated, found)):
            raise GradientError(
                f"{label}(): it depends on an array of MLX that is being differentiated and that is none of"
                " its arguments; pass it",
                target_type="mlx",
                reason="captured array",
            )
        linear = _Pullback(self, body, arrays, wanted, state if drew else None)
        linear.leaves, linear.spec, linear.kept = leaves, spec, kept
        return linear

    def pulled(
        self, body: Body, count: int, takes: tuple[bool, ...], present: tuple[bool, ...], whole: bool = False
    ) -> Body:
        def pullback(arrays: list[Any]) -> tuple[list[Any], Any]:
            given = iter(arrays[count:])
            cotangents = [next(given) if p else None for p in present]
            return self.gradients(body, arrays[:count], takes, cotangents), None

        return pullback

    def gradients(
        self, body: Body, arrays: list[Any], takes: tuple[bool, ...], cotangents: list[Any]
    ) -> list[Any]:
        """Gradients for the arguments that are taken, by a run of the function for them alone."""

        def smooth(*inputs: Any) -> list[Any]:
            given = iter(inputs)
            leaves, _ = body(
                [next(given) if t else self.alike(x) for x, t in zip(arrays, takes, strict=True)]
            )
            results = [x for x in leaves if isinstance(x, mx.array) and self.is_smooth(x)]
            asked = [y for y, c in zip(results, cotangents, strict=True) if c is not None]
            # mx.vjp loses the cotangent of a result that is there twice, as it is or as y.reshape(y.shape).
            return asked[:1] + [y * 1 for y in asked[1:]]

        taken = [x for x, t in zip(arrays, takes, strict=True) if t]
        there = [c for c in cotangents if c is not None]
        if not there or not taken:
            return [None] * len(taken)
        return list(mx.vjp(smooth, taken, there)[1])

    def random_state(self) -> Any:
        return tuple(np.asarray(key).tobytes() for key in mx.random.state)

    @contextmanager
    def replayed(self, state: Any) -> Iterator[None]:
        now = self.random_state()
        _set_random_state(state)
        try:
            yield
        finally:
            _set_random_state(now)

    @contextmanager
    def repeatable(self, label: str) -> Iterator[None]:
        before = self.random_state()
        yield
        if self.random_state() != before:
            raise draws_again("mlx", label)


def _set_random_state(state: tuple[bytes]) -> None:
    high, low = np.frombuffer(state[0], np.uint32).tolist()
    mx.random.seed(high << 32 | low)  # a key is the two halves of its seed


def _listed(xs: Any) -> list[Any]:
    """MLX hands over a lone array by itself."""
    return [xs] if isinstance(xs, mx.array) else list(xs)


def _arriving(y: Any, i: int, arrived: set[int]) -> Any:
    """One of several results, which says when it gets a cotangent; one that is not used gets zeros otherwise.

    Zeros times an infinite derivative would be no number.
    """

    def pullback(_: Any, cotangent: Any, __: Any) -> Any:
        arrived.add(i)
        return cotangent

    same = mx.custom_function(lambda y: y)
    same.vjp(pullback)
    return same(y)


class _Pullback(Linear):
    """A function of MLX at a point: itself and its arguments, since `mx.vjp` wants the cotangents at once.

    It runs again for each pullback.
    """

    def __init__(
        self, autodiff: MlxAutodiff, body: Body, arrays: list[Any], wanted: tuple[bool, ...], state: Any
    ) -> None:
        self._autodiff, self._body, self._arrays, self._wanted = autodiff, body, arrays, wanted
        self._state = state

    def pull(self, cotangents: list[Any]) -> list[Any]:
        with nullcontext() if self._state is None else self._autodiff.replayed(self._state):
            return self._autodiff.gradients(self._body, self._arrays, self._wanted, cotangents)

    def residuals(self) -> list[Any]:
        return list(self._arrays)

    def rebuild(self) -> Callable[[list[Any]], Linear]:
        autodiff, body, wanted, state = self._autodiff, self._body, self._wanted, self._state
        return lambda arrays: _Pullback(autodiff, body, arrays, wanted, state)
