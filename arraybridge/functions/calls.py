"""What a call of a decorated function does: bring the arguments, run the function, give its results back.

The options decide, where the decorator is applied, which functions these three are; a call runs them.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Container, Iterable
from contextlib import nullcontext, suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from arraybridge.batches import fixed, plain
from arraybridge.carriers.carrier import carrier_of, source_of
from arraybridge.conversion import plans, trace
from arraybridge.conversion.convert import convert_memory
from arraybridge.conversion.destination import card_meant, target_device
from arraybridge.conversion.plans import by_form
from arraybridge.conversion.trace import open_logs
from arraybridge.errors import (
    Advice,
    ArrayNotSupportedError,
    DtypeNotSupportedError,
    FrameworkNotInstalledError,
    MemoryConversionError,
    SourceMismatchError,
)
from arraybridge.frameworks import registry
from arraybridge.frameworks.base import CPU, Framework
from arraybridge.frameworks.foreign import unknown_array
from arraybridge.frameworks.parts import itself
from arraybridge.functions.dtypes import DtypeConversion, convert_dtype
from arraybridge.functions.options import changed
from arraybridge.functions.slices import call_by_planes
from arraybridge.functions.wrap import label_of, name_of, takes_self
from arraybridge.memory.recovery import recovered
from arraybridge.options import busy_workers, worker_device
from arraybridge.timeline.events import device_words
from arraybridge.trees import ARRAY, LEAF, TREE, kind_of, kinds, leaves_of, map_arrays
from arraybridge.types import Device

__all__ = ["named_device"]

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
#: What changes one array.
Change = Callable[[Any], Any]
#: What takes the arguments as they came, and returns a result.
Run = Callable[[Args, Kwargs], Any]
#: What returns the result for the caller, given the arguments as they came.
GiveBack = Callable[[Any, Args, Kwargs], Any]
Compose = Callable[[Callable[..., Any], SimpleNamespace], tuple[Run, GiveBack]]
#: A decorated call as torch.compile leaves it alone, once that was needed.
_untraced: list[Callable[..., Any]] = []


class DecoratedCall:
    """Calls a function in parts; it is pickled as what these are composed of, and by which function."""

    def __init__(self, compose: Compose, fn: Callable[..., Any], options: SimpleNamespace) -> None:
        self.__setstate__((compose, fn, options))

    def __getstate__(self) -> Any:
        return self.compose, self.fn, self.options

    def __setstate__(self, state: Any) -> None:
        self.compose, self.fn, self.options = compose, fn, options = state
        self.label = label_of(fn)
        self.run, self.give_back = compose(fn, options)
        if options.contract is not None:
            self.give_back = partial(_checked, options.contract, self.label, self.give_back)

    def __call__(self, args: Args, kwargs: Kwargs) -> Any:
        if "torch._dynamo" in sys.modules and sys.modules["torch"].compiler.is_dynamo_compiling():
            # Between two graphs: there arrays that change the framework have memory, and tracers have none.
            if not _untraced:
                torch: Any = registry.framework("torch")
                _untraced.append(torch.untraced(DecoratedCall.__call__))
            return _untraced[0](self, args, kwargs)
        if not open_logs:
            return self.give_back(self.run(args, kwargs), args, kwargs)
        with trace.span("call", self.label) or nullcontext() as span:
            result = self.run(args, kwargs)
            if span is not None:
                span.device = device_words(result)
            return self.give_back(result, args, kwargs)

    async def awaited(self, args: Args, kwargs: Kwargs) -> Any:
        """The same for a coroutine function."""
        with trace.span("call", self.label, annotate=False) or nullcontext():
            return self.give_back(await self.run(args, kwargs), args, kwargs)


def composed(fn: Callable[..., Any], options: SimpleNamespace) -> tuple[Run, GiveBack]:
    """What brings the arguments and runs the function, and what gives its result back."""
    if not options.converts:
        return lambda args, kwargs: fn(*args, **kwargs), lambda result, *_: result
    skip, own = int(takes_self(fn)), set[type]()
    run = recovering(fn, _running(fn, skip, options, own), skip, options)
    return run, _giving_back(fn, skip, options, own)


def _checked(contract: Callable[[Any], Any], label: str, give_back: GiveBack, *call: Any) -> Any:
    """What the caller gets, if it keeps the contract; a `ValueError` if not."""
    result = give_back(*call)
    verdict = contract(result)
    # A contract that raises by itself need not return anything.
    if verdict is not None and not verdict:
        raise ValueError(f"{label}(): the result breaks its contract {name_of(contract)}")
    return result


# -- bring and run -----------------------------------------------------------------------------------


def _running(fn: Callable[..., Any], skip: int, options: SimpleNamespace, own: set[type]) -> Run:
    """What converts the arguments but the first ``skip``, self, and calls the function where they are.

    ``own``: the classes of its framework's arrays, once that is imported: not before there is an array.
    """
    name, strict, on_card = options.framework, options.strict, options.on_card
    convert = converting(name, options)
    unmark = plain if options.oom_recovery == "split" else itself  # of what is `fixed`
    body = partial(call_by_planes, fn, skip) if options.slice_by_slice else fn
    placed = options.device is not None or options.gpu_id is not None
    may_stay = not placed and options.dtype is None and options.declared in (None, name)
    unchanged: Container[type] = own if may_stay else ()
    queued: bool | None = None

    def run(args: Args, kwargs: Kwargs) -> Any:
        nonlocal queued
        enter, staying = convert, unchanged
        if on_card or busy_workers or open_logs:
            enter, staying = arriving(options, convert), ()
        values = [*map(unmark, args[:skip])] if skip else []
        arrays = others = False
        try:
            for value in (*args[skip:], *kwargs.values()) if skip or kwargs else args:
                cls = type(value)
                if cls in staying:
                    arrays = True
                    values.append(value)
                elif (kind := kinds.get(cls)) == ARRAY:
                    arrays = True
                    values.append(enter(value))
                elif kind == LEAF:
                    values.append(value)
                else:
                    others, unmarked = True, unmark(value)
                    values.append(map_arrays(unmarked, enter))
                    arrays = arrays or values[-1] is not unmarked
        except FrameworkNotInstalledError:
            raise  # it is missing for every argument
        except MemoryConversionError as error:
            error.add_call(_argument(fn, args, kwargs, len(values)))
            _advise_by_options(error, name)
            raise
        if others:
            arrays = arrays or first_array(values[skip:]) is not None
            if strict or not arrays:
                _refuse_tables(fn, args, kwargs, skip)
        named = {word: values.pop(len(args)) for word in kwargs} if kwargs else kwargs
        if arrays:
            if queued is None:
                framework = registry.framework(name)
                queued = options.stream and framework.streams.has_queues
                own.update(framework.fast_types() or framework.array_classes())
            if queued:
                first = first_array((*values[skip:], *named.values()))
                return on_own_stream(registry.framework(name), first, body, values, named)
        elif placed:  # no array brings the device along: it is selected for what the function makes
            framework = registry.framework(name)
            with framework.selected(named_device(framework, options)):
                return body(*values, **named)
        return body(*values, **named) if named else body(*values)

    return run


def arriving(options: SimpleNamespace, convert: Change) -> Change:
    """What brings an array of this call to where the function runs: ``convert``, unless that is a device."""
    name, device = options.framework, None
    if options.on_card:
        device = named_device(registry.framework(name), options)
    elif busy_workers and options.device is None and name != "numpy":
        device = worker_device.get()
    if device is None:
        return convert
    framework, declared, dtype = registry.framework(name), options.declared, options.dtype
    may_stay = dtype is None and declared in (None, name) and not open_logs

    def enter(x: Any) -> Any:
        is_there = may_stay and framework.owns(x) and framework.device_of(x) == device
        if is_there and not framework.is_scattered(x):
            return x
        return convert_memory(x, declared, name, grad=options.grad, device=device, dtype=dtype)

    return enter


def converting(target: str, options: SimpleNamespace) -> Change:
    """What converts one array as `convert_memory` does with the options, and sooner where that is planned."""
    declared, words = options.declared, options.device and str(options.device)
    keywords = {"grad": options.grad, "dtype": options.dtype, "device": words}
    form = plans.form_of(declared, target, **keywords)
    if form == plans.form_of(None, target):
        form = target

    def convert(x: Any) -> Any:
        if not open_logs:
            try:
                return by_form[form][type(x)](x)
            except plans.declined:
                pass
        return convert_memory(x, declared, target, **keywords)

    return convert


def named_device(framework: Framework, options: SimpleNamespace) -> Device:
    """The device that a decorator names, as its framework has it."""
    return target_device(framework, framework, CPU, card_meant(options.gpu_id), options.device)


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
    with framework.streams.stream(framework.device_of(array)):
        result = fn(*args, **kwargs)
    return map_arrays(result, lambda x: framework.streams.take_over(x) if framework.owns(x) else x)


def recovering(fn: Callable[..., Any], run: Run, skip: int, options: SimpleNamespace) -> Run:
    """If asked, what runs again, or in parts, where memory runs out: for a conversion of arguments, too."""
    if not options.oom_recovery:
        return run
    gpu_id, retries, splits = options.gpu_id, options.max_retries, options.oom_recovery == "split"
    axis, least = options.split_axis, options.min_split

    def recover(args: Args, kwargs: Kwargs) -> Any:
        card: Any = card_meant(gpu_id) if isinstance(gpu_id, int) else None
        if skip and splits:
            args = (*map(fixed, args[:skip]), *args[skip:])  # self is never cut
        # By position: keywords cost 0.4 us per call here.
        result = recovered(run, (args, kwargs), {}, retries, card, None, splits, axis, least, fn, True)
        return plain(result) if splits and kinds.get(type(result)) != ARRAY else result

    return recover


# -- give back ---------------------------------------------------------------------------------------


def _giving_back(fn: Callable[..., Any], skip: int, options: SimpleNamespace, own: set[type]) -> GiveBack:
    """What converts the arrays of a result as the options say."""
    label, by_input, conversion = label_of(fn), options.output_type == "input", options.dtype_conversion
    preserves = conversion is DtypeConversion.PRESERVE_INPUT
    named = None if conversion.numpy_dtype is None else str(conversion.value)
    target = "numpy" if by_input else options.output_type
    convert = converting(target, changed(options, declared=None, dtype=None, device=None))
    if by_input or preserves or named or target != options.framework:
        own = set()  # else most results are of these, and stay as they are

    def give_back(result: Any, args: Args, kwargs: Kwargs) -> Any:
        if type(result) in own and not open_logs:
            return result
        deliver, dtype = convert, named
        try:
            if by_input or preserves:
                first = first_array((*args[skip:], *kwargs.values()) if skip or kwargs else args)
                if by_input and type(first) is not np.ndarray:
                    deliver = homeward(first, options.grad)
                if preserves and first is not None:
                    framework, array = source_of(first)
                    dtype = framework.dtype_name(array)
            if dtype is None and kinds.get(type(result)) == ARRAY:
                return deliver(result)
            leave = partial(_leave, () if open_logs else own, deliver, dtype)
            return map_arrays(result, leave, also=np.generic)
        except FrameworkNotInstalledError:
            raise
        except MemoryConversionError as error:
            error.add_call(f"{label}(), result")
            if error.cast is not None:
                error.advise(error.cast.in_function())
            raise

    return give_back


def homeward(first: Any, grad: Any) -> Change:
    """What takes an array to the framework, the device and the carrier of what the caller brought."""
    if first is None:
        return itself
    framework, origin = source_of(first)
    device = framework.device_of(origin)
    carrier = None if kinds.get(type(first)) else carrier_of(first)

    def deliver(x: Any) -> Any:
        is_home = x is first or (framework.owns(x) and framework.device_of(x) == device)
        if not is_home or open_logs:
            x = convert_memory(x, framework.name, grad=grad, device=device)
        return x if carrier is None or x.shape != framework.shape(origin) else carrier.rebuild(first, x)

    return deliver


def _leave(staying: Container[type], deliver: Change, dtype: str | None, x: Any) -> Any:
    """``deliver`` an array, with that dtype; and NumPy's scalars, where these become arrays elsewhere."""
    kind = kinds.get(type(x))
    if type(x) in staying or (not kind and carrier_of(x) is not None):
        return x  # a carrier that the function made stays one
    if kind != ARRAY and isinstance(x, np.generic):
        try:
            array = deliver(np.asarray(x))
        except (ArrayNotSupportedError, DtypeNotSupportedError):
            return x
        return x if isinstance(array, np.ndarray) else array
    if dtype is None:
        return deliver(x)
    dtypes = source_of(x)[0].dtypes
    if dtypes is None or dtype in dtypes:
        return deliver(convert_dtype(x, dtype))
    return convert_dtype(deliver(x), dtype)  # its own framework has no such dtype
