"""Convert the arguments of decorated functions; errors name the argument that cannot be converted."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from arraybridge.advice import Advice
from arraybridge.carriers.non_array_advice import has_method
from arraybridge.carriers.sources import unknown_array_error
from arraybridge.conversion import plan_cache
from arraybridge.conversion.convert import convert_memory
from arraybridge.conversion.plan_cache import plans_by_signature
from arraybridge.decorators.options import DecoratorOptions
from arraybridge.decorators.wrapping import label_of
from arraybridge.device import Device
from arraybridge.errors import ArrayNotSupportedError, MemoryConversionError, SourceMismatchError, warn
from arraybridge.interface import registry
from arraybridge.interface.framework import Framework, NoPlanError
from arraybridge.settings import busy_workers, worker_device
from arraybridge.tracing.trace_log import open_logs
from arraybridge.trees import ARRAY, has_array_inside, kind_of, leaves_of

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
#: A function that converts one array.
Change = Callable[[Any], Any]


class ArrayConverter:
    """The conversion of single arrays by `convert_memory`, or by a cached plan if there is one.

    Attributes:
        target: The framework to convert to.
        source: The framework that arrays must belong to; None for any.
        dtype, grad, device: As for `convert_memory`.
        placement: The device on which the function runs.
        uses_accelerator: Whether the options name an accelerator.
        may_stay: Whether arrays of the target can be passed unchanged if they are on the right device.
    """

    __slots__ = (
        "device",
        "dtype",
        "grad",
        "may_stay",
        "placement",
        "signature",
        "source",
        "target",
        "uses_accelerator",
    )

    def __init__(self, target: str, options: DecoratorOptions) -> None:
        self.target = target
        self.placement = options.placement
        self.dtype = options.dtype
        #: Never "flow", because `FlowingCall` passes "detach" or "error" instead.
        self.grad: Any = options.grad
        self.source = options.required_source
        self.uses_accelerator = options.uses_accelerator
        self.may_stay = options.dtype is None and self.source in (None, target)
        self.device = None if options.device is None else str(options.device)
        signature = plan_cache.signature_of_call(
            self.source, target, dtype=options.dtype, grad=options.grad, device=self.device
        )
        self.signature = target if signature == plan_cache.signature_of_call(None, target) else signature

    def convert(self, x: Any) -> Any:
        """Convert an array. Ignores ``gpu_id``: if the options name an accelerator, use `current` instead."""
        if not open_logs:
            try:
                plan = plans_by_signature[self.signature][type(x)]
            except (KeyError, TypeError):
                pass  # no plan yet, or an unhashable class
            else:
                try:
                    return plan(x)
                except NoPlanError:
                    pass
        return convert_memory(
            x, self.source, self.target, dtype=self.dtype, grad=self.grad, device=self.device
        )

    def current(self) -> Change:
        """Return a function that converts the arrays of one call, to the selected device if there is one."""
        device = None
        if self.uses_accelerator:
            device = self.placement.resolve(registry.framework(self.target))
        elif busy_workers and self.device is None and not registry.metadata_of(self.target).has_only_host:
            device = worker_device.get()
        if device is None:
            return self.convert
        return partial(self._convert_to, registry.framework(self.target), device)

    def _convert_to(self, framework: Framework, device: Device, x: Any) -> Any:
        """Convert an array to a device of the framework."""
        is_there = self.may_stay and framework.owns(x) and framework.devices.device_of(x) == device
        if is_there and not open_logs and not framework.devices.is_scattered(x):
            return x
        return convert_memory(x, self.source, self.target, grad=self.grad, device=device, dtype=self.dtype)


class WarningConverter(ArrayConverter):
    """A conversion that warns if the function would compute with fewer bits than its arguments have.

    Attributes:
        label: The name of the function.
    """

    __slots__ = ("label",)

    def __init__(self, target: str, options: DecoratorOptions, label: str) -> None:
        super().__init__(target, options)
        self.label = label

    def convert(self, x: Any) -> Any:
        """Convert an array, as `ArrayConverter.convert` does."""
        if type(x) is np.ndarray and x.itemsize < 8 and not open_logs:  # NumPy's dtype is read fastest
            try:
                plan = plans_by_signature[self.signature][np.ndarray]
            except (KeyError, TypeError):
                pass  # no plan yet
            else:
                try:
                    return plan(x)
                except NoPlanError:
                    pass
        return self.warn_about(super().convert(x))

    def current(self) -> Change:
        """Return a function that converts the arrays of one call, as `ArrayConverter.current` does."""
        convert = super().current()
        if convert == self.convert:
            return convert

        def convert_and_warn(x: Any) -> Any:
            return self.warn_about(convert(x))

        return convert_and_warn

    def warn_about(self, x: Any) -> Any:
        """Return a converted array; warn, once per process, if the function would compute with fewer bits."""
        if not _functions_with_warning:
            framework = registry.framework(self.target)
            if framework.runtime.narrows(x):
                _functions_with_warning.append(self.label)
                warn(
                    f"{self.label}() received {framework.dtype_name(x)}, but {self.target} computes in 32"
                    f" bits while x64 is off. Write @{self.target}(x64=True) to compute in 64 bits, or"
                    f" @{self.target}(x64=False) to omit this warning, which is shown once.",
                    UserWarning,
                )
        return x


#: The functions for which this process has emitted the warning of `WarningConverter`: at most one.
_functions_with_warning: list[str] = []


def check_array_protocol_only(fn: Callable[..., Any], args: Args, kwargs: Kwargs, skip: int) -> None:
    """Raise if an argument is not an array but has ``__array__``, such as a table of several dtypes.

    Without this check, the function would run with an object that its framework does not accept.
    """
    for place, value in enumerate((*args, *kwargs.values())):
        for leaf in leaves_of(value) if place >= skip else ():
            has_protocol = has_method(leaf, "__array__") and not isinstance(leaf, np.generic)
            if has_protocol and kind_of(leaf) is not ARRAY:
                error = unknown_array_error(leaf)
                error.add_call(describe_argument(fn, args, kwargs, place))
                raise error


def check_all_converted(
    fn: Callable[..., Any], args: Args, kwargs: Kwargs, values: list[Any], skip: int, framework: str
) -> None:
    """Raise if an argument still has an unconverted array in an object that is not traversed or rebuilt."""
    for place, value in enumerate(values[skip:], skip):
        for leaf in leaves_of(value):
            remains = kind_of(leaf) is ARRAY and not registry.framework(framework).owns(leaf)
            if not remains and not has_array_inside(leaf):
                continue
            name = type(value if remains else leaf).__qualname__
            error = ArrayNotSupportedError(
                f"Cannot convert arrays inside a {name}, because it is not traversed or cannot be rebuilt.",
                reason=f"{name} is not traversed or cannot be rebuilt",
                advice="Pass its arrays in a tuple or dict, or register the class with"
                " optree.register_pytree_node(..., namespace='arraybridge').",
            )
            error.add_call(describe_argument(fn, args, kwargs, place))
            raise error


def describe_argument(fn: Callable[..., Any], args: Args, kwargs: Kwargs, place: int) -> str:
    """Return the description of an argument for a message, with its name in the signature.

    ``place`` counts positional arguments first, then keyword arguments.
    """
    names: list[str] = []
    with suppress(TypeError, ValueError):  # a callable written in C may have no signature
        for parameter in inspect.signature(fn).parameters.values():
            if parameter.kind is parameter.VAR_POSITIONAL:
                names += [f"*{parameter.name}[{i}]" for i in range(len(args))]
            else:
                names.append(repr(parameter.name))
    names += map(str, range(len(names), len(args)))
    return f"{label_of(fn)}(), argument {[*names[: len(args)], *map(repr, kwargs)][place]}"


def advise_by_options(error: MemoryConversionError, name: str) -> None:
    """Replace the advice of an error with advice to change options of decorator ``name``, if that helps."""
    if error.cast is not None:
        error.advise(error.cast.by_decorator(name))
    elif isinstance(error, SourceMismatchError):
        error.advise(Advice("Remove strict=True to detect the framework automatically."))
