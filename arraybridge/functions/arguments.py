"""How the arguments of a decorated function come to its framework."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from arraybridge.conversion import plans
from arraybridge.conversion.convert import convert_memory
from arraybridge.conversion.plans import by_form
from arraybridge.conversion.trace import open_logs
from arraybridge.errors import DtypeNotSupportedError, MemoryConversionError, SourceMismatchError
from arraybridge.frameworks import registry
from arraybridge.frameworks.base import Framework
from arraybridge.functions.options import DecoratorOptions
from arraybridge.functions.wrap import label_of
from arraybridge.options import OneWarning
from arraybridge.placement import busy_workers, card_meant, worker_device
from arraybridge.trees import ARRAY, TREE, is_array, kind_of, kinds, leaves_of, map_arrays, prefix, source_of
from arraybridge.types import Device

__all__ = [
    "Args",
    "Bring",
    "Change",
    "Kwargs",
    "bringing",
    "check_source",
    "conversion",
    "entering",
    "first_array",
    "named_device",
    "no_plans",
    "say",
]

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
#: What changes one array.
Change = Callable[[Any], Any]
#: What returns the arguments as the function wants them, and an array among them or None.
Bring = Callable[[Args, Kwargs], tuple[Sequence[Any], Kwargs, Any]]
#: Type of an array → what converts it, in a form that nobody has used yet.
no_plans: dict[type, Change] = {}


def bringing(fn: Callable[..., Any], skip: int, options: DecoratorOptions) -> Bring:
    """What converts the arguments but the first ``skip``, self. The caller's own stay as they came."""
    label, strict = label_of(fn), options.strict
    cast = rf'Pass dtype= to the decorator to ask for a cast: @{options.framework}(dtype="\1")\2'
    form, to_framework, in_worker = _entering(options)

    def bring(args: Args, kwargs: Kwargs, enter: Change = to_framework) -> tuple[Sequence[Any], Kwargs, Any]:
        by_type = no_plans if open_logs else by_form.get(form, no_plans)
        if busy_workers:
            by_type, enter = no_plans, in_worker or enter
        values: list[Any] = [*args[:skip]] if skip else []
        array = word = None
        named, unplanned = kwargs, bool(kwargs)
        try:
            for value in args[skip:] if skip else args:
                plan = by_type.get(type(value))
                if plan is None:
                    new, unplanned = map_arrays(value, enter), True
                else:
                    if strict:
                        check_source(value, options)
                    try:
                        array = new = plan(value)
                    except plans.declined:
                        array = new = enter(value)
                values.append(new)
            if kwargs:
                named = {}
                for word, value in kwargs.items():
                    named[word] = map_arrays(value, enter)
        except MemoryConversionError as error:
            say(error, f"{label}(), argument {_parameter(fn, word or len(values))}", cast)
            raise
        if array is None:
            array = first_array(values[skip:], named)
        if array is None or (strict and unplanned):
            _refuse_tables(fn, args, kwargs, skip)
        return values, named, array

    def bring_there(args: Args, kwargs: Kwargs) -> tuple[Sequence[Any], Kwargs, Any]:
        with OneWarning():
            return bring(args, kwargs, _to_freest(options) if options.gpu_id == "auto" else to_framework)

    may_miss = options.gpu_id is not None or (options.device is not None and options.device.kind != "cpu")
    return bring_there if may_miss else bring


def _entering(options: DecoratorOptions) -> tuple[Any, Change, Change | None]:
    """The form of the plans or None, what brings one array to the framework, and what does in a worker."""
    name = options.framework
    device = None if options.device is None else str(options.device)
    form, convert = conversion(name, _grad(options), device, options.dtype)

    def to_device(x: Any) -> Any:
        framework = registry.framework(name)
        if options.dtype is None and not open_logs and framework.owns(x):
            place, target = framework.device_of(x), named_device(framework, options)
            same = place.kind == target.kind and place.index == target.index
            if same and not framework.pool.is_scattered(x):
                return x
        return convert(x) if device is not None else convert(x, gpu_id=card_meant(options.gpu_id))

    def to_worker(x: Any) -> Any:
        # A worker of `device_map` has a device, for functions that name none.
        return convert(x, device=worker_device.get())

    def declared(enter: Change) -> Change:
        def checked(x: Any) -> Any:
            check_source(x, options)
            return enter(x)

        return checked if options.strict else enter

    if options.gpu_id is not None:
        return None, declared(to_device), None
    if device is not None:
        return form, declared(to_device), None
    return form, declared(convert), None if name == "numpy" else declared(to_worker)


def entering(options: DecoratorOptions) -> Callable[[], Change]:
    """What says, for one call, what brings its arrays to the framework."""
    _, enter, in_worker = _entering(options)

    def of_one_call() -> Change:
        if options.gpu_id == "auto":
            return _to_freest(options)
        return in_worker if in_worker and busy_workers else enter

    return of_one_call


def _grad(options: DecoratorOptions) -> Any:
    return "detach" if options.grad == "detach" else "error"


def conversion(
    target: str, grad: Any, device: str | None = None, dtype: str | None = None
) -> tuple[Any, Callable[..., Any]]:
    """The form of the plans, and what converts one array, with more options of `convert_memory`."""
    plain = grad == "error" and device is None and dtype is None
    form: Any = target if plain else plans.form_of(target, grad, dtype, device)
    options = {} if plain else {"grad": grad, "device": device, "dtype": dtype}

    def convert(x: Any, **more: Any) -> Any:
        if not more and not open_logs:
            try:
                return by_form[form][type(x)](x)
            except plans.declined:
                pass
        return convert_memory(x, target, **{**options, **more})

    return form, convert


def named_device(framework: Framework, options: DecoratorOptions) -> Device:
    """The device that a decorator names, ``"auto"`` aside."""
    return options.device or framework.accelerator(int(card_meant(options.gpu_id) or 0))


def _to_freest(options: DecoratorOptions) -> Change:
    """What brings the arrays of one call to the device with the most free memory, all to the same."""
    _, convert = conversion(options.framework, _grad(options), None, options.dtype)
    place: Device | None = None

    def enter(x: Any) -> Any:
        nonlocal place
        new = convert(x, device=place) if place else convert(x, gpu_id=card_meant("auto"))
        place = place or registry.framework(options.framework).device_of(new)
        return new

    return enter


# -- what is refused -----------------------------------------------------------------------------------


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


def _refuse_tables(fn: Callable[..., Any], args: Args, kwargs: Kwargs, skip: int) -> None:
    """Refuse what could be made an array and is none, as a table of pandas.

    The function was written for arrays, and would be run on what its framework does not know.
    """
    places: list[tuple[int | str, Any]] = [*enumerate(args)]
    for place, value in [*places[skip:], *kwargs.items()]:
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


def say(error: MemoryConversionError, place: str, cast: str) -> None:
    """Say in an error of a conversion where it was, and how a decorated function asks for a cast."""
    prefix(error, place)
    if isinstance(error, DtypeNotSupportedError):
        error.args = (re.sub(r'Pass dtype="(\w+)"(.*) to ask for a cast', cast, str(error)),)


def first_array(args: Sequence[Any], kwargs: Kwargs) -> Any:
    """The first array among the arguments, in containers too; None where there is none."""
    for value in (*args, *kwargs.values()) if kwargs else args:
        kind = kinds.get(type(value)) or kind_of(value)
        if kind == ARRAY:
            return value
        if kind == TREE:
            for leaf in leaves_of(value):
                if (kinds.get(type(leaf)) or kind_of(leaf)) == ARRAY:
                    return leaf
    return None
