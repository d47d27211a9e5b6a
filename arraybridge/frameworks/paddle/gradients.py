"""PaddlePaddle's half of gradients across frameworks."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import paddle
from paddle.autograd import PyLayer

from arraybridge.errors import GradientError
from arraybridge.frameworks.autodiff import (
    Autodiff,
    Body,
    Linear,
    Operation,
    Span,
    captured,
    draws_again,
    writes_to_argument,
)
from arraybridge.frameworks.holders import is_kept

__all__ = ["PaddleAutodiff"]


class PaddleAutodiff(Autodiff):
    def is_differentiated(self, x: Any) -> bool:
        return not x.stop_gradient and paddle.is_grad_enabled()

    def stays_in_thread(self, x: Any) -> bool:
        return False

    def has_graph(self, x: Any) -> bool:
        return not x.stop_gradient and not x.is_leaf

    def is_smooth(self, x: Any) -> bool:
        return bool(x.is_floating_point() or x.is_complex())

    def span(self, x: Any) -> Span | None:
        start = int(x.data_ptr())
        if not x.size:
            return start, start
        last = sum((extent - 1) * step for extent, step in zip(x.shape, x.strides, strict=True))
        return start, start + (last + 1) * int(x.element_size())

    def conjugate(self, x: Any) -> Any:
        return paddle.conj(x) if x.is_complex() else x

    # -- as the caller -----------------------------------------------------------------------------

    def apply(self, operation: Operation, arrays: Sequence[Any]) -> list[Any]:
        operation.wanted = tuple(
            wanted and not x.stop_gradient for wanted, x in zip(operation.wanted, arrays, strict=True)
        )
        call = _Call(operation, arrays)
        with paddle.no_grad():
            results, call.linear = operation.linearise(arrays)
            # Paddle looks whether a tensor was written to for its own operations alone.
            results = [
                y.clone() if again else y for y, again in zip(results, operation.read_again, strict=True)
            ]
        if not any(operation.wanted) or not any(operation.smooth):
            return results
        call.results = [y for y, s in zip(results, operation.smooth, strict=True) if s]
        found = _Bridge.apply(call, *call.anchors())
        guard = _once(weakref.ref(call), operation.label)
        for y in found:
            y.register_hook(guard)
        # A PyLayer runs the hooks of its results and ignores what they give; those of a view count.
        followed = map(_viewed, found)
        return [next(followed) if s else y for y, s in zip(results, operation.smooth, strict=True)]

    @contextmanager
    def noticing(self, label: str, function: Any, passed: Sequence[Any]) -> Iterator[None]:
        # The function runs under `no_grad`, in which Paddle follows nothing that it computes.
        with paddle.enable_grad():
            yield

    # -- as the callee -----------------------------------------------------------------------------

    def linearise(self, body: Body, arrays: list[Any], wanted: tuple[bool, ...], label: str) -> Linear:
        with paddle.enable_grad():
            arrays = [_leaf(x) if w else x.detach() for x, w in zip(arrays, wanted, strict=True)]
            inputs = [x for x, w in zip(arrays, wanted, strict=True) if w]
            before = [x.inplace_version for x in arrays]
            leaves, spec = body(arrays)
            for i in range(len(leaves)):  # `enumerate` would hold them, too
                x = leaves[i]
                graph = isinstance(x, paddle.Tensor) and not x.stop_gradient
                # State, which the function may write to later.
                if graph and is_kept(x, [leaves]) and not any(x is y for y in arrays):
                    leaves[i] = x.clone()
        if before != [x.inplace_version for x in arrays]:
            raise writes_to_argument("paddle", label, "x.clone()")
        linear = _Graph()
        linear.leaves, linear.spec, linear.inputs = leaves, spec, inputs
        linear.outputs = self._outputs(leaves)
        if body not in _checked:
            _refuse_captured(linear.outputs, inputs, label)
        return linear

    def _outputs(self, leaves: list[Any]) -> list[Any]:
        return [x for x in leaves if isinstance(x, paddle.Tensor) and self.is_smooth(x)]

    def pulled(
        self, body: Body, count: int, takes: tuple[bool, ...], present: tuple[bool, ...], whole: bool = False
    ) -> Body:
        def pullback(arrays: list[Any]) -> tuple[list[Any], Any]:
            with paddle.enable_grad():
                inputs = [
                    _leaf(x) if take and x.stop_gradient else x
                    for x, take in zip(arrays[:count], takes, strict=True)
                ]
                leaves, _ = body(inputs)
                outputs = [x for x, p in zip(self._outputs(leaves), present, strict=True) if p]
                taken = [x for x, t in zip(inputs, takes, strict=True) if t]
                found = _gradients(outputs, taken, arrays[count:], create_graph=True)
            if whole:
                found = [paddle.zeros_like(x) if g is None else g for x, g in zip(taken, found, strict=True)]
            return found, None

        _checked.add(pullback)
        return pullback

    def version(self, x: Any) -> int:
        return int(x.inplace_version)

    def random_state(self) -> Any:
        return tuple(map(_RandomState, paddle.get_rng_state()))

    @contextmanager
    def replayed(self, state: Any) -> Iterator[None]:
        now = paddle.get_rng_state()
        paddle.set_rng_state([one.state for one in state])
        try:
            yield
        finally:
            paddle.set_rng_state(now)

    @contextmanager
    def repeatable(self, label: str) -> Iterator[None]:
        before = self.random_state()
        yield
        if self.random_state() != before:
            raise draws_again("paddle", label)


def _viewed(x: Any) -> Any:
    # Not `x.reshape(x.shape)`, which is no operation; `unsqueeze` takes 8 axes at most.
    return x.unsqueeze(0).squeeze(0) if x.ndim <= 8 else x.flatten().reshape(x.shape)


def _leaf(x: Any) -> Any:
    """The same memory, to be differentiated from here on."""
    x = x.detach()
    x.stop_gradient = False
    return x


#: Pullbacks of functions that were looked into; `paddle.grad` copies the graph, so that leaves look foreign.
_checked: weakref.WeakSet[Body] = weakref.WeakSet()


class _RandomState:
    """One of Paddle's generator states, to be compared and hashed: its numbers are in its text alone."""

    def __init__(self, state: Any) -> None:
        self.state = state
        words = str(state).split()
        self.numbers = [*words[:3], *words[4:]]  # without an address

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _RandomState) and self.numbers == other.numbers

    def __hash__(self) -> int:
        return hash(tuple(self.numbers))


def _gradients(
    outputs: list[Any], inputs: list[Any], cotangents: list[Any], *, create_graph: bool
) -> list[Any]:
    summed: dict[int, tuple[Any, Any]] = {}  # paddle.grad refuses a result that is there twice
    for y, c in zip(outputs, cotangents, strict=True):
        if c is not None and not y.stop_gradient:
            summed[id(y)] = (y, summed[id(y)][1] + c if id(y) in summed else c)
    pairs = list(summed.values())
    if not pairs or not inputs:
        return [None] * len(inputs)
    if getattr(_engine, "runs", False):
        raise GradientError(
            "a backward pass of Paddle has come to another one, through a function of another framework that"
            " calls one of Paddle, which would end the process; call that one directly",
            target_type="paddle",
            reason="a backward within a backward",
        )
    with _running():
        found: list[Any] = paddle.grad(
            [y for y, _ in pairs],
            inputs,
            [c for _, c in pairs],
            retain_graph=True,
            create_graph=create_graph,
            allow_unused=True,
        )
    return found


#: A backward within a backward ends the process.
_engine = threading.local()


@contextmanager
def _running() -> Iterator[None]:
    before = getattr(_engine, "runs", False)
    _engine.runs = True
    try:
        yield
    finally:
        _engine.runs = before


class _Graph(Linear):
    """A function of Paddle at a point: its graph."""

    inputs: list[Any]
    outputs: list[Any]

    def pull(self, cotangents: list[Any]) -> list[Any]:
        return _gradients(self.outputs, self.inputs, cotangents, create_graph=False)


def _refuse_captured(outputs: list[Any], inputs: list[Any], label: str) -> None:
    """Refuse leaves of the graph that are no arguments: they would get no gradient, in silence."""
    known = {x.grad_fn.node_ptr() for x in inputs}
    seen = set()
    waiting = [x.grad_fn for x in outputs if not x.stop_gradient]
    while waiting:
        node = waiting.pop()
        address = node.node_ptr()
        if address in seen or address in known:
            continue
        seen.add(address)
        if node.name() == "GradNodeAccumulation":
            raise captured("paddle", f"{label}(): it depends on a trainable tensor")
        waiting.extend(n for n in node.next_functions if n is not None)


# -- the operation ---------------------------------------------------------------------------------


class _Call:
    """One call of an operation; Paddle's graph holds it as long as it can go through it."""

    def __init__(self, operation: Operation, arrays: Sequence[Any]) -> None:
        self.operation, self.arrays = operation, list(arrays)
        self.versions = [x.inplace_version for x in arrays]
        self.linear: Linear | None = None
        self.results: list[Any] = []
        #: The arguments that get gradients, by their dtype.
        self.groups: dict[Any, list[int]] = {}
        for i, wanted in enumerate(operation.wanted):
            if wanted:
                self.groups.setdefault(arrays[i].dtype, []).append(i)

    def anchors(self) -> list[Any]:
        """What stands for the arguments in Paddle's graph: one tensor of each dtype.

        `paddle.grad` for some of a PyLayer's arguments fails, since the layer is not told for which; the
        gradient of `paddle.concat` is.
        """
        return [
            paddle.concat([self.arrays[i].reshape([-1]) for i in group])
            if len(group) > 1
            else self.arrays[group[0]]
            for group in self.groups.values()
        ]

    def anchored(self, gradients: list[Any]) -> tuple[Any, ...]:
        """Gradients for the arguments as gradients for the anchors."""
        found = []
        for group in self.groups.values():
            if len(group) == 1:
                found.append(gradients[group[0]])
            elif all(gradients[i] is None for i in group):
                found.append(None)
            else:
                whole = [
                    paddle.zeros_like(self.arrays[i]) if gradients[i] is None else gradients[i] for i in group
                ]
                found.append(paddle.concat([g.reshape([-1]) for g in whole]))
        return tuple(found)


def _once(call: weakref.ref[_Call], label: str) -> Callable[[Any], None]:
    """What a backward pass asks before it comes to an operation: Paddle's own would end the process.

    ``backward()`` drops what a PyLayer keeps, ``retain_graph=True`` or not, and reads it the next time.
    """

    def guard(_: Any) -> None:
        if call() is None:
            raise GradientError(
                f"{label}(): Paddle can run backward() once through a PyLayer, which this is, also with"
                " retain_graph=True; use paddle.grad(..., retain_graph=True) until the last one, or call the"
                " function again",
                target_type="paddle",
                reason="a second backward()",
            )

    return guard


class _Bridge(PyLayer):  # type: ignore[misc]  # paddle is Any here
    """An operation of another framework in Paddle's graph."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *_: Any) -> Any:
        ctx.call = call
        ctx.set_materialize_grads(False)
        results, call.results = call.results, []
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *given: Any) -> Any:
        call = ctx.call
        operation, arrays, followed = call.operation, call.arrays, iter(given)
        if call.versions != [x.inplace_version for x in arrays]:
            raise GradientError(
                f"{operation.label}(): an argument has been modified by an inplace operation since;"
                " write to a copy, x.clone()",
                source_type="paddle",
                reason="an argument was written to before the backward",
            )
        cotangents = [next(followed) if s else None for s in operation.smooth]
        with _running():
            return call.anchored(AUTODIFF.pull_back(operation, arrays, cotangents, call.linear, arrays))


AUTODIFF = PaddleAutodiff()
