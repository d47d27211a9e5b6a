"""``grad="flow"``: a function of one framework, differentiated by callers of others in their own way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from arraybridge.conversion import trace
from arraybridge.conversion.convert import convert_memory
from arraybridge.errors import GradientError, MemoryConversionError
from arraybridge.frameworks import registry
from arraybridge.frameworks.autodiff import NOT_DIFFERENTIABLE, Call, merged, picked
from arraybridge.frameworks.base import Framework
from arraybridge.frameworks.facts import BUILT_IN
from arraybridge.functions.arguments import check_source
from arraybridge.functions.calls import DecoratedCall, handed_over, in_framework
from arraybridge.functions.compiling import being_compiled, untraced
from arraybridge.functions.dtypes import DtypeConversion
from arraybridge.functions.operation import Operation
from arraybridge.functions.options import DecoratorOptions
from arraybridge.functions.results import check_result
from arraybridge.functions.wrap import kind_of_function, label_of, takes_self
from arraybridge.memory.recovery import run_with_oom_recovery
from arraybridge.placement import busy_workers, card_meant, worker_device
from arraybridge.timeline.events import device_words
from arraybridge.trees import ARRAY, Structure, flattened, is_array, kind_of, kinds, prefix, source_of
from arraybridge.types import Cache

__all__ = ["flow"]

#: Type of an array → its framework; None for what is no array, or one without derivatives.
_owners: Cache[type, Framework | None] = Cache()


def _owner(x: Any) -> Framework | None:
    cls = type(x)
    try:
        return _owners[cls]
    except KeyError:
        owner = registry.find_owner(x) if _is_array(x) else None
        return _owners.keep(cls, None if owner is None or owner.autodiff is NOT_DIFFERENTIABLE else owner)


def _is_array(x: Any) -> bool:
    return (kinds.get(type(x)) or kind_of(x)) == ARRAY


class Outline:
    """A container and what is no array in it, to be filled with arrays again."""

    def __init__(self, structure: Structure, leaves: list[Any]) -> None:
        self.structure, self.leaves = structure, leaves

    def filled(self, arrays: Iterator[Any]) -> Any:
        return self.structure.filled(next(arrays) if x is _HOLE else x for x in self.leaves)


#: Where an array was.
_HOLE = object()


class Flow:
    """Runs a function of one framework. It holds no framework's objects, so that it pickles."""

    def __init__(self, fn: Callable[..., Any], options: DecoratorOptions) -> None:
        self.fn, self.options, self.name, self.label = fn, options, options.framework, label_of(fn)
        self.skip = int(takes_self(fn))
        #: Where nobody differentiates, and where its own framework does.
        self.ordinary = DecoratedCall(in_framework, fn, options._replace(grad="detach", output_type="input"))
        inside = options._replace(grad="error", output_type=options.framework)
        self.inside = DecoratedCall(in_framework, fn, inside)
        #: What the callee has compiled of it.
        self.programs: dict[Any, Any] = {}

    def __getstate__(self) -> Any:
        return self.fn, self.options

    def __setstate__(self, state: Any) -> None:
        vars(self).update(vars(Flow(*state)))

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if being_compiled():  # torch.compile breaks its graph here
            return untraced(self._called, args, kwargs)
        return self._called(args, kwargs)

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        own, values = args[: self.skip], [*args[self.skip :], *kwargs.values()]
        leaves, structure = flattened(values)
        owners = list(map(_owner, leaves))
        tracked = [
            owner is not None and owner.autodiff.follows(x) for x, owner in zip(leaves, owners, strict=True)
        ]
        followed = {owner.name for owner in picked(owners, tracked)}
        if not followed:
            return self.ordinary(args, kwargs)
        if followed == {self.name}:
            return self.inside(args, kwargs)
        if len(followed) > 1:
            raise self._two(followed)
        caller = registry.framework(followed.pop())
        # The caller's arrays are arguments, integers too; those of others are constants.
        slots = [owner is caller for owner in owners]
        call = Call(self, own, structure, tuple(kwargs), leaves, slots)
        active = [t and caller.autodiff.is_smooth(x) for x, t in zip(leaves, tracked, strict=True)]
        active = picked(active, slots)
        step = trace.span("call", self.label) if trace.open_logs else None
        if step is None:
            return self._recovering(call, leaves, caller, active)
        with step:
            result = self._recovering(call, leaves, caller, active)
            step.device = device_words(result)
            return result

    def _recovering(self, *call: Any) -> Any:
        options, gpu_id = self.options, card_meant(self.options.gpu_id)
        if options.oom_recovery is False:
            return self._differentiated(*call)
        card = None if gpu_id == "auto" else gpu_id
        return run_with_oom_recovery(
            self._differentiated, *call, max_retries=options.max_retries, gpu_id=card
        )

    def _differentiated(self, call: Call, leaves: list[Any], caller: Framework, active: list[bool]) -> Any:
        callee = registry.framework(self.name)
        enter, beside = _Entry(self.options), [_is_array(x) for x in call.leaves]
        arrays = picked(leaves, call.slots)
        try:
            if self.options.strict:
                for x in filter(_is_array, leaves):
                    check_source(x, self.options)
            constants = [_constant(x, enter) for x in picked(call.leaves, beside)]
            for x in constants:
                callee.autodiff.admit(x, self.label)
            if constants:
                call = call.with_leaves(merged(call.leaves, beside, constants))
            operation = Operation(call, callee, caller, enter, active, self.label, constants)
            results = caller.autodiff.apply(operation, arrays)
        except MemoryConversionError as error:
            if not str(error).startswith(f"{self.label}()"):
                prefix(error, f"{self.label}()")
            raise
        result = operation.outline.filled(iter(results))
        return check_result(self.options.contract, result, self.label)

    def run(self, call: Call, leaves: list[Any]) -> tuple[list[Any], Outline]:
        """Call the function; its arrays, as ones of its framework, and what they lay in."""
        framework = registry.framework(self.name)
        values = call.structure.filled(iter(leaves))
        count = len(values) - len(call.names)
        args, kwargs = (*call.own, *values[:count]), dict(zip(call.names, values[count:], strict=True))
        if framework.streams.has_queues and self.options.stream:
            place = next(framework.device_of(x) for x in leaves if framework.owns(x))
            with framework.streams.stream(place):
                result = self.fn(*args, **kwargs)
            result = handed_over(result, framework)
        else:
            result = self.fn(*args, **kwargs)
        leaves, structure = flattened(result)
        arrays = []
        for i, leaf in enumerate(leaves):
            x = np.asarray(leaf) if isinstance(leaf, np.generic) and is_array(leaf) else leaf
            if _is_array(x):
                arrays.append(x if framework.owns(x) else convert_memory(x, self.name))
                leaves[i] = _HOLE
        return arrays, Outline(structure, leaves)

    def _two(self, followed: set[str]) -> GradientError:
        names = " and ".join(sorted(followed))
        return GradientError(
            f"{self.label}(): arrays of {names} are being differentiated in one call, and a backward pass"
            " goes through one framework; pass those of the others without their graph: x.detach() in torch,"
            " tf.stop_gradient(x) in TensorFlow, a value from outside of the transformation in JAX",
            target_type=self.name,
            reason=f"differentiated arrays of {names}",
        )


class _Entry:
    """Converts arrays to the framework, and the place, in which a function runs."""

    def __init__(self, options: DecoratorOptions) -> None:
        self.name = options.framework
        self.gpu_id: Any = card_meant(options.gpu_id)
        self.device = options.device
        if busy_workers and self.gpu_id is None and self.device is None:
            # Of a worker of `device_map`, which may have ended when the backward runs.
            self.device = worker_device.get()

    def __call__(self, x: Any) -> Any:
        x = convert_memory(x, self.name, gpu_id=self.gpu_id, grad="detach", device=self.device)
        if self.gpu_id == "auto":  # all arrays go where the first one went
            self.gpu_id, self.device = None, registry.framework(self.name).device_of(x)
        return x


def _constant(x: Any, enter: _Entry) -> Any:
    """An array of the callee that nobody writes to before the backward."""
    owner, data = source_of(x)
    if owner.mutable and owner.name != enter.name:
        x = owner.copy(owner.detach(data) if owner.requires_grad(data) else data)
    return registry.framework(enter.name).autodiff.prepare(enter(x))


# -- the decorator -------------------------------------------------------------------------------------


def flow(fn: Callable[..., Any], options: DecoratorOptions) -> Flow:
    """What a wrapper calls instead of a function that gradients flow through.

    Raises:
        ValueError: no gradient goes through it; saying what to do instead.
    """
    name, kind = options.framework, kind_of_function(fn)
    what = f'@{name}(grad="flow")'
    if name not in _DIFFERENTIABLE and (
        name in BUILT_IN or registry.framework(name).autodiff is NOT_DIFFERENTIABLE
    ):
        raise ValueError(f"{what}: {name} has no derivatives; write the function in torch, jax or tensorflow")
    if kind != "function":
        raise ValueError(f"{what} takes plain functions, and this is a {kind}; return all results at once")
    if options.output_type != "input":
        raise ValueError(
            f"{what} gives results back in the caller's framework; leave"
            f" output_type={options.output_type!r} out"
        )
    for option, is_set, instead in (
        ("slice_by_slice=True", options.slice_by_slice, "loop over the planes inside of the function"),
        ('oom_recovery="split"', options.oom_recovery == "split", "pass oom_recovery=True"),
        (f"dtype={options.dtype!r}", options.dtype is not None, "cast inside of the function"),
        (
            f"dtype_conversion={options.dtype_conversion}",
            options.dtype_conversion is not DtypeConversion.NATIVE_OUTPUT,
            "convert inside of the function, where it is differentiated",
        ),
    ):
        if is_set:
            raise ValueError(f"{what} cannot be had with {option}: no gradient goes through it; {instead}")
    return Flow(fn, options)


#: Those that come with arraybridge, known without importing them.
_DIFFERENTIABLE = ("torch", "jax", "tensorflow", "mlx", "paddle")
