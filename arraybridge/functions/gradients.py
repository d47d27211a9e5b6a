"""``grad="flow"``: a function of one framework, differentiated by callers of others in their own way."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from arraybridge.conversion.convert import convert_memory
from arraybridge.conversion.decide import find_source
from arraybridge.errors import GradientError, MemoryConversionError
from arraybridge.frameworks import registry
from arraybridge.frameworks.autodiff import NOT_DIFFERENTIABLE, Call, picked
from arraybridge.frameworks.base import Framework
from arraybridge.frameworks.registry import BUILT_IN
from arraybridge.functions import calls
from arraybridge.functions.dtypes import DtypeConversion
from arraybridge.functions.operation import Operation
from arraybridge.functions.options import changed
from arraybridge.functions.wrap import kind_of_function, label_of, takes_self
from arraybridge.trees import ARRAY, filled, flattened, is_array, key_of, kind_of, kinds, prefix, source_of


def _owner(x: Any) -> Framework | None:
    """The framework of an array; None for what is no array, or one without derivatives."""
    owner = registry.find_owner(x) if _is_array(x) else None
    return None if owner is None or owner.autodiff is NOT_DIFFERENTIABLE else owner


def _is_array(x: Any) -> bool:
    return (kinds.get(type(x)) or kind_of(x)) == ARRAY


#: Where an array was.
_HOLE = object()


class Flow:
    """Runs a function of one framework for callers of others. It holds no framework's objects."""

    def __init__(self, fn: Callable[..., Any], options: SimpleNamespace) -> None:
        _check(fn, options)
        self.fn, self.options, self.name, self.label = fn, options, options.framework, label_of(fn)
        self.skip = int(takes_self(fn))
        bare = changed(options, oom_recovery=False, contract=None, grad="detach")
        #: Where nobody differentiates, and where its own framework does.
        self.ordinary = calls.composed(fn, changed(bare, output_type="input"))
        self.inside = calls.composed(fn, changed(bare, grad="error", output_type=options.framework))
        #: What brings one array to where the function runs.
        _, self.entering = calls.entering(changed(bare, declared=None))
        #: What the callee has compiled of it.
        self.programs: dict[Any, Any] = {}

    def called(self, args: calls.Args, kwargs: calls.Kwargs) -> Any:
        own, values = args[: self.skip], [*args[self.skip :], *kwargs.values()]
        leaves, structure = flattened(values)
        owners = list(map(_owner, leaves))
        tracked = [
            owner is not None and owner.autodiff.follows(x) for x, owner in zip(leaves, owners, strict=True)
        ]
        followed = {owner.name for owner in picked(owners, tracked)}
        if followed <= {self.name}:
            run, give_back = self.inside if followed else self.ordinary
            return give_back(run(args, kwargs), args, kwargs)
        if len(followed) > 1:
            names = " and ".join(sorted(followed))
            raise GradientError(
                f"{self.label}(): arrays of {names} are being differentiated in one call, and a backward pass"
                " goes through one framework; pass those of the others without their graph: x.detach() in"
                " torch, tf.stop_gradient(x) in TensorFlow, a value from outside of the transform in JAX",
                target_type=self.name,
                reason=f"differentiated arrays of {names}",
            )
        caller, callee = registry.framework(followed.pop()), registry.framework(self.name)
        enter = self.entering()
        # The caller's arrays are arguments, integers too; those of others are constants.
        slots = [owner is caller for owner in owners]
        arrays = picked(leaves, slots)
        active = picked(
            [t and caller.autodiff.is_smooth(x) for x, t in zip(leaves, tracked, strict=True)], slots
        )
        try:
            if self.options.strict:
                for x in filter(_is_array, leaves):
                    find_source(x, self.options.declared, self.name)
            beside = [
                None if slot else self._constant(x, enter) if _is_array(x) else callee.autodiff.beside(x)
                for x, slot in zip(leaves, slots, strict=True)
            ]
            call = Call(self, own, structure, tuple(kwargs), beside, slots)
            constants = list(filter(_is_array, beside))
            operation = Operation(call, callee, caller, enter, active, self.label, constants)
            results = caller.autodiff.apply(operation, arrays)
        except MemoryConversionError as error:
            if not str(error).startswith(f"{self.label}()"):
                prefix(error, f"{self.label}()")
            raise
        return call.refill(iter(results))

    def run(self, call: Call, leaves: list[Any]) -> list[Any]:
        """Call the function; its arrays, as ones of its framework. The call is told what they lay in."""
        framework = registry.framework(self.name)
        values = filled(call.structure, iter(leaves))
        count = len(values) - len(call.names)
        args, kwargs = (*call.own, *values[:count]), dict(zip(call.names, values[count:], strict=True))
        if framework.streams.has_queues and self.options.stream:
            result = calls.on_own_stream(
                self.name, next(filter(framework.owns, leaves)), self.fn, args, kwargs
            )
        else:
            result = self.fn(*args, **kwargs)
        leaves, structure = flattened(result)
        arrays = []
        for i, leaf in enumerate(leaves):
            x = np.asarray(leaf) if isinstance(leaf, np.generic) and is_array(leaf) else leaf
            if _is_array(x):
                arrays.append(x if framework.owns(x) else convert_memory(x, self.name))
                leaves[i] = _HOLE
        call.refill = lambda arrays: filled(structure, (next(arrays) if x is _HOLE else x for x in leaves))
        return arrays

    def key(self, call: Call) -> Any:
        """What tells a call from those of another structure, to be hashed where all that it knows can be."""
        return key_of(call.structure), call.names, tuple(call.slots)

    def _constant(self, x: Any, enter: calls.Change) -> Any:
        """An array of the callee that nobody writes to before the backward."""
        owner, data = source_of(x)
        if owner.mutable and owner.name != self.name:
            x = owner.copy(owner.detach(data) if owner.requires_grad(data) else data)
        callee = registry.framework(self.name).autodiff
        x = callee.prepare(enter(x))
        callee.admit(x, self.label)
        return x


def flowing(fn: Callable[..., Any], options: SimpleNamespace) -> tuple[calls.Run, calls.GiveBack]:
    """A function of one framework that gradients of others flow through: what runs it, and checks its result.

    Raises:
        ValueError: no gradient goes through it; saying what to do instead.
    """
    _, check = calls.composed(fn, changed(options, converts=False))
    return calls.recovering(Flow(fn, options).called, int(takes_self(fn)), options), check


# -- what is refused -------------------------------------------------------------------------------------


def _check(fn: Callable[..., Any], options: SimpleNamespace) -> None:
    name, kind = options.framework, kind_of_function(fn)
    what = f'@{name}(grad="flow")'
    if name not in _DIFFERENTIABLE and (
        name in BUILT_IN or registry.framework(name).autodiff is NOT_DIFFERENTIABLE
    ):
        raise ValueError(f"{what}: {name} has no derivatives; write the function in torch, jax or tensorflow")
    if kind != "function":
        raise ValueError(f"{what} takes plain functions, and this is a {kind}; return all results at once")
    for option, (allowed, instead) in _ALLOWED.items():
        value = getattr(options, option)
        if value not in allowed:
            raise ValueError(f"{what} cannot be had with {option}={value!r}; {instead}")


#: Those that come with arraybridge, known without importing them.
_DIFFERENTIABLE = ("torch", "jax", "tensorflow", "mlx", "paddle")

#: What options may be where gradients flow; and what to do instead of anything else.
_ALLOWED: dict[str, tuple[tuple[Any, ...], str]] = {
    "output_type": (("input",), "results come back in the caller's framework; leave it out"),
    "slice_by_slice": ((False,), "loop over the planes inside of the function"),
    "oom_recovery": ((False, True), "no gradient goes through parts; pass oom_recovery=True"),
    "dtype": ((None,), "cast inside of the function"),
    "dtype_conversion": ((DtypeConversion.NATIVE_OUTPUT,), "convert inside of the function"),
}
