"""Calls of decorated functions: convert the arguments, call the function, restore its result."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Container, Iterable
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from arraybridge.batches import fixed, plain
from arraybridge.carriers.sources import source_of
from arraybridge.conversion import plans, trace
from arraybridge.conversion.convert import convert_memory
from arraybridge.conversion.destination import card_meant
from arraybridge.conversion.plans import by_form
from arraybridge.conversion.trace import open_logs
from arraybridge.errors import (
    Advice,
    ArrayNotSupportedError,
    FrameworkNotInstalledError,
    MemoryConversionError,
    SourceMismatchError,
)
from arraybridge.frameworks import registry
from arraybridge.frameworks.base import Framework
from arraybridge.frameworks.foreign import unknown_array
from arraybridge.functions.dtypes import DtypeConversion
from arraybridge.functions.options import DecoratorOptions
from arraybridge.functions.results import Restoration, ResultConversion
from arraybridge.functions.slices import call_by_planes
from arraybridge.functions.wrap import label_of, name_of, takes_self
from arraybridge.memory.recovery import recovered
from arraybridge.options import busy_workers, worker_device
from arraybridge.timeline.events import device_words
from arraybridge.trees import (
    ARRAY,
    LEAF,
    TREE,
    has_array_inside,
    kind_of,
    kinds,
    leaves_of,
    map_arrays,
)
from arraybridge.types import Device

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
#: A function that converts one array.
Change = Callable[[Any], Any]
#: `DecoratedCall.__call__` as torch.compile leaves it alone, once that was needed.
_untraced: list[Callable[..., Any]] = []


class DecoratedCall:
    """Calls a function. This class converts nothing; its subclasses convert arguments and results.

    Only the function and the options are pickled.

    Attributes:
        fn: the function.
        options: those of its decorator.
        label: the function's name in traces and errors.
        skip: the number of arguments that are never converted: 1 for ``self`` or ``cls``, otherwise 0.
    """

    __slots__ = ("fn", "label", "native_results", "options", "skip")

    #: Types of results that are returned as they are, without a call of `restore_result`.
    native_results: Container[type]

    def __init__(self, fn: Callable[..., Any], options: DecoratorOptions) -> None:
        self.__setstate__((fn, options))

    def __getstate__(self) -> Any:
        return self.fn, self.options

    def __setstate__(self, state: Any) -> None:
        self.fn, self.options = state
        self.label = label_of(self.fn)
        self.skip = 0
        self.native_results = ()
        self.prepare()

    def prepare(self) -> None:
        """Derive from the function and the options what every call needs."""

    # -- a call ------------------------------------------------------------------------------------

    def __call__(self, args: Args, kwargs: Kwargs) -> Any:
        if "torch._dynamo" in sys.modules and sys.modules["torch"].compiler.is_dynamo_compiling():
            # Between two graphs: there arrays that change the framework have memory, and tracers have none.
            if not _untraced:
                torch: Any = registry.framework("torch")
                _untraced.append(torch.untraced(DecoratedCall.__call__))
            return _untraced[0](self, args, kwargs)
        if open_logs:
            return self._recorded(args, kwargs)
        result = self.run(args, kwargs)
        if type(result) in self.native_results:
            return result
        return self.restore_result(result, args, kwargs)

    async def awaited(self, args: Args, kwargs: Kwargs) -> Any:
        """Call a coroutine function."""
        with trace.span("call", self.label, annotate=False) or nullcontext():
            return self.restore_result(await self.run(args, kwargs), args, kwargs)

    def _recorded(self, args: Args, kwargs: Kwargs) -> Any:
        """Call the function while a trace is open."""
        with trace.span("call", self.label) or nullcontext() as span:
            result = self.run(args, kwargs)
            if span is not None:
                span.device = device_words(result)
            return self.restore_result(result, args, kwargs)

    # -- its parts ---------------------------------------------------------------------------------

    def run(self, args: Args, kwargs: Kwargs) -> Any:
        """Return the function's result; with recovery, call it again if memory runs out."""
        return self._recovered(args, kwargs) if self.options.oom_recovery else self.attempt(args, kwargs)

    def attempt(self, args: Args, kwargs: Kwargs) -> Any:
        """Convert the arguments and call the function once."""
        converted, named = self.convert_arguments(args, kwargs)
        return self.call(converted, named)

    def convert_arguments(self, args: Args, kwargs: Kwargs) -> tuple[Iterable[Any], Kwargs]:
        """Return the positional and keyword arguments for the function."""
        return args, kwargs

    def call(self, args: Iterable[Any], kwargs: Kwargs) -> Any:
        """Call the function with converted arguments."""
        return self.fn(*args, **kwargs)

    def restore_result(self, result: Any, args: Args, kwargs: Kwargs) -> Any:
        """Return the result for the caller, given the arguments that the caller passed.

        Raises:
            ValueError: the result breaks the contract.
        """
        restored = self.convert_result(result, args, kwargs)
        contract = self.options.contract
        if contract is not None:
            verdict = contract(restored)
            # A contract that raises by itself need not return anything.
            if verdict is not None and not verdict:
                raise ValueError(f"{self.label}(): the result breaks its contract {name_of(contract)}")
        return restored

    def convert_result(self, result: Any, args: Args, kwargs: Kwargs) -> Any:
        """Return the result with its arrays converted for the caller."""
        return result

    # -- recovery ----------------------------------------------------------------------------------

    def _recovered(self, args: Args, kwargs: Kwargs) -> Any:
        """Attempt again, or in parts, if memory runs out; also in the conversion of arguments."""
        options = self.options
        splits = options.oom_recovery == "split"
        card: Any = card_meant(options.gpu_id) if isinstance(options.gpu_id, int) else None
        if self.skip and splits:
            args = (*map(fixed, args[: self.skip]), *args[self.skip :])  # self is never split
        # By position: keywords cost 0.4 us per call here.
        result = recovered(
            self.attempt,
            (args, kwargs),
            {},
            options.max_retries,
            card,
            None,
            splits,
            options.split_axis,
            options.min_split,
            self.fn,
            True,
        )
        return plain(result) if splits and kinds.get(type(result)) != ARRAY else result


class ConvertingCall(DecoratedCall):
    """Calls a function of one framework with the arrays of any.

    Attributes:
        body: the function, or what calls it plane by plane.
        arguments: converts one array argument.
        results: converts the results if the first argument does not decide about them.
        native_arguments: types of arguments that need no conversion.
        uses_own_stream: whether the function runs on a stream of this thread; None before the first array,
            since the framework is not imported before.
        is_direct: whether ``body`` can be called without selecting a device or a stream.
    """

    __slots__ = (
        "arguments",
        "body",
        "is_direct",
        "native_arguments",
        "restores_dtype",
        "restores_input",
        "results",
        "uses_own_stream",
    )

    def prepare(self) -> None:
        fn = self.fn
        options = self.options
        self.skip = int(takes_self(fn))
        self.body = partial(call_by_planes, fn, self.skip) if options.slice_by_slice else fn
        self.uses_own_stream: bool | None = None
        self.is_direct = False
        self.arguments = ArrayConverter(options.framework, options)
        self.native_arguments: Container[type] = ()
        self.restores_input = options.output_type == "input"
        self.restores_dtype = options.dtype_conversion is DtypeConversion.PRESERVE_INPUT
        target = "numpy" if self.restores_input else options.output_type
        for_results = replace(options, strict=False, dtype=None, device=None, gpu_id=None)
        converter = ArrayConverter(target, for_results)
        self.results = ResultConversion(converter.convert, _dtype_of_results(options))

    def _learn(self, framework: Framework) -> None:
        """Note, at the first array, which types the framework has and whether it has streams."""
        options = self.options
        types = frozenset(framework.fast_path.fast_types() or framework.runtime.array_classes())
        self.uses_own_stream = options.stream and framework.streams.has_queues
        self.is_direct = not self.uses_own_stream and not options.placement.is_named
        if self.arguments.may_stay and not options.placement.is_named:
            self.native_arguments = types
        to_other = options.output_type != options.framework
        if not (to_other or self.restores_dtype or self.results.dtype is not None):
            self.results = ResultConversion(self.results.deliver, None, types)
            if options.contract is None:
                self.native_results = types

    # -- the arguments -----------------------------------------------------------------------------

    def convert_arguments(self, args: Args, kwargs: Kwargs) -> tuple[list[Any], Kwargs]:
        """Return the arguments with their arrays converted; ``self`` and `fixed` values are passed on.

        Raises:
            MemoryConversionError: an array cannot be converted; the message names the argument.
        """
        skip = self.skip
        splits = self.options.oom_recovery == "split"
        convert: Change = self.arguments.convert
        native = self.native_arguments
        if self.arguments.uses_accelerator or busy_workers or open_logs:
            convert = self.arguments.current()
            native = ()
        values: list[Any] = [plain(x) if splits else x for x in args[:skip]] if skip else []
        has_array = has_other = False
        try:
            for value in (*args[skip:], *kwargs.values()) if skip or kwargs else args:
                cls = type(value)
                if cls in native:
                    has_array = True
                    values.append(value)
                elif (kind := kinds.get(cls)) == ARRAY:
                    has_array = True
                    values.append(convert(value))
                elif kind == LEAF:
                    values.append(value)
                else:
                    has_other = True
                    values.append(map_arrays(plain(value) if splits else value, convert))
        except FrameworkNotInstalledError:
            raise  # it is missing for every argument
        except MemoryConversionError as error:
            error.add_call(_argument(self.fn, args, kwargs, len(values)))
            _advise_by_options(error, self.options.framework)
            raise
        if has_other:
            self._check_others(args, kwargs, values, has_array)
        named = {name: values.pop(len(args)) for name in kwargs} if kwargs else kwargs
        return values, named

    def _check_others(self, args: Args, kwargs: Kwargs, values: list[Any], has_array: bool) -> None:
        """Refuse objects that offer ``__array__`` if they are all there is, or with ``strict``."""
        if self.options.strict or not (has_array or first_array(values[self.skip :]) is not None):
            _refuse_tables(self.fn, args, kwargs, self.skip)
        if self.options.strict:
            _refuse_unconverted(self.fn, args, kwargs, values, self.skip, self.options.framework)

    # -- the function ------------------------------------------------------------------------------

    def call(self, args: Any, kwargs: Kwargs) -> Any:
        """Call the function where its arguments are; without arrays, on the device of the decorator."""
        if self.is_direct:
            return self.body(*args, **kwargs) if kwargs else self.body(*args)
        first = first_array((*args[self.skip :], *kwargs.values()))
        if first is None:
            return self._call_without_arrays(args, kwargs)
        if self.uses_own_stream is None:
            self._learn(registry.framework(self.options.framework))
        if self.uses_own_stream:
            framework = registry.framework(self.options.framework)
            return on_own_stream(framework, first, self.body, args, kwargs)
        return self.body(*args, **kwargs)

    def _call_without_arrays(self, args: Any, kwargs: Kwargs) -> Any:
        """Call the function with its device selected, on which it creates arrays."""
        placement = self.options.placement
        if placement.is_named:
            framework = registry.framework(self.options.framework)
            device = placement.resolve(framework)
            if device is not None:
                with framework.devices.selected(device):
                    return self.body(*args, **kwargs)
        return self.body(*args, **kwargs)

    # -- the result --------------------------------------------------------------------------------

    def convert_result(self, result: Any, args: Args, kwargs: Kwargs) -> Any:
        """Return the result with its arrays converted, as the options and the first argument say.

        Raises:
            MemoryConversionError: an array cannot be converted; the message names its place in the result.
        """
        conversion = self.results
        try:
            if self.restores_input or self.restores_dtype:
                skip = self.skip
                first = first_array((*args[skip:], *kwargs.values()) if skip or kwargs else args)
                conversion = self._conversion_for(first)
            elif open_logs:  # which record arrays that stay as they are, too
                conversion = ResultConversion(conversion.deliver, conversion.dtype)
            return conversion.tree(result)
        except FrameworkNotInstalledError:
            raise
        except MemoryConversionError as error:
            error.add_call(f"{self.label}(), result")
            if error.cast is not None:
                error.advise(error.cast.in_function())
            raise

    def _conversion_for(self, first: Any) -> ResultConversion:
        """Return the conversion of results of a call with this first array; None if it has none."""
        deliver = self.results.deliver
        dtype = self.results.dtype
        if self.restores_input and type(first) is not np.ndarray:
            deliver = _unchanged if first is None else Restoration(first, self.options.grad).array
        if self.restores_dtype and first is not None:
            framework, array = source_of(first)
            dtype = framework.dtype_name(array)
        return ResultConversion(deliver, dtype)


def _dtype_of_results(options: DecoratorOptions) -> str | None:
    conversion = options.dtype_conversion
    return None if conversion.numpy_dtype is None else str(conversion.value)


def _unchanged(x: Any) -> Any:
    return x


class ArrayConverter:
    """Converts single arrays as `convert_memory` does with a decorator's options, faster if that is planned.

    Attributes:
        target: the framework to convert to.
        source: the framework that arrays must be of; None for any.
        dtype, grad, device: as for `convert_memory`.
        placement: where the function runs.
        uses_accelerator: whether the options name an accelerator.
        may_stay: whether arrays of the target need no conversion, apart from their device.
    """

    __slots__ = (
        "device",
        "dtype",
        "form",
        "grad",
        "may_stay",
        "placement",
        "source",
        "target",
        "uses_accelerator",
    )

    def __init__(self, target: str, options: DecoratorOptions) -> None:
        self.target = target
        self.placement = options.placement
        self.dtype = options.dtype
        #: Never "flow": `Flow` replaces it.
        self.grad: Any = options.grad
        self.source = options.required_source
        self.uses_accelerator = options.uses_accelerator
        self.may_stay = options.dtype is None and self.source in (None, target)
        self.device = None if options.device is None else str(options.device)
        form = plans.form_of(self.source, target, dtype=options.dtype, grad=options.grad, device=self.device)
        self.form = target if form == plans.form_of(None, target) else form

    def convert(self, x: Any) -> Any:
        """Return an array converted: to the device of the options if that is a CPU, otherwise to any."""
        if not open_logs:
            try:
                return by_form[self.form][type(x)](x)
            except plans.declined:
                pass
        return convert_memory(
            x, self.source, self.target, dtype=self.dtype, grad=self.grad, device=self.device
        )

    def current(self) -> Change:
        """Return the conversion for one call, to the accelerator or the worker on whose device it runs."""
        device = self._current_device()
        if device is None:
            return self.convert
        return _DeviceConverter(self, registry.framework(self.target), device).convert

    def _current_device(self) -> Device | None:
        if self.uses_accelerator:
            return self.placement.resolve(registry.framework(self.target))
        if busy_workers and self.device is None and not registry.facts(self.target).has_only_host:
            return worker_device.get()
        return None


class _DeviceConverter:
    """Converts single arrays to one device of a framework."""

    __slots__ = ("converter", "device", "framework", "may_stay")

    def __init__(self, converter: ArrayConverter, framework: Framework, device: Device) -> None:
        self.converter = converter
        self.framework = framework
        self.device = device
        self.may_stay = converter.may_stay and not open_logs

    def convert(self, x: Any) -> Any:
        framework = self.framework
        is_there = self.may_stay and framework.owns(x) and framework.devices.device_of(x) == self.device
        if is_there and not framework.devices.is_scattered(x):
            return x
        converter = self.converter
        return convert_memory(
            x,
            converter.source,
            converter.target,
            grad=converter.grad,
            device=self.device,
            dtype=converter.dtype,
        )


# -- helpers -------------------------------------------------------------------------------------------


def first_array(values: Iterable[Any]) -> Any:
    """The first array among these values, in containers too; None where there is none."""
    for value in values:
        kind = kinds.get(type(value)) or kind_of(value)
        if kind == ARRAY:
            return value
        if kind == TREE:  # of most lists the first item is an array, and no other has to be looked at
            array = first_array(value if type(value) is list else leaves_of(value))
            if array is not None:
                return array
    return None


def _refuse_tables(fn: Callable[..., Any], args: Args, kwargs: Kwargs, skip: int) -> None:
    """Refuse what could be made an array and is none, as a table of pandas.

    The function was written for arrays, and would be run on what its framework does not know.
    """
    for place, value in enumerate((*args, *kwargs.values())):
        for leaf in leaves_of(value) if place >= skip else ():
            offers_one = hasattr(type(leaf), "__array__") and not isinstance(leaf, np.generic)
            if offers_one and kind_of(leaf) != ARRAY:
                error = unknown_array(leaf)
                error.add_call(_argument(fn, args, kwargs, place))
                raise error


def _refuse_unconverted(
    fn: Callable[..., Any], args: Args, kwargs: Kwargs, values: list[Any], skip: int, framework: str
) -> None:
    """Raise if a converted argument has an array in a container that is not traversed or rebuilt."""
    for place, value in enumerate(values[skip:], skip):
        for leaf in leaves_of(value):
            remains = kind_of(leaf) == ARRAY and not registry.framework(framework).owns(leaf)
            if not remains and not has_array_inside(leaf):
                continue
            name = type(value if remains else leaf).__qualname__
            error = ArrayNotSupportedError(
                f"Cannot convert arrays inside a {name}. Containers of this class are not traversed.",
                reason=f"{name} is not traversed",
                advice="Pass its arrays in a tuple or dict, or register the class with"
                " optree.register_pytree_node(..., namespace='arraybridge').",
            )
            error.add_call(_argument(fn, args, kwargs, place))
            raise error


def _argument(fn: Callable[..., Any], args: Args, kwargs: Kwargs, place: int) -> str:
    """An argument as the function names it, for a message; keywords have the places after the others."""
    names: list[str] = []
    with suppress(TypeError, ValueError):  # a callable written in C may have no signature
        for parameter in inspect.signature(fn).parameters.values():
            name, variadic = parameter.name, parameter.kind is parameter.VAR_POSITIONAL
            names += [f"*{name}[{i}]" for i in range(len(args))] if variadic else [repr(name)]
    names += map(str, range(len(names), len(args)))
    return f"{label_of(fn)}(), argument {[*names[: len(args)], *map(repr, kwargs)][place]}"


def _advise_by_options(error: MemoryConversionError, name: str) -> None:
    """Advise which option of the decorator ``name`` lets it convert the argument."""
    if error.cast is not None:
        error.advise(error.cast.by_decorator(name))
    elif isinstance(error, SourceMismatchError):
        error.advise(Advice("Leave strict=True out to have it detected."))


def on_own_stream(framework: Framework, array: Any, fn: Callable[..., Any], args: Any, kwargs: Kwargs) -> Any:
    """Call it on this thread's own stream, where the array is: after what it waits for, before its caller.

    What it makes can be read and freed on the stream of the caller. The arguments live until that waits.
    """
    with framework.streams.stream(framework.devices.device_of(array)):
        result = fn(*args, **kwargs)
    return map_arrays(result, lambda x: framework.streams.take_over(x) if framework.owns(x) else x)
