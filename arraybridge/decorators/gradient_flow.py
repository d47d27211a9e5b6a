"""Functions with ``grad="flow"``, which other frameworks can differentiate.

The function must be pure in its array arguments, and may run more than once. Each call is an `Operation`
on arrays of the caller. Its pullback is an `Operation` on the same arrays and the cotangents, and has a
pullback itself. This is sufficient for derivatives of any order and for all transformations of the caller.
"""

from __future__ import annotations

import contextvars
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from arraybridge.carriers.sources import is_array
from arraybridge.conversion.convert import convert_memory
from arraybridge.conversion.decide import find_source
from arraybridge.decorators import decorated_call
from arraybridge.decorators.dtype_conversion import DtypeConversion
from arraybridge.decorators.options import DecoratorOptions
from arraybridge.decorators.results import Restoration
from arraybridge.decorators.wrapping import SelfArgument, kind_of_function, label_of
from arraybridge.errors import Advice, ArrayNotSupportedError, GradientError, MemoryConversionError
from arraybridge.frameworks import autodiff, read_only, registry
from arraybridge.frameworks.autodiff import Linear, Shape, overlaps, select, substitute
from arraybridge.frameworks.base import Framework
from arraybridge.tracing import trace_log
from arraybridge.trees import ARRAY, arrays_of, filled, flattened, key_of, kind_of

# -- a call --------------------------------------------------------------------------------------------

#: A placeholder for an array in a container.
_HOLE = object()


@dataclass(slots=True, eq=False)
class _Argument:
    """A value in the arguments of a call, inside or outside containers.

    Attributes:
        value: An array or any other object.
        owner: The framework of an array; None for other values.
        is_tracked: Whether a graph, tape or tracer of its framework tracks it.
        is_sparse: Whether it is a sparse array, which is a constant.
    """

    value: Any
    owner: Framework | None
    is_tracked: bool
    is_sparse: bool = False

    @classmethod
    def of(cls, value: Any) -> _Argument:
        owner = registry.find_owner(value)
        if owner is not None and owner.sparse.layout(value):
            return cls(value, owner, is_tracked=False, is_sparse=True)
        return cls(value, owner, owner is not None and owner.autodiff.is_tracked(value))


class Flow(autodiff.Function):
    """A function of one framework that other frameworks can differentiate."""

    def __init__(self, fn: Callable[..., Any], options: DecoratorOptions) -> None:
        _check(fn, options)
        self.fn = fn
        self.options = options
        self.name = options.framework
        self.label = label_of(fn)
        self.self_argument = SelfArgument.of(fn)
        bare = replace(options, oom_recovery=False, contract=None, grad="detach")
        #: The call if no array is differentiated.
        self.call_without_gradients = decorated_call.ConvertingCall(fn, bare)
        #: The call if only arrays of the function's own framework are differentiated.
        self.call_with_own_gradients = decorated_call.ConvertingCall(
            fn, replace(bare, grad="error", output_type=self.name)
        )
        #: Converts arrays of any framework to the framework of the function.
        self.arguments = decorated_call.ArrayConverter(self.name, replace(bare, strict=False))
        #: The programs that the callee has compiled, by call.
        self.programs: dict[Any, Any] = {}
        #: For each call, whether each value is a constant of the program, as numbers in shapes must be.
        self.constants: dict[Any, list[bool]] = {}

    def called(self, args: decorated_call.Args, kwargs: decorated_call.Kwargs) -> Any:
        """Call the function, as an operation of the framework that differentiates the arguments.

        The result is restored for the caller.

        Raises:
            GradientError: If several other frameworks differentiate the arguments.
        """
        skip = 0 if self.self_argument is None else self.self_argument.count(args)
        values, structure = flattened([args[skip:], kwargs])
        given = [_Argument.of(x) for x in values]
        for one in given:
            if one.is_sparse:
                self._check_constant(one)
        tracked = {one.owner.name for one in given if one.is_tracked and one.owner is not None}
        if tracked <= {self.name}:
            call = self.call_with_own_gradients if tracked else self.call_without_gradients
            return call.restore_result(call.attempt(args, kwargs), args, kwargs)
        if len(tracked) > 1:
            raise self._several_callers(tracked)
        caller = registry.framework(tracked.pop())
        return self._called_by(caller, given, args[:skip], structure)

    def _called_by(
        self, caller: Framework, given: list[_Argument], own: decorated_call.Args, structure: Any
    ) -> Any:
        """Call the function as an operation in the graph, tape or tracer of the caller.

        Args:
            caller: The framework whose arrays are differentiated.
            given: The values in the arguments.
            own: ``self`` of a method, otherwise empty.
            structure: The arguments without their values.
        """
        enter = self.arguments.current()
        # All dense arrays of the caller are arguments, including integers. All others are constants.
        arguments = [one for one in given if one.owner is caller and not one.is_sparse]
        arrays = [one.value for one in arguments]
        active = [one.is_tracked and caller.autodiff.is_differentiable(one.value) for one in arguments]
        leaves: list[autodiff.Leaf] = []
        try:
            find_source(arrays[0], self.options.required_source, self.name)
            # If one raises, the list has the leaves before it.
            leaves.extend(self._leaf(one, caller, enter) for one in given)
            differentiated = autodiff.Call(self, own, structure, leaves)
            results = caller.autodiff.apply(CallOperation(differentiated, caller, enter, active), arrays)
        except MemoryConversionError as error:
            if not error.is_in(f"{self.label}()"):
                failed = len(leaves) < len(given)
                error.add_call(
                    self._describe(len(leaves), given, own, structure) if failed else f"{self.label}()"
                )
            raise
        return differentiated.refill(iter(results))

    def _describe(self, index: int, given: list[_Argument], own: decorated_call.Args, structure: Any) -> str:
        """Return the description of the argument that holds a value, for a message."""
        positional, kwargs = filled(structure, (one.value for one in given))
        args = (*own, *positional)
        for place, value in enumerate((*positional, *kwargs.values()), len(own)):
            index -= len(flattened([value])[0])
            if index < 0:
                return decorated_call.describe_argument(self.fn, args, kwargs, place)
        return f"{self.label}()"

    def _check_constant(self, given: _Argument) -> None:
        """Raise `GradientError` for a sparse array that another framework differentiates."""
        owner = given.owner
        if owner is None:
            return
        parts = owner.sparse.take_apart(given.value)
        arrays = (given.value,) if parts is None else (given.value, *parts.arrays)
        if owner.name == self.name or not any(owner.autodiff.is_tracked(x) for x in arrays):
            return
        raise GradientError(
            f"A sparse array of {owner.sparse.title} is differentiated. Gradients flow across frameworks only"
            " for dense arrays.",
            source_type=owner.name,
            target_type=self.name,
            reason="a sparse array is differentiated",
            advice=Advice(
                "Pass its stored values, {}, and create the sparse array in the function.",
                (owner.sparse.expressions(given.value).values,),
            ),
            place=f"{self.label}()",
        )

    def _several_callers(self, tracked: set[str]) -> GradientError:
        names = " and ".join(sorted(tracked))
        return GradientError(
            f"Arrays of {names} are differentiated in the same call. Only one framework can differentiate"
            " it.",
            target_type=self.name,
            reason=f"differentiated arrays of {names}",
            advice="Detach the arrays of the other framework, for example with x.detach() or"
            " tf.stop_gradient(x), or pass a value from outside jax.grad.",
            place=f"{self.label}()",
        )

    def run(self, call: autodiff.Call, values: list[Any]) -> list[Any]:
        """Call the function and return the arrays in its result; set ``call.refill`` to restore the rest."""
        framework = registry.framework(self.name)
        positional, kwargs = filled(call.structure, iter(values))
        args = (*call.own, *positional)
        if framework.streams.has_streams and self.options.stream:
            first = next(filter(framework.owns, values))
            result = decorated_call.on_own_stream(framework, first, self.fn, args, kwargs)
        else:
            result = self.fn(*args, **kwargs)
        leaves, structure = flattened(result)
        arrays = []
        for i, leaf in enumerate(leaves):
            x = np.asarray(leaf) if issubclass(type(leaf), np.generic) and is_array(leaf) else leaf
            if kind_of(x) is ARRAY:
                self._check_result(x)
                arrays.append(x if framework.owns(x) else convert_memory(x, self.name))
                leaves[i] = _HOLE
        call.refill = lambda arrays: filled(structure, (next(arrays) if x is _HOLE else x for x in leaves))
        return arrays

    def _check_result(self, x: Any) -> None:
        """Raise `ArrayNotSupportedError` for a sparse result, which has no gradient."""
        owner = registry.find_owner(x)
        if owner is not None and owner.sparse.layout(x):
            raise ArrayNotSupportedError(
                f"A sparse array of {owner.sparse.title} is not a result that can be differentiated.",
                source_type=owner.name,
                reason="the result is a sparse array",
                advice=Advice("Return its stored values, {}.", (owner.sparse.expressions(x).values,)),
                place=f"{self.label}()",
            )

    def key(self, call: autodiff.Call) -> Any:
        """Return a key of the structure of a call. It is hashable if the values in the structure are."""
        return key_of(call.structure), tuple(leaf.is_argument for leaf in call.leaves)

    def _leaf(self, given: _Argument, caller: Framework, enter: decorated_call.Change) -> autodiff.Leaf:
        if given.owner is caller and not given.is_sparse:
            return autodiff.Leaf(None, is_argument=True)
        return autodiff.Leaf(self._argument_value(given.value, enter))

    def _argument_value(self, x: Any, enter: decorated_call.Change) -> Any:
        """Return the callee's value of an argument that is not an array of the caller.

        Mutable arrays of other frameworks are copied, so that their values are the same in the backward pass.
        """
        callee = registry.framework(self.name).autodiff
        if kind_of(x) is not ARRAY:
            return callee.plain_value(x)
        owner, data = find_source(x, self.options.required_source, self.name)
        if owner.mutable and owner.name != self.name:
            x = owner.copy(owner.autodiff.detach(data) if owner.autodiff.requires_grad(data) else data)
        x = callee.prepare(enter(x))
        callee.check_argument(x, self.label)
        return x


class FlowingCall(decorated_call.DecoratedCall):
    """A decorated function that other frameworks can differentiate. Its results are arrays of the caller."""

    __slots__ = ("flow",)

    def prepare(self) -> None:
        """Set the function that other frameworks can differentiate."""
        self.flow = Flow(self.fn, self.options)

    def attempt(self, args: decorated_call.Args, kwargs: decorated_call.Kwargs) -> Any:
        """Call the function once, as an operation of the framework that differentiates the arguments."""
        return self.flow.called(args, kwargs)


# -- checks of the options -----------------------------------------------------------------------------


def _check(fn: Callable[..., Any], options: DecoratorOptions) -> None:
    name = options.framework
    kind = kind_of_function(fn)
    what = f'@{name}(grad="flow")'
    is_built_in = name in registry.BUILT_IN  # built-in frameworks need not be imported for this check
    if name in _NOT_DIFFERENTIABLE or (
        not is_built_in and registry.framework(name).autodiff is autodiff.NOT_DIFFERENTIABLE
    ):
        raise ValueError(
            f"{what} is not supported: {name} has no automatic differentiation. Write the function in torch,"
            " jax or tensorflow."
        )
    if kind != "function":
        raise ValueError(
            f"{what} supports plain functions only, and {label_of(fn)} is a {kind}. Return all results at the"
            " end of a plain function."
        )
    for option, (allowed, fix) in _ALLOWED.items():
        value = getattr(options, option)
        if value not in allowed:
            shown = value.value if isinstance(value, DtypeConversion) else value
            raise ValueError(f"{what} cannot be combined with {option}={shown!r}. {fix}")


#: Built-in frameworks without automatic differentiation.
_NOT_DIFFERENTIABLE = ("numpy", "cupy", "pyclesperanto")

#: For each option, the values that are allowed with ``grad="flow"``, and the fix for other values.
_ALLOWED: dict[str, tuple[tuple[Any, ...], str]] = {
    "output_type": (("input",), "Remove output_type: results are always arrays of the caller's framework."),
    "slice_by_slice": ((False,), "Loop over the planes inside the function."),
    "oom_recovery": ((False, True), "Pass oom_recovery=True: gradients do not flow through split batches."),
    "dtype": ((None,), "Cast inside the function."),
    "dtype_conversion": ((DtypeConversion.NATIVE_OUTPUT,), "Convert inside the function."),
}


# -- an operation --------------------------------------------------------------------------------------


class CallOperation(autodiff.Operation):
    """A pure function of the callee, applied to arrays of the caller.

    Args:
        call: The function, with its other arguments, which have no gradient and are not written to.
        caller: The framework that differentiates it.
        enter: Converts a plain array to the callee, on the device on which the function runs.
        active: For each argument, whether it is differentiated.
    """

    #: The random state of the callee before the first run.
    state: Any = autodiff.NO_STATE

    def __init__(
        self, call: autodiff.Call, caller: Framework, enter: decorated_call.Change, active: list[bool]
    ) -> None:
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
        """Return the results and their linearization. Without one, the pullback runs the function again."""
        callee = self.callee.autodiff
        self.state = callee.random_state()
        results, linear = callee.linearize(self.body, self._to_callee(arrays), self.active, self.label)
        self._check_captured(linear.captured)
        results = self._to_caller(results, [arrays[0]] * len(results))
        if self.caller.mutable:  # the backward pass reads the arguments and the constants
            spans = list(map(self.caller.autodiff.span, arrays))
            self._copy_shared(results, spans + [callee.span(x) for x, _ in self.versions])
        return results, linear

    def on_host(self, arrays: Sequence[np.ndarray], states: Sequence[Any]) -> list[np.ndarray]:
        """Return the results as NumPy arrays, for a callback of a compiled program of the caller.

        ``states`` has the random state before the first run. It is empty for the first run, and for functions
        that draw no random numbers.
        """
        operation = self
        for state in states:
            operation = operation.replaying(state)
        return list(operation.run_under_settings(operation.host_results, arrays))

    def host_results(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the results of the function as host arrays."""
        self._check_unmodified()
        # No copy of read-only arrays is needed, because writing to an argument raises an error.
        entered = self._to_callee([read_only.writable_alias(x) for x in arrays])
        results = self.callee.autodiff.run(self.body, entered, self.label)
        return [convert_memory(y, "numpy", grad="detach") for y in results]

    def again(self, arrays: list[Any]) -> tuple[list[Any], Linear]:
        """Run the function again on arrays of the callee, with the random numbers of the first run."""
        callee = self.callee.autodiff
        self._check_unmodified()
        if self.draws is None:
            callee.check_repeatable(self.body, arrays, self.label)
        with callee.replayed(self.state):
            return callee.linearize(self.body, arrays, self.active, self.label)

    def replaying(self, state: Any) -> Self:
        """Return the same operation with this random state before its first run."""
        operation = copy.copy(self)
        operation.state = state
        return operation

    def random_state(self) -> np.ndarray:
        """Return the current random state of the callee."""
        return self.callee.autodiff.random_state()

    def predict(self, shapes: list[Shape]) -> list[Shape]:
        """Return the shapes and dtypes of the results for arguments of these shapes and dtypes."""
        for shape, dtype in shapes:
            self.callee.supports(dtype, shape)
        predicted, captured, self.draws = self.callee.autodiff.predict(self.body, shapes, self.label)
        if self.differentiated:
            self._check_captured(captured)
        return predicted

    # -- its pullback ------------------------------------------------------------------------------

    def pullback(
        self, arrays: Sequence[Any], cotangents: Sequence[Any], linear: Linear | None
    ) -> tuple[Pullback, list[Any]]:
        """Return the operation that computes the gradients of the active arguments, and its arguments.

        ``cotangents`` has one for each result; None if there is none.
        """
        operands = [*arrays, *(c for c in cotangents if c is not None)]
        return Pullback(self, [c is not None for c in cotangents], operands, linear), operands

    def gradients(self, arrays: Sequence[Any], cotangents: Sequence[Any], linear: Linear | None) -> list[Any]:
        """Return the gradients of the arguments as differentiable arrays; None for inactive arguments."""
        pullback, operands = self.pullback(arrays, cotangents, linear)
        if any(pullback.active):
            results = iter(self.caller.autodiff.apply(pullback, operands))
        else:
            results = iter(pullback.linearize(operands)[0])
        return [next(results) if a else None for a in self.active]

    def read_again(self, results: list[Any], linear: Linear | None) -> list[Any]:
        """Return the results whose memory the pullback reads and which must not be written to."""
        if linear is None:
            return []
        if linear.residuals is None:
            return results
        spans = [self.callee.autodiff.span(x) for x in linear.residuals]
        return [y for y in results if overlaps(self.caller.autodiff.span(y), spans)]

    # -- conversion between caller and callee --------------------------------------------------------

    def run_under_settings(self, run: Callable[..., Any], *args: Any) -> Any:
        """Call a function under the settings of the forward pass; a backward pass may run in any thread."""
        context = self.context.copy()
        if trace_log.open_logs:  # a trace around the backward pass records it
            trace_log.record_in_context(context)
        with self.settings():
            return context.run(run, *args)

    def _to_callee(self, arrays: Sequence[Any]) -> list[Any]:
        entered = [self.enter(x) for x in arrays]
        for x in entered:
            self.callee.autodiff.check_argument(x, self.label)
        return entered

    def _to_caller(self, results: Sequence[Any], examples: Sequence[Any]) -> list[Any]:
        """Return the results as arrays of the caller, each on the device of its example."""
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
            raise autodiff.modified_argument_error(self.label)

    def _check_captured(self, what: str) -> None:
        if not what:
            return
        callee = self.callee.autodiff
        advice = (
            f"If w is a constant, {callee.constant_advice}. Otherwise, pass it as an argument:"
            f" {self.caller.autodiff.argument_advice}."
        )
        if self.callee.name == "torch":
            advice += " For the parameters of a module, use torch.func.functional_call."
        raise GradientError(
            f"The result depends on w, {what} that is not an argument and would get no gradient.",
            reason="captured",
            advice=advice,
            place=f"{self.label}()",
        )


class Pullback(CallOperation):
    """The gradients of the active arguments, as an operation on the arguments and the cotangents.

    Args:
        forward: The operation whose pullback this is.
        present: For each result of ``forward``, whether it has a cotangent.
        arrays: The arrays to which it will be applied.
        linear: The linearization of a forward run. Without one, the function runs again.
    """

    def __init__(
        self, forward: CallOperation, present: Sequence[bool], arrays: Sequence[Any], linear: Linear | None
    ) -> None:
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
        """Return the gradients as arrays of the callee. Run the function again to compute them."""
        count = len(self.forward.active)
        _, linear = self.forward.replaying(self.state).again(arrays[:count])
        return linear.pull(substitute([None] * len(self.present), self.present, arrays[count:]))

    def linearize(self, arrays: Sequence[Any]) -> tuple[list[Any], None]:
        """Return the gradients, without a linearization."""
        # Second derivatives are rare. The pullback runs again to compute them.
        return list(self.run_under_settings(self._values, arrays)), None

    def _values(self, arrays: Sequence[Any]) -> list[Any]:
        examples = select(arrays, self.forward.active)
        spans = list(map(self.caller.autodiff.span, arrays))
        linear = self.linear
        self.linear = None  # the caller's graph of the gradients would keep it alive
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

    def again(self, arrays: list[Any]) -> tuple[list[Any], Linear]:
        """Run the pullback again on arrays of the callee."""
        return self.callee.autodiff.linearize(self.body, arrays, self.active, self.label)

    def predict(self, shapes: list[Shape]) -> list[Shape]:
        """Return the shapes and dtypes of the active arguments."""
        return select(shapes, self.forward.active)
