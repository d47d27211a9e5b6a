"""Calls of decorated functions, with converted arguments and results."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from arraybridge.batches import fixed, plain
from arraybridge.carriers.sources import source_of
from arraybridge.conversion import plan_cache
from arraybridge.conversion.convert import convert_memory
from arraybridge.conversion.device_resolution import gpu_index_of
from arraybridge.conversion.plan_cache import plans_by_signature
from arraybridge.decorators.dtype_conversion import DtypeConversion
from arraybridge.decorators.options import DecoratorOptions
from arraybridge.decorators.results import Restoration, ResultConversion
from arraybridge.decorators.slices import call_by_planes
from arraybridge.decorators.wrapping import SelfArgument, label_of, name_of
from arraybridge.errors import (
    Advice,
    ArrayNotSupportedError,
    FrameworkNotInstalledError,
    MemoryConversionError,
    SourceMismatchError,
    note_on,
)
from arraybridge.frameworks import registry
from arraybridge.frameworks.base import Framework, take_over
from arraybridge.frameworks.graph_breaks import NO_FULL_GRAPH, break_graph
from arraybridge.frameworks.non_array_advice import has_method
from arraybridge.frameworks.protocol_producers import unknown_array_error
from arraybridge.memory.oom_recovery import recovered
from arraybridge.settings import busy_workers, worker_device
from arraybridge.tracing import trace_log
from arraybridge.tracing.events import device_text
from arraybridge.tracing.trace_log import open_logs
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
#: `DecoratedCall.__call__` for torch.compile, which runs it outside its graphs; created at the first use.
_untraced: list[Callable[..., Any]] = []


class DecoratedCall:
    """A decorated function that converts nothing. Subclasses convert arguments and results.

    Only the function and the options are pickled.

    Attributes:
        fn: The function.
        options: The options of its decorator.
        label: The name of the function in traces and errors.
        self_argument: Recognizes ``self`` and ``cls``, which are never converted; None if there is none.
    """

    __slots__ = ("fn", "label", "native_results", "options", "recovers", "self_argument", "splits")

    fn: Callable[..., Any]
    options: DecoratorOptions
    #: Types of results that are returned unchanged, without a call to `restore_result`.
    native_results: Container[type]

    def __init__(self, fn: Callable[..., Any], options: DecoratorOptions) -> None:
        self.__setstate__((fn, options))

    def __getstate__(self) -> Any:
        return self.fn, self.options

    def __setstate__(self, state: Any) -> None:
        self.fn, self.options = state
        self.label = label_of(self.fn)
        self.self_argument = SelfArgument.of(self.fn)
        self.recovers = bool(self.options.oom_recovery)
        self.splits = self.options.splits
        self.native_results = ()
        self.prepare()

    def prepare(self) -> None:
        """Set the attributes that depend on the function and the options."""

    # -- a call ------------------------------------------------------------------------------------

    def __call__(self, args: Args, kwargs: Kwargs) -> Any:
        """Call the function and return its result for the caller."""
        if "torch._dynamo" in sys.modules and sys.modules["torch"].compiler.is_dynamo_compiling():
            # torch.compile cannot trace conversions, since traced tensors have no memory.
            if not _untraced:
                break_graph()
                torch: Any = registry.framework("torch")
                _untraced.append(torch.untraced(DecoratedCall.__call__, NO_FULL_GRAPH))
            return _untraced[0](self, args, kwargs)
        if not open_logs:
            # The body of `run`, inlined.
            result = self._recovered(args, kwargs) if self.recovers else self.attempt(args, kwargs)
            if type(result) in self.native_results:
                return result
            return self.restore_result(result, args, kwargs)
        with trace_log.span("call", self.label) or nullcontext() as span:
            result = self.run(args, kwargs)
            if span is not None:
                span.device = device_text(result)
            return self.restore_result(result, args, kwargs)

    async def awaited(self, args: Args, kwargs: Kwargs) -> Any:
        """Call a coroutine function, and return its awaited result for the caller."""
        with trace_log.span("call", self.label, annotate=False) or nullcontext():
            return self.restore_result(await self.run(args, kwargs), args, kwargs)

    # -- steps of a call ---------------------------------------------------------------------------

    def run(self, args: Args, kwargs: Kwargs) -> Any:
        """Return the result of the function. With recovery, call it again if memory runs out."""
        return self._recovered(args, kwargs) if self.recovers else self.attempt(args, kwargs)

    def attempt(self, args: Args, kwargs: Kwargs) -> Any:
        """Call the function once, with the arguments of the caller."""
        return self.fn(*args, **kwargs)

    def restore_result(self, result: Any, args: Args, kwargs: Kwargs) -> Any:
        """Return the result for the caller, given the arguments that the caller passed.

        Raises:
            ValueError: If the result breaks the contract.
        """
        return result if self.options.contract is None else self.checked(result, self.options.contract)

    def checked(self, result: Any, contract: Callable[[Any], Any]) -> Any:
        """Return a result that satisfies the contract.

        Raises:
            ValueError: If it breaks the contract.
        """
        verdict = contract(result)
        # None is accepted, since contracts that raise, such as assertions, return nothing.
        if verdict is not None and not verdict:
            raise ValueError(
                f"{self.label}(): The result breaks its contract {name_of(contract)}, which returned a false"
                " value. Correct the function or its contract."
            )
        return result

    def count_own(self, args: Sequence[Any]) -> int:
        """Return the number of arguments that are never converted: 1 for ``self`` or ``cls``, otherwise 0."""
        return 0 if self.self_argument is None else self.self_argument.count(args)

    # -- recovery ----------------------------------------------------------------------------------

    def _recovered(self, args: Args, kwargs: Kwargs) -> Any:
        """Convert the arguments and call the function; if memory runs out, try again or continue in parts."""
        options = self.options
        splits = self.splits
        gpu: Any = None
        if options.gpu_id is not None and options.gpu_id != "auto":
            gpu = gpu_index_of(options.gpu_id)
        if splits and self.count_own(args):
            args = (fixed(args[0]), *args[1:])  # self is never split
        # Positional arguments, since keywords cost 0.4 µs per call here.
        result = recovered(
            self.attempt,
            (args, kwargs),
            {},
            options.max_retries,
            gpu,
            None,
            splits,
            options.split_axis,
            options.min_split,
            self.fn,
            True,
        )
        return plain(result) if splits and kinds.get(type(result)) is not ARRAY else result


class ConvertingCall(DecoratedCall):
    """A decorated function of one framework that accepts arrays of any framework.

    Attributes:
        body: The function, or `call_by_planes` of it.
        arguments: The conversion of array arguments.
        results: The conversion of results that does not depend on the first argument.
        native_arguments: Types of arguments that need no conversion.
        uses_own_stream: Whether the function runs on a separate stream of this thread. None before the first
            array, because the framework is not imported before.
        is_direct: Whether calls without arrays can call ``body`` without selecting a device or a stream.
        direct_types: Types of the first argument for which ``body`` can also be called directly, because no
            device is selected for calls with arrays.
    """

    __slots__ = (
        "arguments",
        "body",
        "changes_dtype",
        "convert_argument",
        "direct_types",
        "is_direct",
        "native_arguments",
        "placement",
        "restores_dtype",
        "restores_input",
        "results",
        "uses_accelerator",
        "uses_own_stream",
    )

    def prepare(self) -> None:
        """Set the attributes that do not depend on the imported framework."""
        fn = self.fn
        options = self.options
        self.body = partial(call_by_planes, fn, self.self_argument) if options.slice_by_slice else fn
        self.uses_own_stream: bool | None = None
        self.is_direct = not options.placement.is_named
        self.placement = options.placement
        self.uses_accelerator = options.uses_accelerator
        self.direct_types: Container[type] = ()
        self.arguments = ArrayConverter(options.framework, options)
        self.convert_argument: Change = self.arguments.convert
        self.native_arguments: Container[type] = ()
        self.restores_input = options.output_type == "input"
        self.restores_dtype = options.dtype_conversion is DtypeConversion.PRESERVE_INPUT
        target = "numpy" if self.restores_input else options.output_type
        for_results = replace(options, strict=False, dtype=None, device=None, gpu_id=None)
        converter = ArrayConverter(target, for_results)
        self.results = ResultConversion(converter.convert, _dtype_of_results(options))
        self.changes_dtype = self.restores_dtype or self.results.dtype is not None

    def _configure_for(self, framework: Framework) -> None:
        """Set the attributes that depend on the framework, at the first call with an array."""
        options = self.options
        types = frozenset(framework.fast_path.fast_types() or framework.runtime.array_classes())
        self.uses_own_stream = options.stream and framework.streams.has_streams
        self.is_direct = not self.uses_own_stream and not self.placement.is_named
        if not self.uses_own_stream and self.self_argument is None:
            self.direct_types = types
        if self.arguments.may_stay and not self.placement.is_named:
            self.native_arguments = types
        to_other = options.output_type != options.framework
        if not (to_other or self.changes_dtype):
            self.results = ResultConversion(self.results.deliver, None, types)
            if options.contract is None:
                self.native_results = types

    def attempt(self, args: Args, kwargs: Kwargs) -> Any:
        """Convert the arguments and call the function once."""
        converted, named = self.convert_arguments(args, kwargs)
        try:
            # Like `call` for most arguments, but 0.05 µs faster.
            if self.is_direct or (converted and type(converted[0]) in self.direct_types):
                return self.body(*converted, **named) if named else self.body(*converted)
            return self.call(converted, named)
        except (AttributeError, TypeError) as error:
            self._add_note_on_lists(error, args, kwargs)
            raise

    def _add_note_on_lists(self, error: Exception, args: Args, kwargs: Kwargs) -> None:
        """Add a note to an error of the function if the caller passed a list and no array."""
        values = (*args, *kwargs.values())
        skip = self.count_own(args)
        if first_array(values[skip:]) is not None:
            return
        for place, value in enumerate(values):
            if place >= skip and type(value) in (list, tuple):
                argument = describe_argument(self.fn, args, kwargs, place)
                kind = type(value).__name__
                note_on(
                    error,
                    f"arraybridge: {argument} is a {kind}. Decorators convert arrays, and leave lists and"
                    " numbers unchanged. Pass np.asarray(x) instead.",
                )
                return

    # -- the arguments -----------------------------------------------------------------------------

    def convert_arguments(self, args: Args, kwargs: Kwargs) -> tuple[list[Any], Kwargs]:
        """Return the arguments with their arrays converted, except for ``self``.

        Values in `fixed` are converted as well if the batch can be split, because `fixed` is then unwrapped.

        Raises:
            MemoryConversionError: If an array cannot be converted. The message names the argument.
        """
        values = [] if self.self_argument is None else self._own_arguments(args, self.self_argument)
        skip = len(values)
        convert = self.convert_argument
        native = self.native_arguments
        if self.uses_accelerator or busy_workers or open_logs:
            convert = self.arguments.current()
            native = ()
        has_array = has_other = False
        try:
            for value in (*args[skip:], *kwargs.values()) if skip or kwargs else args:
                cls = type(value)
                if cls in native:
                    has_array = True
                    values.append(value)
                elif (kind := kinds.get(cls)) is ARRAY:
                    has_array = True
                    values.append(convert(value))
                elif kind is LEAF:
                    values.append(value)
                else:
                    has_other = True
                    original = plain(value) if self.splits else value
                    converted = map_arrays(original, convert)
                    # A new container has a converted array. An unchanged one may still have native arrays.
                    has_array = has_array or converted is not original
                    values.append(converted)
        except MemoryConversionError as error:
            self._describe(error, args, kwargs, len(values))
            raise
        if has_other:
            has_array = self._check_others(args, kwargs, values, skip, has_array=has_array)
        if has_array and self.uses_own_stream is None:
            self._configure_for(registry.framework(self.options.framework))
        named = {name: values.pop(len(args)) for name in kwargs} if kwargs else kwargs
        return values, named

    def _own_arguments(self, args: Args, self_argument: SelfArgument) -> list[Any]:
        """Return ``self`` or ``cls``, which is never converted, in a list; otherwise an empty list."""
        first = [plain(x) if self.splits else x for x in args[:1]]  # `_recovered` marks self as fixed
        return first[: self_argument.count(first)]

    def _describe(self, error: MemoryConversionError, args: Args, kwargs: Kwargs, place: int) -> None:
        """Add the name of the argument that cannot be converted, and advice for decorators, to an error."""
        if isinstance(error, FrameworkNotInstalledError):
            return  # the framework is missing for all arguments
        error.add_call(describe_argument(self.fn, args, kwargs, place))
        _advise_by_options(error, self.options.framework)

    def _check_others(
        self, args: Args, kwargs: Kwargs, values: list[Any], skip: int, *, has_array: bool
    ) -> bool:
        """Return whether there is an array, including arrays in containers.

        Raises:
            UnknownArrayError: If there is no array or ``strict`` is true, and an object that is not an array
                has ``__array__``.
            ArrayNotSupportedError: If ``strict`` is true, and an array inside an object was not converted.
        """
        has_array = has_array or first_array(values[skip:]) is not None
        if self.options.strict or not has_array:
            _check_array_protocol_only(self.fn, args, kwargs, skip)
        if self.options.strict:
            _check_all_converted(self.fn, args, kwargs, values, skip, self.options.framework)
        return has_array

    # -- the function ------------------------------------------------------------------------------

    def call(self, args: Any, kwargs: Kwargs) -> Any:
        """Call the function on the device of its arguments; without arrays, on that of the decorator."""
        skip = self.count_own(args)
        if len(args) > skip and kinds.get(type(args[skip])) is ARRAY:  # in most calls
            first = args[skip]
        else:
            first = self._first_array(args, kwargs)
            if first is None:
                return self._call_without_arrays(args, kwargs)
        if self.uses_own_stream:
            framework = registry.framework(self.options.framework)
            if not framework.owns(first):  # it is in a container that cannot be rebuilt
                leaves = leaves_of([*args[skip:], *kwargs.values()])
                first = next(filter(framework.owns, leaves), None)
            if first is not None:
                return on_own_stream(framework, first, self.body, args, kwargs)
        return self.body(*args, **kwargs) if kwargs else self.body(*args)

    def _first_array(self, args: Any, kwargs: Kwargs) -> Any:
        """Return the first array argument; None if there is none."""
        skip = 0 if self.self_argument is None else self.self_argument.count(args)
        if len(args) > skip and kinds.get(type(args[skip])) is ARRAY:  # in most calls
            return args[skip]
        return first_array((*args[skip:], *kwargs.values()) if skip or kwargs else args)

    def _call_without_arrays(self, args: Any, kwargs: Kwargs) -> Any:
        """Call the function with the device of the decorator selected, so that it creates arrays there."""
        if self.placement.is_named:
            framework = registry.framework(self.options.framework)
            device = self.placement.resolve(framework)
            if device is not None:
                with framework.devices.selected(device):
                    return self.body(*args, **kwargs)
        return self.body(*args, **kwargs)

    # -- the result --------------------------------------------------------------------------------

    def restore_result(self, result: Any, args: Args, kwargs: Kwargs) -> Any:
        """Return the result, converted according to the options and the first array argument.

        Raises:
            MemoryConversionError: If an array cannot be converted. The message names its place in the result.
            ValueError: If the result breaks the contract.
        """
        try:
            if self.restores_input or self.restores_dtype:
                first = self._first_array(args, kwargs)
                if kinds.get(type(result)) is ARRAY and not self.changes_dtype:  # in most calls
                    result = self._restored(result, first)
                else:
                    result = ResultConversion(self._deliver_to(first), self._dtype_for(first)).tree(result)
            elif open_logs:  # skip the `unchanged` check: traces record all arrays
                result = ResultConversion(self.results.deliver, self.results.dtype).tree(result)
            elif type(result) not in self.results.unchanged:
                result = self.results.tree(result)
        except FrameworkNotInstalledError:
            raise
        except MemoryConversionError as error:
            error.add_call(f"{self.label}(), result")
            if error.cast is not None:
                error.advise(error.cast.in_function())
            raise
        return result if self.options.contract is None else self.checked(result, self.options.contract)

    def _restored(self, result: Any, first: Any) -> Any:
        """Return an array for the caller, whose first array argument is ``first`` (None without one)."""
        if type(result) is type(first) and _are_together(result, first):
            return result
        return self._deliver_to(first)(result)

    def _deliver_to(self, first: Any) -> Change:
        if not self.restores_input or type(first) is np.ndarray:
            return self.results.deliver
        return _unchanged if first is None else Restoration(first, self.options.grad).array

    def _dtype_for(self, first: Any) -> str | None:
        if not self.restores_dtype or first is None:
            return self.results.dtype
        framework, array = source_of(first)
        return framework.dtype_name(array)


def _are_together(x: Any, y: Any) -> bool:
    """Return whether two objects of the same type are arrays on the same device; False inside a trace."""
    if open_logs or kinds.get(type(x)) is not ARRAY:
        return False
    if x is y:
        return True
    owner = registry.find_owner(x)
    return owner is not None and owner.devices.device_of(x) == owner.devices.device_of(y)


def _dtype_of_results(options: DecoratorOptions) -> str | None:
    conversion = options.dtype_conversion
    return None if conversion.numpy_dtype is None else str(conversion.value)


def _unchanged(x: Any) -> Any:
    return x


class ArrayConverter:
    """The conversion of single arrays by `convert_memory`, or by a cached plan if there is one.

    Attributes:
        target: The framework to convert to.
        source: The framework that arrays must have; None for any.
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
        #: Never "flow", because `Flow` replaces it.
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
        """Convert an array with the options and return it. If they name an accelerator, use `current`."""
        if not open_logs:
            try:
                return plans_by_signature[self.signature][type(x)](x)
            except plan_cache.declined:
                pass
        return convert_memory(
            x, self.source, self.target, dtype=self.dtype, grad=self.grad, device=self.device
        )

    def current(self) -> Change:
        """Return the function that converts arrays in one call, to the accelerator or the worker's device."""
        device = None
        if self.uses_accelerator:
            device = self.placement.resolve(registry.framework(self.target))
        elif busy_workers and self.device is None and not registry.metadata_of(self.target).has_only_host:
            device = worker_device.get()
        if device is None:
            return self.convert
        return _DeviceConverter(self, registry.framework(self.target), device).convert


class _DeviceConverter:
    """The conversion of single arrays to one device of a framework."""

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
    """Return the first array among these values, including those in containers; None if there is none."""
    for value in values:
        kind = kinds.get(type(value)) or kind_of(value)
        if kind is ARRAY:
            return value
        if kind is TREE:  # for a list, stop at the first array, which is the first item of most lists
            array = first_array(value if type(value) is list else leaves_of(value))
            if array is not None:
                return array
    return None


def _check_array_protocol_only(fn: Callable[..., Any], args: Args, kwargs: Kwargs, skip: int) -> None:
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


def _check_all_converted(
    fn: Callable[..., Any], args: Args, kwargs: Kwargs, values: list[Any], skip: int, framework: str
) -> None:
    """Raise if a converted argument has an array in a container that cannot be traversed or rebuilt."""
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


def _advise_by_options(error: MemoryConversionError, name: str) -> None:
    """Replace the advice with an option of the decorator ``name`` that makes the conversion possible."""
    if error.cast is not None:
        error.advise(error.cast.by_decorator(name))
    elif isinstance(error, SourceMismatchError):
        error.advise(Advice("Remove strict=True to detect the framework automatically."))


def on_own_stream(framework: Framework, array: Any, fn: Callable[..., Any], args: Any, kwargs: Kwargs) -> Any:
    """Call ``fn`` on a separate stream of this thread, on the device of ``array``.

    The separate stream first waits for the caller's stream. After the call, the caller's stream waits for the
    separate one, so that it can read and free the results. The arguments stay alive until then.
    """
    with framework.streams.stream(framework.devices.device_of(array)):
        result = fn(*args, **kwargs)
    return map_arrays(result, lambda x: take_over(framework, x) if framework.owns(x) else x)
