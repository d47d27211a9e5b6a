"""Calls of decorated functions, with converted arguments and results."""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from arraybridge.advice import Advice
from arraybridge.batches import fixed, plain
from arraybridge.carriers.sources import source_of
from arraybridge.compilers import exempt, find_untraced_call, hook_getter
from arraybridge.conversion.device_resolution import gpu_index_of
from arraybridge.decorators.argument_conversion import (
    ArrayConverter,
    WarningConverter,
    advise_by_options,
    check_all_converted,
    check_array_protocol_only,
    describe_argument,
)
from arraybridge.decorators.dtype_conversion import DtypeConversion
from arraybridge.decorators.options import DecoratorOptions
from arraybridge.decorators.results import Restoration, ResultConversion
from arraybridge.decorators.slices import call_by_planes
from arraybridge.decorators.surroundings import Surroundings
from arraybridge.decorators.wrapping import SelfArgument, label_of, name_of
from arraybridge.device import Device
from arraybridge.errors import (
    FrameworkNotInstalledError,
    GradientError,
    MemoryConversionError,
    note_on,
)
from arraybridge.interface import registry
from arraybridge.interface.framework import Framework
from arraybridge.interface.streams import identity
from arraybridge.memory.oom_recovery import RecoveryOptions, recover
from arraybridge.memory.split_arguments import Named, name_arguments
from arraybridge.settings import busy_workers
from arraybridge.tracing import trace_log
from arraybridge.tracing.events import device_text
from arraybridge.tracing.trace_log import open_logs
from arraybridge.trees import (
    ARRAY,
    LEAF,
    TREE,
    cyclic_error,
    kind_of,
    kinds,
    leaves_of,
    map_arrays,
)

if TYPE_CHECKING:
    from arraybridge.decorators.argument_conversion import Args, Change, Kwargs


# The advice for a result that requires grad and would lose its graph when it is converted for the caller.
_KEEP_VALUES = Advice(
    "To return only its values, pass grad='detach' to the decorator, or detach the result in the function. To"
    " preserve gradients, omit output_type, and use grad='flow' for callers of other frameworks."
)


class DecoratedCall:
    """A decorated function that converts nothing. Subclasses convert arguments and results.

    A call consists of `attempt`, which converts the arguments and calls the function, and `restore_result`.
    With ``oom_recovery``, `attempt` may be called several times.

    Only the function and the options are pickled.

    Attributes:
        fn: The function.
        options: The options of its decorator.
        label: The name of the function in traces and errors.
        self_argument: Recognizes ``self`` and ``cls``, which are never converted; None if there is none.
    """

    __slots__ = (
        "fn",
        "label",
        "native_results",
        "options",
        "recovers",
        "recovery",
        "self_argument",
        "splits",
    )

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
        gpu: Any = None if self.options.gpu_id == "auto" else self.options.gpu_id
        self.recovery = RecoveryOptions(
            max_retries=self.options.max_retries,
            gpu_id=gpu,
            split=self.splits,
            split_axis=self.options.split_axis,
            min_split=self.options.min_split,
        )
        self.native_results = ()
        self.prepare()

    def prepare(self) -> None:
        """Set the attributes that depend on the function and the options."""

    # -- a call ------------------------------------------------------------------------------------

    def __call__(self, args: Args, kwargs: Kwargs) -> Any:
        """Call the function and return its result, restored to the caller's types."""
        if hook_getter:
            # The same as in `run_eagerly`, without a wrapper.
            try:
                call = find_untraced_call()
            finally:
                pass
            if call is not None:
                return call(self.call_in_span, args, kwargs)
        if not open_logs:
            # This is the body of `run`, inlined.
            result = self._recover(args, kwargs) if self.recovers else self.attempt(args, kwargs)
            if type(result) in self.native_results:
                return result
            return self.restore_result(result, args, kwargs)
        return self.call_in_span(args, kwargs)

    def call_in_span(self, args: Args, kwargs: Kwargs) -> Any:
        """Do the same as `__call__`, and record the call in the open traces."""
        with trace_log.span("call", self.label) or nullcontext() as span:
            result = self.run(args, kwargs)
            if span is not None:
                span.device = device_text(result)
            return self.restore_result(result, args, kwargs)

    async def await_call(self, args: Args, kwargs: Kwargs) -> Any:
        """Call a coroutine function and return its awaited result, restored to the caller's types."""
        with trace_log.span("call", self.label, annotate=False) or nullcontext():
            return self.restore_result(await self.await_attempt(args, kwargs), args, kwargs)

    # -- steps of a call ---------------------------------------------------------------------------

    def run(self, args: Args, kwargs: Kwargs) -> Any:
        """Return the unconverted result of the function. With recovery, call it again if memory runs out."""
        return self._recover(args, kwargs) if self.recovers else self.attempt(args, kwargs)

    def attempt(self, args: Args, kwargs: Kwargs) -> Any:
        """Call the function once, with the arguments that the caller passed."""
        return self.fn(*args, **kwargs)

    async def await_attempt(self, args: Args, kwargs: Kwargs) -> Any:
        """Await the coroutine function, with the arguments that the caller passed."""
        return await self.fn(*args, **kwargs)

    def restore_result(self, result: Any, args: Args, kwargs: Kwargs) -> Any:
        """Return the result for the caller, given the arguments that the caller passed.

        Raises:
            ValueError: If the result breaks the contract.
        """
        return result if self.options.contract is None else self.check_contract(result, self.options.contract)

    def check_contract(self, result: Any, contract: Callable[[Any], Any]) -> Any:
        """Check a result against the contract, and return the result.

        Raises:
            ValueError: If the result breaks the contract.
        """
        verdict = contract(result)
        # None is accepted, because contracts that raise, such as assertions, return nothing.
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

    def _recover(self, args: Args, kwargs: Kwargs) -> Any:
        """Convert the arguments and call the function; if memory runs out, try again or continue in parts."""
        splits = self.splits
        recovery = self.recovery
        if recovery.gpu_id is not None:
            gpu: Any = gpu_index_of(recovery.gpu_id)  # a worker process may have only one GPU
            recovery = recovery._replace(gpu_id=gpu)
        if splits and self.count_own(args):
            args = (fixed(args[0]), *args[1:])  # `self` is never split
        result = recover(self.attempt, (args, kwargs), {}, recovery, self._name_arguments)
        return plain(result) if splits else result

    def _name_arguments(self, args: Args, kwargs: Kwargs) -> Named:
        return name_arguments(self.fn, *args, **kwargs)


class ConvertingCall(DecoratedCall):
    """A decorated function of one framework that accepts arrays of any framework.

    Attributes:
        body: The function, or a partial of `call_by_planes` that calls the function for each plane.
        arguments: The conversion of array arguments.
        results: The conversion of results, unless they have to be restored for a first array that is not a
            NumPy array.
        native_arguments: Types of arguments that need no conversion.
        selects_device: Whether the device of the first array is selected, because the framework has streams.
        uses_own_stream: Whether the function runs on a separate stream of this thread. None before the first
            array, because the framework may not be imported yet.
        is_direct: Whether all calls can call ``body`` directly, without selecting a device or a stream. Until
            the first array, this applies only to calls without arrays.
        direct_types: Types of the first argument for which ``body`` can be called directly even if
            ``is_direct`` is False, because a device is selected only for calls without arrays.
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
        "restores",
        "restores_dtype",
        "restores_input",
        "results",
        "selects_device",
        "uses_accelerator",
        "uses_own_stream",
    )

    def prepare(self) -> None:
        """Set the attributes that do not depend on the imported framework."""
        fn = self.fn
        options = self.options
        self.body = partial(call_by_planes, fn, self.self_argument) if options.slice_by_slice else fn
        self.selects_device = False
        self.uses_own_stream: bool | None = None
        self.is_direct = not options.placement.is_named and options.x64 is None
        self.placement = options.placement
        self.uses_accelerator = options.uses_accelerator
        self.direct_types: Container[type] = ()
        self.arguments = (
            WarningConverter(options.framework, options, self.label)
            if options.warns_of_narrowing
            else ArrayConverter(options.framework, options)
        )
        self.convert_argument: Change = self.arguments.convert
        self.native_arguments: Container[type] = ()
        self.restores_input = options.output_type == "input"
        self.restores_dtype = options.dtype_conversion is DtypeConversion.PRESERVE_INPUT
        self.restores = self.restores_input or self.restores_dtype
        # With output_type="input", `results` converts for callers whose first array is a NumPy array.
        target = "numpy" if self.restores_input else options.output_type
        for_results = replace(options, strict=False, dtype=None, device=None, gpu_id=None)
        converter = ArrayConverter(target, for_results)
        self.results = ResultConversion(converter.convert, options.dtype_conversion.dtype)
        self.changes_dtype = self.restores_dtype or self.results.dtype is not None

    def _configure_for(self, framework: Framework) -> None:
        """Set the attributes that depend on the imported framework, in the first call with an array."""
        options = self.options
        # A tuple, because a set raises for arguments and results whose class is unhashable.
        types = framework.fast_path.fast_types() or framework.runtime.array_classes()
        self.selects_device = framework.streams.has_streams
        self.uses_own_stream = options.stream and self.selects_device
        is_surrounded = self.selects_device or options.x64 is not None
        self.is_direct = not is_surrounded and not self.placement.is_named
        if not is_surrounded and self.self_argument is None:
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
        converted, named, has_array = self.convert_arguments(args, kwargs)
        try:
            # This does the same as `call` for most arguments, but is 0.05 µs faster.
            if self.is_direct or (converted and type(converted[0]) in self.direct_types):
                return self.body(*converted, **named) if named else self.body(*converted)
            return self.call(converted, named, has_array=has_array)
        except (AttributeError, TypeError) as error:
            self._add_note_on_lists(error, args, kwargs)
            raise

    def _add_note_on_lists(self, error: Exception, args: Args, kwargs: Kwargs) -> None:
        """Add a note to an error raised by the function if the caller passed a list and no array."""
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

    @exempt  # AutoGraph cannot rewrite it
    def convert_arguments(self, args: Args, kwargs: Kwargs) -> tuple[list[Any], Kwargs, bool]:
        """Return the arguments with their arrays converted, except for ``self``, and whether there are any.

        If the batch can be split, values that are wrapped in `fixed` are unwrapped and converted as well.

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
                    continue
                try:
                    kind = kinds.get(cls)
                except TypeError:  # the class is unhashable
                    kind = None
                if kind is ARRAY:
                    has_array = True
                    values.append(convert(value))
                elif kind is LEAF:
                    values.append(value)
                else:
                    has_other = True
                    original = plain(value) if self.splits else value
                    converted = map_arrays(original, convert)
                    # A new container has a converted array. An unchanged one may have unconverted arrays.
                    has_array = has_array or converted is not original
                    values.append(converted)
        except MemoryConversionError as error:
            self._describe(error, args, kwargs, len(values))
            raise
        if has_other and (self.options.strict or not has_array):
            has_array = self._check_others(args, kwargs, values, skip, has_array=has_array)
        if has_array and self.uses_own_stream is None:
            framework = registry.framework(self.options.framework)
            self._configure_for(framework)
            if isinstance(self.arguments, WarningConverter):
                # Arrays that are not converted may be narrowed as well.
                for x in filter(framework.owns, leaves_of(values[skip:])):
                    self.arguments.warn_about(x)
        # The values of keyword arguments follow those of positional arguments.
        named = {name: values.pop(len(args)) for name in kwargs} if kwargs else kwargs
        return values, named, has_array

    def _own_arguments(self, args: Args, self_argument: SelfArgument) -> list[Any]:
        """Return ``self`` or ``cls``, which is never converted, in a list; otherwise an empty list."""
        first = [plain(x) if self.splits else x for x in args[:1]]  # `_recover` wraps self in `fixed`
        return first[: self_argument.count(first)]

    def _describe(self, error: MemoryConversionError, args: Args, kwargs: Kwargs, place: int) -> None:
        """Add the name of the argument that cannot be converted, and advice for decorators, to an error."""
        if isinstance(error, FrameworkNotInstalledError):
            return  # the framework is missing for all arguments
        error.add_call(describe_argument(self.fn, args, kwargs, place))
        advise_by_options(error, self.options.framework)

    def _check_others(
        self, args: Args, kwargs: Kwargs, values: list[Any], skip: int, *, has_array: bool
    ) -> bool:
        """Return whether any argument contains an array, and check objects that may hide arrays.

        Raises:
            UnknownArrayError: If there is no array or ``strict`` is true, and an object that is not an array
                has ``__array__``.
            ArrayNotSupportedError: If ``strict`` is true, and an array inside an object was not converted.
        """
        has_array = has_array or first_array(values[skip:]) is not None
        if self.options.strict or not has_array:
            check_array_protocol_only(self.fn, args, kwargs, skip)
        if self.options.strict:
            check_all_converted(self.fn, args, kwargs, values, skip, self.options.framework)
        return has_array

    # -- the function ------------------------------------------------------------------------------

    def call(self, args: Any, kwargs: Kwargs, *, has_array: bool) -> Any:
        """Call the function with converted arguments, in its surroundings."""
        surroundings = None
        if not has_array or self.selects_device or self.options.x64 is not None:  # in few calls
            surroundings = self._find_surroundings(args, kwargs, has_array=has_array)
        if surroundings is None:
            return self.body(*args, **kwargs) if kwargs else self.body(*args)
        return surroundings.call(self.body, args, kwargs)

    async def await_attempt(self, args: Args, kwargs: Kwargs) -> Any:
        """Convert the arguments and await the coroutine, all of whose steps run in the surroundings."""
        converted, named, has_array = self.convert_arguments(args, kwargs)
        surroundings = self._find_surroundings(converted, named, has_array=has_array)
        if surroundings is None:
            return await self.body(*converted, **named)
        return await surroundings.call_coroutine(self.body, converted, named)

    @exempt
    def _find_surroundings(self, args: Any, kwargs: Kwargs, *, has_array: bool) -> Surroundings | None:
        """Return the device, stream and x64 setting to select for a call with converted arguments, or None.

        The function runs on its arguments' device, or on the decorator's device if there are no arrays.
        """
        x64 = self.options.x64
        device = None
        if has_array:
            if self.selects_device:
                device = self._device_of_arguments(args, kwargs)
        elif self.placement.is_named:
            device = self.placement.resolve(registry.framework(self.options.framework))
        if x64 is None and device is None:
            return None
        own_stream = has_array and bool(self.uses_own_stream)
        return Surroundings(registry.framework(self.options.framework), x64, device, own_stream)

    def _device_of_arguments(self, args: Any, kwargs: Kwargs) -> Device | None:
        """Return the device of the first converted array; None if there is none."""
        framework = registry.framework(self.options.framework)
        first = first_array_argument(args, kwargs, self.self_argument)
        if not framework.owns(first):  # it was not converted: its container cannot be rebuilt
            leaves = leaves_of([*args[self.count_own(args) :], *kwargs.values()])
            first = next(filter(framework.owns, leaves), None)
        return None if first is None else framework.devices.device_of(first)

    # -- the result --------------------------------------------------------------------------------

    @exempt
    def restore_result(self, result: Any, args: Args, kwargs: Kwargs) -> Any:
        """Return the result, converted according to the options and the first array argument.

        Raises:
            MemoryConversionError: If an array cannot be converted. The message names its place in the result.
            ValueError: If the result breaks the contract.
        """
        try:
            if self.restores:
                first = first_array_argument(args, kwargs, self.self_argument)
                try:
                    is_array = kinds.get(type(result)) is ARRAY  # in most calls
                except TypeError:  # the class is unhashable
                    is_array = False
                if is_array and not self.changes_dtype:
                    result = self._restore(result, first)
                elif type(first) is np.ndarray and not self.restores_dtype:
                    result = self.results.tree(result)
                else:
                    result = ResultConversion(self._deliver_to(first), self._dtype_for(first)).tree(result)
            elif open_logs or type(result) not in self.results.unchanged:
                result = self.results.tree(result)
        except FrameworkNotInstalledError:
            raise
        except MemoryConversionError as error:
            self._describe_result(error)
            raise
        return result if self.options.contract is None else self.check_contract(result, self.options.contract)

    def _describe_result(self, error: MemoryConversionError) -> None:
        """Add the name of the function whose result cannot be converted, and advice, to an error."""
        error.blame_result(self.label)
        if error.cast is None and isinstance(error, GradientError):
            error.advise(_KEEP_VALUES)

    def _restore(self, result: Any, first: Any) -> Any:
        """Convert a result array for the caller, whose first array argument is ``first`` (or None)."""
        if type(result) is type(first) and _are_together(result, first):
            return result
        return self._deliver_to(first)(result)

    def _deliver_to(self, first: Any) -> Change:
        if not self.restores_input or type(first) is np.ndarray:
            return self.results.deliver
        return identity if first is None else Restoration(first, self.options.grad).array

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


# -- helpers -------------------------------------------------------------------------------------------


def first_array_argument(args: Any, kwargs: Kwargs, self_argument: SelfArgument | None) -> Any:
    """Return the first array in the arguments, also in containers, except for ``self``; None without one."""
    skip = 0 if self_argument is None else self_argument.count(args)
    try:
        if len(args) > skip:
            first = args[skip]
            if (kinds.get(type(first)) or kind_of(first)) is ARRAY:  # in most calls
                return first
    except TypeError:  # the class is unhashable
        pass
    return first_array((*args[skip:], *kwargs.values()) if skip or kwargs else args)


def first_array(values: Iterable[Any]) -> Any:
    """Return the first array among these values, including those in containers; None if there is none."""
    searched = [iter(values)]  # one iterator per level of the containers
    while searched:
        for value in searched[-1]:
            try:
                kind = kinds.get(type(value)) or kind_of(value)
            except TypeError:  # the class is unhashable
                kind = kind_of(value)
            if kind is ARRAY:
                return value
            if kind is TREE:
                cls = type(value)
                is_plain = cls is dict or cls is list or cls is tuple
                children: Any = value if is_plain else leaves_of(value)
                searched.append(iter(children.values() if cls is dict else children))
                if len(searched) > sys.getrecursionlimit():  # the decorated function made it a cycle
                    raise cyclic_error()
                break
        else:
            searched.pop()
    return None
