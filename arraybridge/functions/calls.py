"""What a call of a decorated function does: bring the arguments, run the function, give its results back.

The options decide, where the decorator is applied, which functions these three are made of.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from arraybridge import batches
from arraybridge.conversion import plans, trace
from arraybridge.conversion.convert import Grad, convert_memory
from arraybridge.conversion.trace import open_logs
from arraybridge.errors import (
    ArrayNotSupportedError,
    DtypeNotSupportedError,
    MemoryConversionError,
    SourceMismatchError,
)
from arraybridge.frameworks import registry
from arraybridge.frameworks.base import Framework, find_or_host
from arraybridge.functions.compiling import being_compiled, stays_traced, untraced
from arraybridge.functions.dtypes import DtypeConversion, convert_dtype
from arraybridge.functions.options import DecoratorOptions
from arraybridge.functions.slices import call_by_planes
from arraybridge.functions.wrap import label_of, takes_self
from arraybridge.memory.recovery import Plan, attempted, faults, recovered
from arraybridge.options import OneWarning
from arraybridge.placement import busy_workers, card_meant, worker_device
from arraybridge.timeline.events import device_words
from arraybridge.trees import (
    ARRAY,
    TREE,
    is_array,
    kind_of,
    kinds,
    leaves_of,
    map_arrays,
    prefix,
    source_of,
)
from arraybridge.types import Device

__all__ = ["DecoratedCall", "as_declared", "check_result", "check_source", "handed_over", "in_framework"]

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
#: What changes one array.
Change = Callable[[Any], Any]
#: What makes the arguments of a function of those of a call; it returns the first array among them as well.
Bring = Callable[[Args, Kwargs], tuple[Sequence[Any], Kwargs, Any]]


class Parts(NamedTuple):
    """A call, taken apart.

    Attributes:
        bring: the arguments as the function wants them, and the first array among them.
        run: the result of the function, called with what `bring` makes of the arguments.
        give_back: the result as the caller wants it; it is handed the arguments as they came.
        trace: all of it, where torch.compile traces.
    """

    bring: Bring
    run: Callable[[Args, Kwargs], Any]
    give_back: Callable[[Any, Args, Kwargs], Any]
    trace: Callable[[Args, Kwargs], Any]


class Way(NamedTuple):
    """How arrays travel.

    Attributes:
        target: the framework that they go to.
        form: of these conversions, for their plans; None where they are not planned.
        change: brings one array there.
        scalar: brings one of NumPy's scalars, as an array without axes; `change` where left out.
    """

    target: str
    form: Any
    change: Change
    scalar: Change | None = None

    def scalars_too(self) -> Change:
        """`change` for NumPy's scalars as well, which stay where the target has no arrays without axes."""
        target, change, scalar = self.target, self.change, self.scalar or self.change

        def change_any(x: Any) -> Any:
            if not isinstance(x, np.generic):
                return change(x)
            if target == "numpy" or not is_array(x):
                return x
            try:
                registry.framework(target).supports("float32", ())
            except ArrayNotSupportedError:  # it has no arrays without axes
                return x
            return scalar(np.asarray(x))

        return change_any


class DecoratedCall:
    """Calls a function in three parts; it is pickled as what they are made of."""

    def __init__(self, compose: Callable[[Any, Any], Parts], fn: Callable[..., Any], options: Any) -> None:
        self._compose(compose, fn, options)

    def _compose(self, compose: Callable[[Any, Any], Parts], fn: Callable[..., Any], options: Any) -> None:
        self.origin = compose, fn, options
        self.fn, self.label = fn, label_of(fn)
        self.bring, self.run, self.give_back, self.traced = compose(fn, options)

    def __getstate__(self) -> Any:
        return self.origin

    def __setstate__(self, origin: Any) -> None:
        self._compose(*origin)

    def __call__(self, args: Args, kwargs: Kwargs) -> Any:
        if "torch._dynamo" in sys.modules and being_compiled():
            return self.traced(args, kwargs)
        if open_logs:
            with self._recorded(annotate=True) as span:
                result = self.run(args, kwargs)
                span.device = device_words(result)
                return self.give_back(result, args, kwargs)
        return self.give_back(self.run(args, kwargs), args, kwargs)

    async def awaited(self, args: Args, kwargs: Kwargs) -> Any:
        """The same for a coroutine function."""
        with self._recorded(annotate=False):
            brought, named, _ = self.bring(args, kwargs)
            return self.give_back(await self.fn(*brought, **named), args, kwargs)

    def _recorded(self, *, annotate: bool) -> AbstractContextManager[Any]:
        """What an open trace records of a call that begins now."""
        span = trace.span("call", self.label, annotate=annotate) if open_logs else None
        return nullcontext(_Unheard()) if span is None else span


class _Unheard:
    """A call of which no trace hears."""

    device = ""


# -- functions that are only declared ------------------------------------------------------------------


def as_declared(fn: Callable[..., Any], contract: Callable[[Any], Any] | None) -> Parts:
    """A function that runs as it is, and whose result is checked."""
    label = label_of(fn)

    def run(args: Args, kwargs: Kwargs) -> Any:
        return fn(*args, **kwargs)

    def give_back(result: Any, args: Args, kwargs: Kwargs) -> Any:
        return check_result(contract, result, label)

    def bring(args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs, Any]:
        return args, kwargs, None

    return Parts(bring, run, give_back, lambda args, kwargs: give_back(run(args, kwargs), args, kwargs))


def check_result(contract: Callable[[Any], Any] | None, result: Any, label: str) -> Any:
    """The result, if it keeps the contract.

    Raises:
        ValueError: it does not.
    """
    verdict = None if contract is None else contract(result)
    # A contract that raises by itself need not return anything.
    if verdict is not None and not verdict:
        name = getattr(contract, "__name__", repr(contract))
        raise ValueError(f"{label}(): the result breaks its contract {name}")
    return result


# -- functions that run in a framework -----------------------------------------------------------------


def in_framework(fn: Callable[..., Any], options: DecoratorOptions) -> Parts:
    """A function that runs in one framework, whatever arrays it is called with."""
    bring = _bringing(fn, options)
    run = _running(fn, options, bring)
    give_back = _giving_back(fn, options)

    def whole(args: Args, kwargs: Kwargs) -> Any:
        return give_back(run(args, kwargs), args, kwargs)

    return Parts(bring, run, give_back, _traced(fn, options, whole, give_back))


def _traced(
    fn: Callable[..., Any],
    options: DecoratorOptions,
    whole: Callable[[Args, Kwargs], Any],
    give_back: Callable[[Any, Args, Kwargs], Any],
) -> Callable[[Args, Kwargs], Any]:
    """A call that torch.compile traces: tensors that stay go through one graph."""
    plain = (
        options.framework == "torch"
        and options.output_type in ("torch", "input")
        and options.dtype is None
        and options.dtype_conversion is DtypeConversion.NATIVE_OUTPUT
        and options.contract is None
        and not (options.strict or options.oom_recovery or options.slice_by_slice)
    )
    if not plain:
        return lambda args, kwargs: untraced(whole, args, kwargs)

    def traced(args: Args, kwargs: Kwargs) -> Any:
        device = None if options.device is None else str(options.device).replace("gpu", "cuda")
        if options.gpu_id is not None:
            device = f"cuda:{card_meant(options.gpu_id)}"
        if busy_workers or not stays_traced((args, kwargs), device):
            return untraced(whole, args, kwargs)
        result = fn(*args, **kwargs)
        return result if stays_traced(result, None) else untraced(give_back, result, args, kwargs)

    return traced


# -- arguments -----------------------------------------------------------------------------------------


def _bringing(fn: Callable[..., Any], options: DecoratorOptions) -> Bring:
    """What converts the arguments, which stay with the caller as they came."""
    label, skip, strict = label_of(fn), int(takes_self(fn)), options.strict
    cast = rf'Pass dtype= to the decorator to ask for a cast: @{options.framework}(dtype="\1")\2'
    incoming = _entering(options)

    def bring(args: Args, kwargs: Kwargs, way: Way = incoming) -> tuple[Sequence[Any], Kwargs, Any]:
        by_type = _NONE if open_logs or busy_workers else plans.by_form.get(way.form, _NONE)
        enter = way.change
        values: list[Any] = []
        array, word = None, ""
        try:
            if skip:
                values += args[:skip]
            for value in args[skip:] if skip else args:
                plan = by_type.get(type(value))
                if plan is None:
                    new = map_arrays(value, enter)
                else:
                    try:
                        array = new = plan(value)
                    except plans.declined:
                        array = new = enter(value)
                values.append(new)
            named = kwargs
            if kwargs:
                named = {}
                for word, value in kwargs.items():
                    named[word] = map_arrays(value, enter)
        except MemoryConversionError as error:
            _say(error, f"{label}(), argument {_parameter(fn, word or len(values))}", cast)
            raise
        if array is None:
            array = _first_array(values[skip:], named)
        if array is None or strict:
            _refuse_tables(fn, args, kwargs, skip)
        return values, named, array

    if options.gpu_id == "auto":
        return lambda args, kwargs: bring(args, kwargs, _to_freest(options))
    if options.gpu_id is None and (options.device is None or options.device.kind == "cpu"):
        return bring

    def bring_with_one_warning(args: Args, kwargs: Kwargs) -> tuple[Sequence[Any], Kwargs, Any]:
        with OneWarning():
            return bring(args, kwargs)

    return bring_with_one_warning


#: Plans of a form that has none.
_NONE: dict[type, Change] = {}


def _entering(options: DecoratorOptions) -> Way:
    """How the arguments come to the framework."""
    name, convert = options.framework, _converter(options)
    device = None if options.device is None else str(options.device)
    form: Any = _form(name, options, device)
    if device is not None:
        enter = _planned(form, _to_device(options, convert))
    elif options.gpu_id is not None and name != "numpy":  # NumPy lives on the host, whatever gpu_id says
        form, enter = None, _to_device(options, convert)
    else:

        def careful(x: Any) -> Any:
            # A worker of `device_map` has a device, for functions that name none.
            return convert(x, device=worker_device.get() if name != "numpy" else None)

        enter = _planned(form, careful)
    if not options.strict:
        return Way(name, form, enter)

    def enter_if_declared(x: Any) -> Any:
        check_source(x, options)
        return enter(x)

    return Way(name, None, enter_if_declared)


def check_source(x: Any, options: DecoratorOptions) -> None:
    """Refuse an array of another framework than the one that is declared.

    Raises:
        SourceMismatchError: it is.
    """
    declared, source = options.input_type, source_of(x)[0]
    if source.name != declared:
        raise SourceMismatchError(
            f"it takes arrays of {declared} alone (strict=True), and this one is of {source.name}; convert it"
            f" with to_{declared}(), or leave strict=True out to have it converted",
            source_type=source.name,
            target_type=options.framework,
            reason=f"declared {declared}, found {source.name}",
        )


def _form(target: str, options: DecoratorOptions, device: str | None = None) -> Any:
    """The form of a conversion, for its plans."""
    if device is None and options.dtype is None and options.grad != "detach":
        return target
    return plans.form_of(target, _grad(options), options.dtype, device)


def _grad(options: DecoratorOptions) -> Grad:
    return "detach" if options.grad == "detach" else "error"


def _converter(options: DecoratorOptions) -> Callable[..., Any]:
    """`convert_memory` to the framework, with what the options say besides where."""
    return partial(convert_memory, target=options.framework, grad=_grad(options), dtype=options.dtype)


def _planned(form: Any, careful: Change) -> Change:
    """What converts one array by its plan, as `convert_memory` would, and where it has none carefully."""

    def change(x: Any) -> Any:
        if not open_logs and not busy_workers:
            try:
                return plans.by_form[form][type(x)](x)
            except plans.declined:
                pass
        return careful(x)

    return change


def _to_device(options: DecoratorOptions, convert: Callable[..., Any]) -> Change:
    """What brings one array to the device that the decorator names."""
    name = options.framework
    words = None if options.device is None else str(options.device)

    def enter(x: Any) -> Any:
        framework = registry.framework(name)
        if options.dtype is None and not open_logs and framework.owns(x):
            device, target = framework.device_of(x), _named_device(framework, options)
            same = device.kind == target.kind and device.index == target.index
            if same and not framework.pool.is_scattered(x):
                return x
        return convert(x, gpu_id=card_meant(options.gpu_id), device=words)

    return enter


def _named_device(framework: Framework, options: DecoratorOptions) -> Device:
    """The device that the decorator names, ``"auto"`` aside."""
    if options.device is not None:
        return Device.parse(options.device)
    return framework.accelerator(int(card_meant(options.gpu_id) or 0))


def _to_freest(options: DecoratorOptions) -> Way:
    """To the device with the most free memory, all arrays of a call to the same."""
    name, convert = options.framework, _converter(options)
    target: Device | None = None

    def enter(x: Any) -> Any:
        nonlocal target
        if target is not None:
            return convert(x, device=target)
        new = convert(x, gpu_id=card_meant("auto"))
        target = registry.framework(name).device_of(new)
        return new

    return Way(name, None, enter)


def _refuse_tables(fn: Callable[..., Any], args: Args, kwargs: Kwargs, skip: int) -> None:
    """Refuse what could be made an array and is none, as a table of pandas.

    The function was written for arrays, and would be run on what its framework does not know.
    """
    places: list[tuple[int | str, Any]] = [*enumerate(args[skip:], skip)]
    for place, value in [*places, *kwargs.items()]:
        for leaf in leaves_of(value):
            if hasattr(type(leaf), "__array__") and not (is_array(leaf) or isinstance(leaf, np.generic)):
                error = registry.unknown_array(leaf)
                prefix(error, f"{label_of(fn)}(), argument {_parameter(fn, place)}")
                raise error


def _parameter(fn: Callable[..., Any], place: int | str) -> str:
    """The name of an argument by its position or keyword, for a message."""
    if isinstance(place, str):
        return repr(place)
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):  # a callable written in C may have no signature
        return str(place)
    for i, parameter in enumerate(parameters):
        if parameter.kind is parameter.VAR_POSITIONAL:
            return f"*{parameter.name}[{place - i}]"
        if i == place:
            return repr(parameter.name)
    return str(place)


def _say(error: MemoryConversionError, place: str, cast: str) -> None:
    """Say in an error of a conversion where it was, and how a decorated function asks for a cast."""
    prefix(error, place)
    if isinstance(error, DtypeNotSupportedError):
        error.args = (re.sub(r'Pass dtype="(\w+)"(.*) to ask for a cast', cast, str(error)),)


# -- the function --------------------------------------------------------------------------------------


def _running(
    fn: Callable[..., Any],
    options: DecoratorOptions,
    bring: Bring,
) -> Callable[[Args, Kwargs], Any]:
    """What calls the function, on its own stream and device, and again where memory runs out."""
    skip = int(takes_self(fn))
    body = partial(call_by_planes, fn, skip) if options.slice_by_slice else fn
    placed = options.device is not None or (options.gpu_id is not None and options.framework != "numpy")
    queued = options.stream

    framework: Framework | None = None

    def run(args: Args, kwargs: Kwargs) -> Any:
        nonlocal framework
        brought, named, array = bring(args, kwargs)
        if array is None:
            if placed:
                with _selected(options):
                    return body(*brought, **named)
        elif queued:
            if framework is None:
                framework = registry.framework(options.framework)
            if framework.streams.has_queues:
                # `brought` lives until the stream of the caller waits for this one.
                with framework.streams.stream(framework.device_of(array)):
                    result = body(*brought, **named)
                return handed_over(result, framework)
        return body(*brought, **named)

    return _recovering(run, options, skip) if options.oom_recovery else run


def handed_over(result: Any, framework: Framework) -> Any:
    """What a function made on a stream of its own, to be read and freed on that of its caller."""
    return map_arrays(result, lambda x: framework.streams.take_over(x) if framework.owns(x) else x)


@contextmanager
def _selected(options: DecoratorOptions) -> Iterator[None]:
    """No array brings the device along: it is selected for those that the function makes."""
    if card_meant(options.gpu_id) == "auto":
        yield
        return
    framework = registry.framework(options.framework)
    with framework.selected(find_or_host(framework, _named_device(framework, options))):
        yield


def _recovering(
    run: Callable[[Args, Kwargs], Any], options: DecoratorOptions, skip: int
) -> Callable[[Args, Kwargs], Any]:
    """What runs again, or in parts, where memory runs out; the conversions too, for which it may as well."""
    split = options.oom_recovery == "split"
    least, axis = options.min_split, options.split_axis
    plain: Change = batches.plain if split else lambda tree: tree

    def recover(args: Args, kwargs: Kwargs) -> Any:
        failure = None
        if not faults:
            result, failure = attempted(run, (plain(args), plain(kwargs)), {}, sys.exception())
            if failure is None:
                return plain(result)
        own, batch = args[:skip], args[skip:]
        gpu_id = card_meant(options.gpu_id)
        card = gpu_id if isinstance(gpu_id, int) else None
        plan = Plan(options.max_retries, card, split=split, axis=axis, least=least)
        try:
            return recovered(lambda *args, **kwargs: run((*own, *args), kwargs), batch, kwargs, plan, failure)
        finally:
            del failure  # whose traceback holds this frame

    return recover


# -- results -------------------------------------------------------------------------------------------


def _giving_back(fn: Callable[..., Any], options: DecoratorOptions) -> Callable[[Any, Args, Kwargs], Any]:
    """What converts the arrays of a result as the options say, and checks the contract."""
    label, skip, contract = label_of(fn), int(takes_self(fn)), options.contract
    conversion, grad = options.dtype_conversion, _grad(options)
    by_input = options.output_type == "input"
    outgoing = None if by_input else _to_framework(options.output_type, grad)
    to_numpy = _to_framework("numpy", grad)

    def give_back(result: Any, args: Args, kwargs: Kwargs, way: Way = outgoing or to_numpy) -> Any:
        by_type = _NONE if open_logs or way.form is None else plans.by_form.get(way.form, _NONE)
        cls = type(result)
        plan = by_type.get(cls)
        try:
            if plan is not None:
                try:
                    result = plan(result)
                except plans.declined:
                    result = way.change(result)
            elif (kind := kinds.get(cls) or kind_of(result)) == ARRAY:
                result = way.change(result)
            elif kind == TREE or isinstance(result, np.generic):
                result = map_arrays(result, way.scalars_too(), also=np.generic)
        except MemoryConversionError as error:
            _say(error, f"{label}(), result", r'Cast it to "\1"\2 in the function')
            raise
        return result if contract is None else check_result(contract, result, label)

    def give_back_by_input(result: Any, args: Args, kwargs: Kwargs) -> Any:
        first = _first_array(args[skip:], kwargs)
        way = outgoing or (to_numpy if type(first) is np.ndarray else _home(first, grad))
        if conversion is not DtypeConversion.NATIVE_OUTPUT:
            way = _in_dtype(way, conversion, first)
        return give_back(result, args, kwargs, way)

    return give_back_by_input if by_input or conversion is not DtypeConversion.NATIVE_OUTPUT else give_back


def _to_framework(target: str, grad: Grad) -> Way:
    """To a framework, wherever its arrays live."""
    form = target if grad == "error" else plans.form_of(target, grad)
    return Way(target, form, _planned(form, lambda x: convert_memory(x, target, grad=grad)))


def _home(first: Any, grad: Grad) -> Way:
    """To the framework and the device of what the caller brought."""
    if first is None:
        return Way("numpy", None, lambda x: x)
    source, origin = source_of(first)

    def change(x: Any) -> Any:
        owner, array = source_of(x)
        home, place = source.device_of(origin), owner.device_of(array)
        if source.name != "numpy" and (home.kind != place.kind or home.index != place.index):
            return convert_memory(x, source.name, grad=grad, device=home)
        return x if owner is source and not open_logs else convert_memory(x, source.name, grad=grad)

    return Way(source.name, None, change)


def _in_dtype(way: Way, conversion: DtypeConversion, first: Any) -> Way:
    """The same way, and the dtype is converted."""
    dtype = conversion.value
    if conversion is DtypeConversion.PRESERVE_INPUT:
        if first is None:
            return way
        source, array = source_of(first)
        dtype = source.dtype_name(array)

    def change(x: Any) -> Any:
        dtypes = source_of(x)[0].dtypes
        if dtypes is None or dtype in dtypes:
            return way.change(convert_dtype(x, dtype))
        return convert_dtype(way.change(x), dtype)  # its own framework has no such dtype

    return Way(way.target, None, change, way.change)


def _first_array(args: Sequence[Any], kwargs: Kwargs) -> Any:
    """The first array among the arguments, in containers too; None where there is none."""
    for value in (*args, *kwargs.values()):
        kind = kinds.get(type(value)) or kind_of(value)
        if kind == ARRAY:
            return value
        if kind == TREE:
            for leaf in leaves_of(value):
                if (kinds.get(type(leaf)) or kind_of(leaf)) == ARRAY:
                    return leaf
    return None
