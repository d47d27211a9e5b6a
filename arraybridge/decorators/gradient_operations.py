"""The operations that pass gradients to and from a function of another framework."""

from __future__ import annotations

import contextvars
import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import numpy as np

from arraybridge.conversion.convert import convert_memory
from arraybridge.decorators.argument_conversion import Change
from arraybridge.decorators.results import Restoration
from arraybridge.errors import GradientError, MemoryConversionError
from arraybridge.host import read_only_memory
from arraybridge.interface import autodiff, registry
from arraybridge.interface.autodiff import Linear, Shape, overlaps, select, substitute
from arraybridge.interface.framework import Framework
from arraybridge.interface.unsupported import dtype_error
from arraybridge.tracing import trace_log
from arraybridge.trees import arrays_of


@contextmanager
def blame_result_of(label: str) -> Iterator[None]:
    """Make conversion errors state that the result of the function ``label`` cannot be converted."""
    try:
        yield
    except MemoryConversionError as error:
        if not error.is_in(f"{label}()"):  # errors such as JAX without x64 are about the call
            error.blame_result(label)
        raise


class CallOperation(autodiff.Operation):
    """A call of a pure function, as an operation on arrays of another framework.

    The *caller* is the framework that differentiates. The *callee* is the framework of the function.

    Args:
        call: The function, with its other arguments, which have no gradient and must not be modified.
        caller: The framework that differentiates the function.
        enter: Converts an array to the callee, on the device on which the function runs.
        active: For each argument, whether it is differentiated.
    """

    #: The random state of the function's framework before the first run.
    state: Any = autodiff.NO_STATE

    def __init__(self, call: autodiff.Call, caller: Framework, enter: Change, active: list[bool]) -> None:
        self.body: autodiff.Body = call
        self.caller = caller
        self.enter = enter
        self.active = tuple(active)
        self.label = call.function.label
        self.callee = callee = registry.framework(call.function.name)
        values = [leaf.value for leaf in call.leaves]
        self.versions = [(x, callee.autodiff.version(x)) for x in arrays_of(values)]
        self.context = contextvars.copy_context()
        self.settings = callee.runtime.thread_settings()

    def linearize(self, arrays: Sequence[Any]) -> tuple[list[Any], Linear | None]:
        """Run the function; return its results as arrays of the caller's framework, and its derivative."""
        callee = self.callee.autodiff
        self.state = callee.random_state()
        results, linear = callee.linearize(self.body, self._to_callee(arrays), self.active, self.label)
        self._check_captured(linear.captured)
        with blame_result_of(self.label):
            results = self._to_caller(results, [arrays[0]] * len(results))
        if self.caller.mutable:  # the backward pass reads the arguments and the constants
            spans = list(map(self.caller.autodiff.span, arrays))
            self._copy_shared(results, spans + [callee.span(x) for x, _ in self.versions])
        return results, linear

    def on_host(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the results as NumPy arrays, for a callback from a compiled program of another framework."""
        return list(self._run_under_settings(self._host_results, arrays))

    def _host_results(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        self._check_unmodified()
        # No copy of read-only arrays is needed, because writing to an argument raises an error.
        entered = self._to_callee([read_only_memory.writable_alias(x) for x in arrays])
        results = self.callee.autodiff.run(self.body, entered, self.label)
        with blame_result_of(self.label):
            return [convert_memory(y, "numpy", grad="detach") for y in results]

    def run_again(self, arrays: list[Any]) -> tuple[list[Any], Linear]:
        """Run the function again on arrays of its own framework, with the random numbers of the first run."""
        callee = self.callee.autodiff
        self._check_unmodified()
        if self.draws is None:
            callee.check_repeatable(self.body, arrays, self.label)
        with callee.replay(self.state):
            return callee.linearize(self.body, arrays, self.active, self.label)

    def copy_with_state(self, state: Any) -> Self:
        """Return the same operation with this random state before its first run."""
        operation = copy.copy(self)
        operation.state = state
        return operation

    def random_state(self) -> np.ndarray:
        """Return the current random state of the function's framework."""
        return self.callee.autodiff.random_state()

    def predict(self, shapes: list[Shape]) -> list[Shape]:
        """Return the shapes and dtypes of the results for arguments of these shapes and dtypes."""
        for shape, dtype in shapes:
            self.callee.supports(dtype, shape)
        predicted, captured, self.draws = self.callee.autodiff.predict(self.body, shapes, self.label)
        if self.differentiated:
            self._check_captured(captured)
        with blame_result_of(self.label):
            for _, dtype in predicted:
                if self.callee.dtypes is not None and dtype not in self.callee.dtypes:
                    raise dtype_error(
                        self.callee,
                        f"a {self.callee.name} array of dtype {dtype}",
                        "no other framework has this dtype",
                        "Return an array of another dtype.",
                    )
        return predicted

    # -- its pullback ------------------------------------------------------------------------------

    def pullback(
        self, arrays: Sequence[Any], cotangents: Sequence[Any], linear: Linear | None
    ) -> tuple[Pullback, list[Any]]:
        """Return the operation that computes the gradients of the active arguments, and its arguments.

        ``cotangents`` has one entry per result; None for results without a cotangent.
        """
        operands = [*arrays, *(c for c in cotangents if c is not None)]
        return Pullback(self, [c is not None for c in cotangents], operands, linear), operands

    def gradients(self, arrays: Sequence[Any], cotangents: Sequence[Any], linear: Linear | None) -> list[Any]:
        """Return gradients that the caller's framework can differentiate; None for inactive arguments."""
        pullback, operands = self.pullback(arrays, cotangents, linear)
        if any(pullback.active):
            results = iter(self.caller.autodiff.apply(pullback, operands))
        else:
            results = iter(pullback.linearize(operands)[0])
        return [next(results) if a else None for a in self.active]

    def find_read_again(self, results: list[Any], linear: Linear | None) -> list[Any]:
        """Return the results whose memory the pullback reads and which must not be written to."""
        if linear is None:
            return []
        if linear.residuals is None:
            return results
        spans = [self.callee.autodiff.span(x) for x in linear.residuals]
        return [y for y in results if overlaps(self.caller.autodiff.span(y), spans)]

    # -- conversion between caller and callee --------------------------------------------------------

    def _run_under_settings(self, run: Callable[..., Any], *args: Any) -> Any:
        """Call a function, possibly in another thread, under the settings of the forward pass."""
        context = self.context.copy()
        if trace_log.open_logs:  # a trace around the backward pass records the call
            trace_log.record_in_context(context)
        with self.settings():
            return context.run(run, *args)

    def _to_callee(self, arrays: Sequence[Any]) -> list[Any]:
        entered = [self.enter(x) for x in arrays]
        for x in entered:
            self.callee.autodiff.check_argument(x, self.label)
        return entered

    def _to_caller(self, results: Sequence[Any], examples: Sequence[Any]) -> list[Any]:
        """Return the results as arrays of the caller's framework, each on the device of its example."""
        pairs = zip(results, examples, strict=True)
        arrays = [Restoration(example, "detach").array(x) for x, example in pairs]
        for x in arrays:
            self.caller.autodiff.check_argument(x, self.label)
        return arrays

    def _copy_shared(self, arrays: list[Any], spans: list[autodiff.Extent]) -> None:
        """Copy the arrays that share memory with each other or with these memory ranges."""
        span_of = self.caller.autodiff.span
        for i, x in enumerate(arrays):
            span = span_of(x)
            if overlaps(span, spans):
                arrays[i] = self.caller.copy(x)
                span = span_of(arrays[i])
            spans.append(span)

    def _check_unmodified(self) -> None:
        if any(self.callee.autodiff.version(x) != version for x, version in self.versions):
            raise autodiff.error_for_modified_argument(self.label)

    def _check_captured(self, what: str) -> None:
        if not what:
            return
        callee = self.callee.autodiff
        advice = (
            f"If w is a constant, {callee.constant_advice}. Otherwise, pass it as an argument:"
            f" {self.caller.autodiff.argument_advice}. {callee.module_advice}"
        )
        raise GradientError(
            f"The result depends on {what}, called w here, which is not an argument and would get no"
            " gradient.",
            reason="captured",
            advice=advice.rstrip(),
            place=f"{self.label}()",
        )


class Pullback(CallOperation):
    """The gradients of the active arguments, as an operation on the arguments and the cotangents.

    Args:
        forward: The operation whose pullback this is.
        present: For each result of ``forward``, whether it has a cotangent.
        arrays: The arrays to which the pullback will be applied.
        linear: The derivative from a forward run. If it is None, the function runs again.
    """

    def __init__(
        self, forward: CallOperation, present: Sequence[bool], arrays: Sequence[Any], linear: Linear | None
    ) -> None:
        # Not super().__init__(): a pullback shares the callee, settings and state of its forward operation.
        self.forward = forward
        self.present = present
        self.linear = linear
        caller = forward.caller.autodiff
        self.active = tuple(caller.is_differentiable(x) and caller.is_tracked(x) for x in arrays)
        self.versions = []
        self.state = forward.state
        self.callee = forward.callee
        self.caller = forward.caller
        self.enter = forward.enter
        self.context = forward.context
        self.settings = forward.settings
        self.label = forward.label

    def body(self, arrays: list[Any]) -> list[Any]:
        """Run the function again to compute the gradients, as arrays of the function's framework."""
        count = len(self.forward.active)
        _, linear = self.forward.copy_with_state(self.state).run_again(arrays[:count])
        return linear.pull(substitute([None] * len(self.present), self.present, arrays[count:]))

    def linearize(self, arrays: Sequence[Any]) -> tuple[list[Any], None]:
        """Return the gradients and None, because their derivative is not captured."""
        # Second derivatives are rare. The pullback runs again to compute them.
        return list(self._run_under_settings(self._values, arrays)), None

    def _values(self, arrays: Sequence[Any]) -> list[Any]:
        examples = select(arrays, self.forward.active)
        spans = list(map(self.caller.autodiff.span, arrays))
        linear = self.linear
        self.linear = None  # otherwise, the caller's graph of the gradients keeps it alive
        if linear is None:
            gradients = self._to_caller(self.body(self._to_callee(arrays)), examples)
        else:
            # The caller may write to a gradient and then run the backward pass again.
            spans += [self.callee.autodiff.span(x) for x in linear.residuals or ()]
            cotangents = self._to_callee(arrays[len(self.forward.active) :])
            cotangents = substitute([None] * len(self.present), self.present, cotangents)
            gradients = self._to_caller(linear.pull(cotangents), examples)
        self._copy_shared(gradients, spans)
        return gradients

    def run_again(self, arrays: list[Any]) -> tuple[list[Any], Linear]:
        """Run the pullback again on arrays of the function's framework."""
        return self.callee.autodiff.linearize(self.body, arrays, self.active, self.label)

    def predict(self, shapes: list[Shape]) -> list[Shape]:
        """Return the shapes and dtypes of the gradients, which are those of the active arguments."""
        return select(shapes, self.forward.active)
