"""Derivatives of PaddlePaddle, as the caller and as the callee."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import paddle
from paddle.autograd import PyLayer

from arraybridge.errors import GradientError
from arraybridge.frameworks import autodiff

if TYPE_CHECKING:
    from arraybridge.functions.operation import Operation


class PaddleAutodiff(autodiff.Autodiff):
    def follows(self, x: Any) -> bool:
        return not x.stop_gradient and paddle.is_grad_enabled()

    def stays_in_thread(self, x: Any) -> bool:
        return False

    def span(self, x: Any) -> autodiff.Span:
        start = int(x.data_ptr())
        if not x.size:
            return start, start
        last = sum((extent - 1) * step for extent, step in zip(x.shape, x.strides, strict=True))
        return start, start + (last + 1) * int(x.element_size())

    def version(self, x: Any) -> int:
        return int(x.inplace_version)

    def apply(self, operation: Operation, arrays: list[Any]) -> list[Any]:
        results, linear = operation.linearise(arrays)
        # Paddle looks whether a tensor was written to for its own operations alone.
        read_again = set(map(id, operation.read_again(results, linear)))
        results = [y.clone() if id(y) in read_again else y for y in results]
        smooth = [self.is_smooth(y) for y in results]
        if not any(operation.active) or not any(smooth):
            return results
        call = _Call(operation, arrays, linear, results)
        outputs = _Applied.apply(call, *call.joined(dict(enumerate(arrays))))
        alive, label = weakref.ref(call), operation.label

        def guard(_: Any) -> None:
            # backward() drops what a PyLayer keeps, with retain_graph=True too, and reads it the next time,
            # which would end the process.
            if alive() is None:
                raise GradientError(
                    f"{label}(): Paddle can run backward() once through a PyLayer, which this is, also"
                    " with retain_graph=True; use paddle.grad(..., retain_graph=True) until the last one, or"
                    " call the function again",
                    target_type="paddle",
                    reason="a second backward()",
                )

        for y in outputs:
            y.register_hook(guard)
        # A PyLayer runs the hooks of its results and ignores what they give; those of a view count.
        views = map(_viewed, outputs)
        return [next(views) if s else y for y, s in zip(results, smooth, strict=True)]

    def linearise(
        self, body: autodiff.Body, arrays: list[Any], active: Sequence[bool], label: str
    ) -> tuple[list[Any], autodiff.Linear]:
        with paddle.enable_grad():
            # Inside of a pullback that is differentiated itself, they are part of a graph.
            inner = any(not x.stop_gradient for x in arrays)
            arrays = [_leaf(x) if a and x.stop_gradient else x for x, a in zip(arrays, active, strict=True)]
            results = self.run(body, arrays, label)
        inputs = autodiff.picked(arrays, active)
        pull = functools.partial(_pull, results, inputs, inner)
        return results, autodiff.Linear(pull, _captured(results, inputs))

    def random_state(self) -> Any:
        return paddle.get_rng_state()

    def set_random_state(self, state: Any) -> None:
        paddle.set_rng_state(state)


def _viewed(x: Any) -> Any:
    # Not `x.reshape(x.shape)`, which is no operation; `unsqueeze` takes 8 axes at most.
    return x.unsqueeze(0).squeeze(0) if x.ndim <= 8 else x.flatten().reshape(x.shape)


def _leaf(x: Any) -> Any:
    """The same memory, to be differentiated from here on."""
    x = x.detach()
    x.stop_gradient = False
    return x


def _pull(outputs: list[Any], inputs: list[Any], inner: bool, cotangents: list[Any]) -> list[Any]:
    """By the graph; ``inner`` says that it is part of one that is differentiated itself."""
    sums: dict[int, tuple[Any, Any]] = {}  # paddle.grad refuses a result that is there twice
    for y, c in zip(outputs, cotangents, strict=True):
        if c is not None and not y.stop_gradient:
            sums[id(y)] = (y, sums[id(y)][1] + c if id(y) in sums else c)
    if not sums or not inputs:
        return list(map(paddle.zeros_like, inputs))
    if _engine.runs:
        raise GradientError(
            "a backward pass of Paddle has come to another one, through a function of another framework"
            " that calls one of Paddle, which would end the process; call that one directly",
            target_type="paddle",
            reason="a backward within a backward",
        )
    gradients = paddle.grad(
        [y for y, _ in sums.values()],
        inputs,
        [c for _, c in sums.values()],
        retain_graph=True,
        create_graph=inner or any(not c.stop_gradient for _, c in sums.values()),
        allow_unused=True,
    )
    return [paddle.zeros_like(x) if g is None else g for x, g in zip(inputs, gradients, strict=True)]


def _captured(outputs: list[Any], inputs: list[Any]) -> str:
    # They would get no gradient, in silence.
    arguments = {x.grad_fn.node_ptr() for x in inputs}
    seen = set()
    nodes = [x.grad_fn for x in outputs if not x.stop_gradient]
    while nodes:
        node = nodes.pop()
        address = node.node_ptr()
        if address in seen or address in arguments:
            continue
        seen.add(address)
        if node.name() == "GradNodeAccumulation":
            return "a trainable tensor that is none of its arguments (its values are x.detach())"
        nodes.extend(n for n in node.next_functions if n is not None)
    return ""


class _Engine(threading.local):
    #: Whether a backward pass of Paddle has come to another framework, in this thread.
    runs = False


_engine = _Engine()


# -- the operation ---------------------------------------------------------------------------------


class _Call:
    """One call of an operation; Paddle's graph holds it as long as it can go through it."""

    def __init__(
        self, operation: Operation, arrays: list[Any], linear: autodiff.Linear | None, results: list[Any]
    ) -> None:
        self.operation, self.arrays, self.linear = operation, arrays, linear
        self.smooth = [AUTODIFF.is_smooth(y) for y in results]
        self.results = autodiff.picked(results, self.smooth)
        self.versions = [x.inplace_version for x in arrays]
        #: The arguments that get gradients, by their dtype.
        self.groups: dict[Any, list[int]] = {}
        for i, active in enumerate(operation.active):
            if active:
                self.groups.setdefault(arrays[i].dtype, []).append(i)

    def joined(self, arrays: dict[int, Any]) -> list[Any]:
        """The arrays of the arguments that get gradients, or their gradients: one tensor of each dtype.

        Such a one stands for them in Paddle's graph: `paddle.grad` for some of a PyLayer's arguments fails,
        since the layer is not told for which; the gradient of `paddle.concat` is.
        """
        return [
            arrays[i] if not more else paddle.concat([arrays[j].reshape([-1]) for j in (i, *more)])
            for i, *more in self.groups.values()
        ]


class _Applied(PyLayer):  # type: ignore[misc]  # paddle is Any here
    """An operation of another framework in Paddle's graph."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *_: Any) -> Any:
        ctx.call = call
        ctx.set_materialize_grads(False)
        results, call.results = call.results, []  # a tensor among the arguments would be written to
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        call = ctx.call
        operation, arrays, order = call.operation, call.arrays, iter(cotangents)
        if call.versions != [x.inplace_version for x in arrays]:
            raise autodiff.writes_to_argument(operation.label)
        present = [next(order) if s else None for s in call.smooth]
        if all(c is None for c in present):
            return (None,) * len(call.groups)
        before, _engine.runs = _engine.runs, True
        try:
            gradients = operation.gradients(arrays, present, call.linear)
        finally:
            _engine.runs = before
        return tuple(call.joined(dict(enumerate(gradients))))


AUTODIFF = PaddleAutodiff()
