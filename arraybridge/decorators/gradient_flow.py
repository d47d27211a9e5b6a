"""Functions with ``grad="flow"``, which other frameworks can differentiate.

The decorated function must be pure in its array arguments, and may run more than once. Each call is an
`Operation` on arrays of the caller's framework, which is the framework that differentiates. The pullback of
an operation is an `Operation` on the same arrays and the cotangents, and has a pullback itself. This is
sufficient for derivatives of any order and for all transformations of the caller's framework.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from arraybridge.advice import Advice
from arraybridge.carriers.sources import is_array, open_by_carrier
from arraybridge.conversion.convert import convert_memory
from arraybridge.conversion.decision import find_source
from arraybridge.decorators.argument_conversion import Args, ArrayConverter, Change, Kwargs, describe_argument
from arraybridge.decorators.decorated_call import ConvertingCall, DecoratedCall
from arraybridge.decorators.dtype_conversion import DtypeConversion
from arraybridge.decorators.gradient_operations import CallOperation, blame_result_of
from arraybridge.decorators.options import DecoratorOptions
from arraybridge.decorators.surroundings import Surroundings
from arraybridge.decorators.wrapping import kind_of_function, label_of
from arraybridge.errors import ArrayNotSupportedError, GradientError, MemoryConversionError
from arraybridge.interface import autodiff, registry
from arraybridge.interface.framework import Framework, NoPlanError
from arraybridge.trees import ARRAY, fill, flatten, key_of, kind_of

# -- a call --------------------------------------------------------------------------------------------

#: A placeholder for an array in a flattened result.
_HOLE = object()


class FlowingCall(DecoratedCall, autodiff.Function):
    """A decorated function of one framework that other frameworks can differentiate.

    Its results are arrays of the caller's framework.
    """

    def prepare(self) -> None:
        """Set the attributes that depend on the function and the options."""
        options = self.options
        _check(self.fn, options)
        self.name = options.framework
        bare = replace(options, oom_recovery=False, contract=None, grad="detach")
        #: Makes the calls in which no array is differentiated.
        self.call_without_gradients = ConvertingCall(self.fn, bare)
        #: Makes the calls in which only arrays of the function's own framework are differentiated.
        self.call_with_own_gradients = ConvertingCall(
            self.fn, replace(bare, grad="error", output_type=self.name)
        )
        #: Converts arrays of any framework to the framework of the function.
        self.arguments = ArrayConverter(self.name, replace(bare, strict=False))
        self.programs = {}
        self.constants = {}

    def attempt(self, args: Args, kwargs: Kwargs) -> Any:
        """Call the function once, as an operation of the framework that differentiates it, if any."""
        if self.options.x64 is None:
            return self._call(args, kwargs)
        with registry.framework(self.name).runtime.x64_context(self.options.x64):
            return self._call(args, kwargs)

    def _call(self, args: Args, kwargs: Kwargs) -> Any:
        """Call the function and restore its result for the caller.

        Raises:
            GradientError: If arrays of several frameworks are differentiated, or sparse arrays of a framework
                other than that of the function.
        """
        skip = self.count_own(args)
        leaves, structure = flatten([args[skip:], kwargs])
        values = [_open_tracked(x) for x in leaves]
        callers = {caller.name for caller in map(self._find_caller, values) if caller is not None}
        if callers <= {self.name}:
            call = self.call_with_own_gradients if callers else self.call_without_gradients
            return call.restore_result(call.attempt(args, kwargs), args, kwargs)
        if len(callers) > 1:
            raise self._several_callers(callers)
        return self._call_from(registry.framework(callers.pop()), values, args[:skip], structure)

    def _find_caller(self, x: Any) -> Framework | None:
        """Return the framework whose graph, tape or tracer tracks ``x``; None if there is none.

        Gradients do not flow through sparse arrays, which raise an error if another framework tracks them.
        """
        owner = registry.find_owner(x)
        if owner is None:
            return None
        if owner.sparse.layout(x):
            self._check_constant(x, owner)
            return None
        return owner if owner.autodiff.is_tracked(x) else None

    def _call_from(self, caller: Framework, values: list[Any], own: Args, structure: Any) -> Any:
        """Call the function as an operation in the graph, tape or tracer of the caller.

        Args:
            caller: The framework whose arrays are differentiated.
            values: The values in the arguments, with containers flattened.
            own: A sequence with ``self`` if the function is a method; otherwise an empty sequence.
            structure: The containers of the arguments, without their values.
        """
        enter = self.arguments.current()
        # All dense arrays of the caller are arguments, including integers. All other values are constants.
        are_arguments = [registry.find_owner(x) is caller and not caller.sparse.layout(x) for x in values]
        arrays = autodiff.select(values, are_arguments)
        active = [caller.autodiff.is_tracked(x) and caller.autodiff.is_differentiable(x) for x in arrays]
        leaves: list[autodiff.Leaf] = []
        try:
            # Raises if strict=True excludes the framework of the caller.
            find_source(arrays[0], self.options.required_source, self.name)
            for x, is_argument in zip(values, are_arguments, strict=True):
                value = None if is_argument else self._argument_value(x, enter)
                leaves.append(autodiff.Leaf(value, is_argument=is_argument))
            differentiated = autodiff.Call(self, own, structure, leaves)
            results = caller.autodiff.apply(CallOperation(differentiated, caller, enter, active), arrays)
        except MemoryConversionError as error:
            if not error.is_in(f"{self.label}()") and not error.is_in(f"{self.label}(), result"):
                # If a value could not be converted, `leaves` has only the leaves of the preceding values.
                error.add_call(self._describe(len(leaves), values, own, structure))
            raise
        return differentiated.refill(iter(results))

    def _describe(self, index: int, values: list[Any], own: Args, structure: Any) -> str:
        """Return the description of the argument that holds a value, or else of the call, for a message."""
        positional, kwargs = fill(structure, iter(values))
        args = (*own, *positional)
        for place, value in enumerate((*positional, *kwargs.values()), len(own)):
            index -= len(flatten([value])[0])
            if index < 0:
                return describe_argument(self.fn, args, kwargs, place)
        return f"{self.label}()"

    def _check_constant(self, x: Any, owner: Framework) -> None:
        """Raise `GradientError` for a sparse array that another framework differentiates."""
        parts = owner.sparse.take_apart(x)
        arrays = (x,) if parts is None else (x, *parts.arrays)
        if owner.name == self.name or not any(map(owner.autodiff.is_tracked, arrays)):
            return
        raise GradientError(
            f"A sparse array of {owner.sparse.title} is differentiated. Gradients flow across frameworks only"
            " for dense arrays.",
            source_type=owner.name,
            target_type=self.name,
            reason="a sparse array is differentiated",
            advice=Advice(
                "Pass its stored values, {}, and create the sparse array in the function.",
                (owner.sparse.expressions(x).values,),
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

    def call_with(self, call: autodiff.Call, values: list[Any]) -> list[Any]:
        """Call the function, set ``call.refill`` to rebuild its result, and return the arrays in it."""
        framework = registry.framework(self.name)
        positional, kwargs = fill(call.structure, iter(values))
        args = (*call.own, *positional)
        if framework.streams.has_streams and self.options.stream:
            device = framework.devices.device_of(next(filter(framework.owns, values)))
            result = Surroundings(framework, device=device, own_stream=True).call(self.fn, args, kwargs)
        else:
            result = self.fn(*args, **kwargs)
        leaves, structure = flatten(result)
        arrays = []
        for i, leaf in enumerate(leaves):
            x = np.asarray(leaf) if issubclass(type(leaf), np.generic) and is_array(leaf) else leaf
            if kind_of(x) is ARRAY:
                self._check_result(x)
                if not framework.owns(x):
                    with blame_result_of(self.label):
                        x = convert_memory(x, self.name)
                arrays.append(x)
                leaves[i] = _HOLE
        call.refill = lambda arrays: fill(structure, (next(arrays) if x is _HOLE else x for x in leaves))
        return arrays

    def _check_result(self, x: Any) -> None:
        """Raise `ArrayNotSupportedError` for a sparse result, which has no gradient."""
        owner = registry.find_owner(x)
        if owner is not None and owner.sparse.layout(x):
            raise ArrayNotSupportedError(
                f"A sparse array of {owner.sparse.title} is not a result that can be differentiated.",
                source_type=owner.name,
                reason="the result is a sparse array",
                advice=Advice(
                    "Return its stored values, {}.", (owner.sparse.expressions(x).values,), name="result"
                ),
                place=f"{self.label}(), result",
            )

    def key(self, call: autodiff.Call) -> Any:
        """Return a key for the structure of a call, which is hashable if the values in the structure are."""
        return key_of(call.structure), tuple(leaf.is_argument for leaf in call.leaves)

    def _argument_value(self, x: Any, enter: Change) -> Any:
        """Return the value that the function receives for ``x``, which is not a dense array of the caller.

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


def _open_tracked(x: Any) -> Any:
    """Return the array of a carrier if a graph, tape or tracer tracks the array; otherwise ``x``."""
    if registry.find_owner(x) is None:
        with suppress(NoPlanError):  # it is not a carrier
            array = open_by_carrier(x)
            owner = registry.find_owner(array)
            if owner is not None and owner.autodiff.is_tracked(array):
                return array
    return x


# -- checks of the options -----------------------------------------------------------------------------


def _check(fn: Callable[..., Any], options: DecoratorOptions) -> None:
    name = options.framework
    kind = kind_of_function(fn)
    what = f'@{name}(grad="flow")'
    if name in registry.BUILT_IN:  # need not be imported for this check
        is_differentiable = registry.BUILT_IN[name].is_differentiable
    else:
        is_differentiable = registry.framework(name).autodiff is not autodiff.NOT_DIFFERENTIABLE
    if not is_differentiable:
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


#: For each option, the values that are allowed with ``grad="flow"``, and the fix for other values.
_ALLOWED: dict[str, tuple[tuple[Any, ...], str]] = {
    "output_type": (("input",), "Remove output_type: results are always arrays of the caller's framework."),
    "slice_by_slice": ((False,), "Loop over the planes inside the function."),
    "oom_recovery": ((False, True), "Pass oom_recovery=True: gradients do not flow through split batches."),
    "dtype": ((None,), "Cast inside the function."),
    "dtype_conversion": ((DtypeConversion.NATIVE_OUTPUT,), "Convert inside the function."),
}
