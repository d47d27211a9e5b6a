"""``grad="flow"``: a function of one framework, differentiated by callers of others in their own way.

The function is pure in its array arguments, and may run more than once. A call of it is an `Operation` on
arrays of the caller. Its pullback is an `Operation` on the same arrays and the cotangents, which has a
pullback itself: derivatives of any order, and every transformation of the caller, need nothing besides.
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
from arraybridge.decorators.wrapping import kind_of_function, label_of, takes_self
from arraybridge.errors import Advice, ArrayNotSupportedError, GradientError, MemoryConversionError
from arraybridge.frameworks import autodiff, read_only, registry
from arraybridge.frameworks.autodiff import Linear, Shape, overlaps, select, substitute
from arraybridge.frameworks.base import Framework
from arraybridge.tracing import trace_log
from arraybridge.trees import ARRAY, arrays_of, filled, flattened, key_of, kind_of

# -- a call --------------------------------------------------------------------------------------------

#: Where an array was.
_HOLE = object()


@dataclass(slots=True, eq=False)
class _Given:
    """One of the values that the user passes to a function, containers opened.

    Attributes:
        value: The array, or anything else.
        owner: The framework of an array; None for other values.
        is_followed: Whether a graph, tape or tracer of its framework follows it.
        is_sparse: Whether it is a sparse array, which is a constant.
    """

    value: Any
    owner: Framework | None
    is_followed: bool
    is_sparse: bool = False

    @classmethod
    def of(cls, value: Any) -> _Given:
        owner = registry.find_owner(value)
        if owner is not None and owner.sparse.layout(value):
            return cls(value, owner, is_followed=False, is_sparse=True)
        return cls(value, owner, owner is not None and owner.autodiff.is_tracked(value))


class Flow(autodiff.Function):
    """Runs a function of one framework for callers of others. It holds no framework's objects."""

    def __init__(self, fn: Callable[..., Any], options: DecoratorOptions) -> None:
        _check(fn, options)
        self.fn = fn
        self.options = options
        self.name = options.framework
        self.label = label_of(fn)
        self.skip = int(takes_self(fn))
        bare = replace(options, oom_recovery=False, contract=None, grad="detach")
        #: The call if no array is differentiated.
        self.ordinary = decorated_call.ConvertingCall(fn, bare)
        #: The call if only arrays of its own framework are differentiated.
        self.inside = decorated_call.ConvertingCall(fn, replace(bare, grad="error", output_type=self.name))
        #: Converts arrays of every framework to the callee.
        self.arguments = decorated_call.ArrayConverter(self.name, replace(bare, strict=False))
        #: What the callee has compiled of it.
        self.programs: dict[Any, Any] = {}
        #: By call: which arguments are constants of the program, where not all numbers can be passed to it.
        self.constants: dict[Any, list[bool]] = {}

    def called(self, args: decorated_call.Args, kwargs: decorated_call.Kwargs) -> Any:
        values, structure = flattened([args[self.skip :], kwargs])
        given = [_Given.of(x) for x in values]
        for one in given:
            if one.is_sparse:
                self._check_constant(one)
        followed = {one.owner.name for one in given if one.is_followed and one.owner is not None}
        if followed <= {self.name}:
            call = self.inside if followed else self.ordinary
            return call.restore_result(call.attempt(args, kwargs), args, kwargs)
        if len(followed) > 1:
            raise self._several_callers(followed)
        caller = registry.framework(followed.pop())
        return self._called_by(caller, given, args[: self.skip], structure)

    def _called_by(
        self, caller: Framework, given: list[_Given], own: decorated_call.Args, structure: Any
    ) -> Any:
        """Call the function as an operation in the graph, tape or tracer of the caller.

        Args:
            caller: The framework whose arrays are differentiated.
            given: The values in the arguments.
            own: ``self`` of a method; else empty.
            structure: The arguments without their values.
        """
        enter = self.arguments.current()
        # The caller's arrays are arguments, integers too; those of others are constants.
        arguments = [one for one in given if one.owner is caller and not one.is_sparse]
        arrays = [one.value for one in arguments]
        active = [one.is_followed and caller.autodiff.is_differentiable(one.value) for one in arguments]
        try:
            find_source(arrays[0], self.options.required_source, self.name)
            leaves = [self._leaf(one, caller, enter) for one in given]
            differentiated = autodiff.Call(self, own, structure, leaves)
            results = caller.autodiff.apply(CallOperation(differentiated, caller, enter, active), arrays)
        except MemoryConversionError as error:
            if not error.is_in(f"{self.label}()"):
                error.add_call(f"{self.label}()")
            raise
        return differentiated.refill(iter(results))

    def _check_constant(self, given: _Given) -> None:
        """Raise for a sparse array that is differentiated."""
        owner = given.owner
        if owner is None:
            return
        parts = owner.sparse.take_apart(given.value)
        arrays = (given.value,) if parts is None else (given.value, *parts.arrays)
        if owner.name == self.name or not any(owner.autodiff.is_tracked(x) for x in arrays):
            return
        raise GradientError(
            f"a sparse array of {owner.sparse.title} is being differentiated. Gradients across frameworks are"
            " those of dense arrays.",
            source_type=owner.name,
            target_type=self.name,
            reason="a sparse array is being differentiated",
            advice=Advice(
                "Pass its stored values, {}, and make the sparse array in the function.",
                (owner.sparse.expressions(given.value).values,),
            ),
            place=f"{self.label}()",
        )

    def _several_callers(self, followed: set[str]) -> GradientError:
        names = " and ".join(sorted(followed))
        return GradientError(
            f"arrays of {names} are being differentiated in one call.",
            target_type=self.name,
            reason=f"differentiated arrays of {names}",
            advice="Pass those of one without their graph: x.detach(), tf.stop_gradient(x), a value from"
            " outside of jax.grad.",
            place=f"{self.label}()",
        )

    def run(self, call: autodiff.Call, values: list[Any]) -> list[Any]:
        """Call the function; its arrays, as ones of its framework. The call is told what they lay in."""
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
        """Raise for a sparse result, which has no gradient."""
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
        """What tells a call from those of another structure, to be hashed where all that it knows can be."""
        return key_of(call.structure), tuple(leaf.is_argument for leaf in call.leaves)

    def _leaf(self, given: _Given, caller: Framework, enter: decorated_call.Change) -> autodiff.Leaf:
        if given.owner is caller and not given.is_sparse:
            return autodiff.Leaf(None, is_argument=True)
        return autodiff.Leaf(self._argument_value(given.value, enter))

    def _argument_value(self, x: Any, enter: decorated_call.Change) -> Any:
        """What the function is passed for no array of the caller; nobody writes to it before the backward."""
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
    """Calls a function of one framework with the gradients of others; the results are the caller's arrays."""

    __slots__ = ("flow",)

    def prepare(self) -> None:
        self.flow = Flow(self.fn, self.options)

    def attempt(self, args: decorated_call.Args, kwargs: decorated_call.Kwargs) -> Any:
        """Call the function once, as an operation of the framework that differentiates the arguments."""
        return self.flow.called(args, kwargs)


# -- what is refused -------------------------------------------------------------------------------------


def _check(fn: Callable[..., Any], options: DecoratorOptions) -> None:
    name = options.framework
    kind = kind_of_function(fn)
    what = f'@{name}(grad="flow")'
    knows = name in registry.BUILT_IN  # those that come with arraybridge are not imported for this
    if name in _WITHOUT or (not knows and registry.framework(name).autodiff is autodiff.NOT_DIFFERENTIABLE):
        raise ValueError(f"{what}: {name} has no derivatives; write the function in torch, jax or tensorflow")
    if kind != "function":
        raise ValueError(f"{what} takes plain functions, and this is a {kind}; return all results at once")
    for option, (allowed, instead) in _ALLOWED.items():
        value = getattr(options, option)
        if value not in allowed:
            raise ValueError(f"{what} cannot be had with {option}={value!r}; {instead}")


#: Those that come with arraybridge and have no derivatives.
_WITHOUT = ("numpy", "cupy", "pyclesperanto")

#: What options may be where gradients flow; and what to do instead of anything else.
_ALLOWED: dict[str, tuple[tuple[Any, ...], str]] = {
    "output_type": (("input",), "results come back in the caller's framework; leave it out"),
    "slice_by_slice": ((False,), "loop over the planes inside of the function"),
    "oom_recovery": ((False, True), "no gradient goes through parts; pass oom_recovery=True"),
    "dtype": ((None,), "cast inside of the function"),
    "dtype_conversion": ((DtypeConversion.NATIVE_OUTPUT,), "convert inside of the function"),
}


# -- an operation --------------------------------------------------------------------------------------


class CallOperation(autodiff.Operation):
    """A pure function of the callee, on arrays of the caller.

    Args:
        call: the function. What it is passed besides has no gradient, and nobody writes to it.
        caller: the framework that differentiates it.
        enter: converts a plain array to the callee, to where the function runs.
        active: which of the arguments are differentiated.
    """

    #: Of the callee's random numbers before it ran first.
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
        """The results, and what their pullback may use; without it, the function will run again."""
        callee = self.callee.autodiff
        self.state = callee.random_state()
        results, linear = callee.linearize(self.body, self._entered(arrays), self.active, self.label)
        self._captured_error(linear.captured)
        results = self._left(results, [arrays[0]] * len(results))
        if self.caller.mutable:  # the backward reads the arguments, and the arrays beside them
            spans = list(map(self.caller.autodiff.span, arrays))
            self._part(results, spans + [callee.span(x) for x, _ in self.versions])
        return results, linear

    def on_host(self, arrays: Sequence[np.ndarray], states: Sequence[Any]) -> list[np.ndarray]:
        """The results as numbers, where the caller's program holds its thread.

        ``states``: the random state before the first run, unless this is the first, or draws none.
        """
        operation = self
        for state in states:
            operation = operation.replaying(state)
        return list(operation._under_settings(operation._number_arrays, arrays))

    def _number_arrays(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        self._writes_error()
        # Though it is read-only, it need not be copied: who writes to an argument is refused.
        entered = self._entered([read_only.writable_alias(x) for x in arrays])
        results = self.callee.autodiff.run(self.body, entered, self.label)
        return [convert_memory(y, "numpy", grad="detach") for y in results]

    def again(self, arrays: list[Any]) -> tuple[list[Any], Linear]:
        """Run once more, on arrays of the callee, with the random numbers of the first run."""
        callee = self.callee.autodiff
        self._writes_error()
        if self.draws is None:
            callee.check_repeatable(self.body, arrays, self.label)
        with callee.replayed(self.state):
            return callee.linearize(self.body, arrays, self.active, self.label)

    def replaying(self, state: Any) -> Self:
        """The same, of which the first run began with this random state."""
        operation = copy.copy(self)
        operation.state = state
        return operation

    def random_state(self) -> np.ndarray:
        return self.callee.autodiff.random_state()

    def predict(self, shapes: list[Shape]) -> list[Shape]:
        for shape, dtype in shapes:
            self.callee.supports(dtype, shape)
        predicted, captured, self.draws = self.callee.autodiff.predict(self.body, shapes, self.label)
        if self.differentiated:
            self._captured_error(captured)
        return predicted

    # -- its pullback ------------------------------------------------------------------------------

    def pullback(
        self, arrays: Sequence[Any], cotangents: Sequence[Any], linear: Linear | None
    ) -> tuple[Pullback, list[Any]]:
        """The operation that gives the gradients of the active arguments, and what to apply it to.

        ``cotangents``: one for each result, None where there is none.
        """
        operands = [*arrays, *(c for c in cotangents if c is not None)]
        return Pullback(self, [c is not None for c in cotangents], operands, linear), operands

    def gradients(self, arrays: Sequence[Any], cotangents: Sequence[Any], linear: Linear | None) -> list[Any]:
        """Those of the arguments, None for each that is not active, as the caller differentiates them."""
        pullback, operands = self.pullback(arrays, cotangents, linear)
        if any(pullback.active):
            results = iter(self.caller.autodiff.apply(pullback, operands))
        else:
            results = iter(pullback.linearize(operands)[0])
        return [next(results) if a else None for a in self.active]

    def read_again(self, results: list[Any], linear: Linear | None) -> list[Any]:
        """The results in whose memory the pullback reads, so that nobody may write to them."""
        if linear is None:
            return []
        if linear.residuals is None:
            return results
        spans = [self.callee.autodiff.span(x) for x in linear.residuals]
        return [y for y in results if overlaps(self.caller.autodiff.span(y), spans)]

    # -- from one framework to the other -------------------------------------------------------------

    def _under_settings(self, run: Callable[..., Any], *args: Any) -> Any:
        """Call it under the settings of the forward: a backward may run in any thread."""
        context = self.context.copy()
        if trace_log.open_logs:  # a trace around the backward hears it
            trace_log.record_in_context(context)
        with self.settings():
            return context.run(run, *args)

    def _entered(self, arrays: Sequence[Any]) -> list[Any]:
        entered = [self.enter(x) for x in arrays]
        for x in entered:
            self.callee.autodiff.check_argument(x, self.label)
        return entered

    def _left(self, results: Sequence[Any], likes: Sequence[Any]) -> list[Any]:
        """The results as arrays of the caller, each on the device of its like."""
        arrays = [Restoration(like, "detach").array(x) for x, like in zip(results, likes, strict=True)]
        for x in arrays:
            self.caller.autodiff.check_argument(x, self.label)
        return arrays

    def _part(self, arrays: list[Any], spans: list[autodiff.Extent]) -> None:
        """Copy those arrays that share memory with another one, or with what lies there."""
        span_of = self.caller.autodiff.span
        for i, x in enumerate(arrays):
            span = span_of(x)
            if overlaps(span, spans):
                arrays[i] = self.caller.copy(x)
                span = span_of(arrays[i])
            spans.append(span)

    def _writes_error(self) -> None:
        if any(self.callee.autodiff.version(x) != version for x, version in self.versions):
            raise autodiff.modified_argument_error(self.label)

    def _captured_error(self, what: str) -> None:
        if what:
            raise GradientError(
                f"it depends on {what}, and which would get no gradient.",
                reason="captured",
                advice="Pass it (as torch.func.functional_call does with the parameters of a module), or its"
                " values alone.",
                place=f"{self.label}()",
            )


class Pullback(CallOperation):
    """The gradients of the active arguments, as an operation on the arguments and the cotangents.

    Args:
        forward: the operation that it is the pullback of.
        present: which of its results have a cotangent.
        arrays: what it will be applied to.
        linear: what a run has kept; without it, the function runs again.
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
        count = len(self.forward.active)
        _, linear = self.forward.replaying(self.state).again(arrays[:count])
        return linear.pull(substitute([None] * len(self.present), self.present, arrays[count:]))

    def linearize(self, arrays: Sequence[Any]) -> tuple[list[Any], None]:
        # Few ask for the next order; it runs again for those who do.
        return list(self._under_settings(self._values, arrays)), None

    def _values(self, arrays: Sequence[Any]) -> list[Any]:
        likes = select(arrays, self.forward.active)
        spans = list(map(self.caller.autodiff.span, arrays))
        linear = self.linear
        self.linear = None  # which the caller's graph of the gradients would keep
        if linear is None:
            gradients = self._left(self.body(self._entered(arrays)), likes)
        else:
            # The caller may write to a gradient, and pull back again.
            spans += [self.callee.autodiff.span(x) for x in linear.residuals or ()]
            cotangents = self._entered(arrays[len(self.forward.active) :])
            cotangents = substitute([None] * len(self.present), self.present, cotangents)
            gradients = self._left(linear.pull(cotangents), likes)
        self._part(gradients, spans)
        return gradients

    def again(self, arrays: list[Any]) -> tuple[list[Any], Linear]:
        return self.callee.autodiff.linearize(self.body, arrays, self.active, self.label)

    def predict(self, shapes: list[Shape]) -> list[Shape]:
        return select(shapes, self.forward.active)
