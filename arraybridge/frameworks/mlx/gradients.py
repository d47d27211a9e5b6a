"""Derivatives of MLX, as the caller and as the callee."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from arraybridge.frameworks import autodiff, hostmemory

if TYPE_CHECKING:
    from arraybridge.functions.operation import Operation


class MlxAutodiff(autodiff.Autodiff):
    """``settle``: computes an array, or says why that cannot be."""

    def __init__(self, settle: Callable[[Any], None]) -> None:
        self._settle = settle

    def follows(self, x: Any) -> bool:
        # What a transformation follows keeps its graph when it is computed; there is no other sign.
        self._settle(x)
        graph = io.StringIO()
        mx.export_to_dot(graph, x)
        return "shape=rectangle" in graph.getvalue()

    def prepare(self, x: Any) -> Any:
        return x[...]  # a write in place (``x += 1``) gives the object that it is made to other memory

    def span(self, x: Any) -> autodiff.Span:
        self._settle(x)
        dtype = hostmemory.np_dtype(str(x.dtype).removeprefix("mlx.core."))
        return np.lib.array_utils.byte_bounds(hostmemory.from_capsule(x.__dlpack__(), dtype))

    def apply(self, operation: Operation, arrays: list[Any]) -> list[Any]:
        results, linear = operation.linearise(arrays)
        if not any(operation.active) or not any(map(self.is_smooth, results)):
            return results  # a custom function without results ends the process

        def pullback(xs: Any, cotangents: Any, _: Any) -> list[Any]:
            xs = _listed(xs)
            smooth = [
                c if self.is_smooth(y) else None for c, y in zip(_listed(cotangents), results, strict=True)
            ]
            gradients = operation.gradients(xs, smooth, linear)
            return [mx.zeros_like(x) if g is None else g for x, g in zip(xs, gradients, strict=True)]

        def refuse(*_: Any) -> Any:
            raise autodiff.forward_mode(operation.label, "mx.grad or mx.vjp")

        call = mx.custom_function(lambda *_: results)
        call.vjp(pullback)
        call.jvp(refuse)
        return list(call(*arrays))

    def linearise(
        self, body: autodiff.Body, arrays: list[Any], active: Sequence[bool], label: str
    ) -> tuple[list[Any], autodiff.Linear]:
        state = self.random_state()
        results = body(list(map(self.prepare, arrays)))
        inner = any(map(self.follows, arrays))
        captures = not inner and any(map(self.follows, results))
        captured = "an array that is differentiated and none of its arguments" if captures else ""
        inputs = autodiff.picked(arrays, active)

        def pull(cotangents: list[Any]) -> list[Any]:
            """It runs again for each pullback, since `mx.vjp` wants the cotangents at once."""

            def smooth(*values: Any) -> list[Any]:
                results = body(autodiff.merged(list(map(self.prepare, arrays)), active, values))
                outputs = [y for y, c in zip(results, cotangents, strict=True) if c is not None]
                # mx.vjp loses the cotangent of a result that is there twice, as it is or as
                # y.reshape(y.shape).
                return outputs[:1] + [y * 1 for y in outputs[1:]]

            with self.replayed(state):
                return list(mx.vjp(smooth, inputs, [c for c in cotangents if c is not None])[1])

        return results, autodiff.Linear(pull, captured, arrays)

    def random_state(self) -> np.ndarray:
        return np.concatenate([np.asarray(key) for key in mx.random.state])

    def set_random_state(self, state: np.ndarray) -> None:
        high, low = state.tolist()
        mx.random.seed(high << 32 | low)  # a key is the two halves of its seed


def _listed(xs: Any) -> list[Any]:
    """MLX hands over a lone array by itself."""
    return [xs] if isinstance(xs, mx.array) else list(xs)
