"""How the arguments of a decorated function come to its framework."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import numpy as np

from arraybridge.arrays import ARRAY, LEAF, TREE, is_array, kind_of, kinds, source_of
from arraybridge.batches import plain
from arraybridge.conversion import plans
from arraybridge.conversion.convert import convert_memory
from arraybridge.conversion.plans import by_form
from arraybridge.conversion.trace import open_logs
from arraybridge.errors import DtypeNotSupportedError, MemoryConversionError, SourceMismatchError
from arraybridge.frameworks import registry
from arraybridge.frameworks.base import CPU, Framework
from arraybridge.functions.options import DecoratorOptions
from arraybridge.functions.wrap import label_of
from arraybridge.placement import busy_workers, card_meant, target_device, worker_device
from arraybridge.trees import leaves_of, map_arrays, prefix
from arraybridge.types import Device

__all__ = ["conversion"]

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
#: What changes one array.
Change = Callable[[Any], Any]
#: What returns the arguments as the function wants them, and whether an array is among them.
Bring = Callable[[Args, Kwargs], tuple[list[Any], Kwargs, bool]]
#: Type of an array → what converts it, in a form that nobody has used yet.
no_plans: dict[type, Change] = {}


def bringing(fn: Callable[..., Any], skip: int, options: DecoratorOptions) -> Bring:
    """What converts the arguments but the first ``skip``, self. The caller's own stay as they came."""
    strict, splits = options.strict, options.oom_recovery == "split"
    on_card = options.gpu_id is not None or (options.device is not None and options.device.kind != "cpu")
    form, convert = conversion(options.framework, options.grad, options.device, options.dtype)
    enter, of_one_call = _declared(convert, options), entering(options)

    def bring(args: Args, kwargs: Kwargs) -> tuple[list[Any], Kwargs, bool]:
        by_type, change = no_plans, enter
        if on_card or busy_workers:
            change = _declared(of_one_call(), options)
        elif not open_logs:
            by_type = by_form.get(form, no_plans)
        values: list[Any] = []
        arguments = (*args, *kwargs.values()) if kwargs else args
        if skip:
            values, arguments = [*arguments[:skip]], arguments[skip:]
        arrays = unplanned = False
        try:
            for value in arguments:
                new, cls = value, type(value)
                plan = by_type.get(cls)
                if plan is not None:
                    if strict:
                        check_source(value, options)
                    arrays = True
                    try:
                        new = plan(value)
                    except plans.declined:
                        new = change(value)
                elif kinds.get(cls) != LEAF:
                    unmarked = plain(value) if splits else value
                    new, unplanned = map_arrays(unmarked, change), True
                    arrays = arrays or new is not unmarked
                values.append(new)
        except MemoryConversionError as error:
            cast = rf'Pass dtype= to the decorator to ask for a cast: @{options.framework}(dtype="\1")\2'
            say(error, _argument(fn, args, kwargs, len(values)), cast)
            raise
        arrays = arrays or first_array(values[skip:]) is not None
        if not arrays or (strict and unplanned):
            _refuse_tables(fn, args, kwargs, skip)
        if kwargs:
            kwargs = {word: values.pop(len(args)) for word in kwargs}
        return values, kwargs, arrays

    return bring


def entering(options: DecoratorOptions) -> Callable[[], Change]:
    """What says, for one call, what brings each of its arrays to where the function runs."""
    _, convert = conversion(options.framework, options.grad, options.device, options.dtype)
    named = options.gpu_id is not None or options.device is not None

    def of_one_call() -> Change:
        place = None if named or options.framework == "numpy" else worker_device.get()
        return _to_device(options, place) if named or place is not None else convert

    return of_one_call


def conversion(
    target: str, grad: Any, device: Device | None = None, dtype: str | None = None
) -> tuple[Any, Change]:
    """The form of the plans of such conversions, and what converts one array."""
    form: Any = target
    options: dict[str, Any] = {}
    if grad != "error" or device is not None or dtype is not None:
        options = {"grad": grad, "device": None if device is None else str(device), "dtype": dtype}
        form = plans.form_of(target, **options)

    def convert(x: Any) -> Any:
        if not open_logs:
            try:
                return by_form[form][type(x)](x)
            except plans.declined:
                pass
        return convert_memory(x, target, **options)

    return form, convert


def _declared(change: Change, options: DecoratorOptions) -> Change:
    """``change``, which refuses arrays of another framework than the one that is declared."""

    def checked(x: Any) -> Any:
        check_source(x, options)
        return change(x)

    return checked if options.strict else change


def _to_device(options: DecoratorOptions, device: Device | None) -> Change:
    """What brings the arrays of one call to this device, or to the one that is named: ``"auto"``, to one."""
    framework, dtype = registry.framework(options.framework), options.dtype

    def change(x: Any) -> Any:
        nonlocal device
        device = device or named_device(framework, options)
        stays = dtype is None and not open_logs and framework.owns(x) and framework.device_of(x) == device
        if stays and not framework.pool.is_scattered(x):
            return x
        return convert_memory(x, framework.name, grad=options.grad, device=device, dtype=dtype)

    return change


def named_device(framework: Framework, options: DecoratorOptions) -> Device:
    """The device that a decorator names, as its framework has it."""
    return target_device(framework, framework, CPU, card_meant(options.gpu_id), options.device)


def first_array(values: Iterable[Any]) -> Any:
    """The first array among these values, in containers too; None where there is none."""
    for value in values:
        kind = kinds.get(type(value)) or kind_of(value)
        if kind == ARRAY:
            return value
        if kind == TREE:
            for leaf in leaves_of(value):
                if (kinds.get(type(leaf)) or kind_of(leaf)) == ARRAY:
                    return leaf
    return None


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
    for place, value in enumerate((*args, *kwargs.values())):
        for leaf in leaves_of(value) if place >= skip else ():
            if hasattr(type(leaf), "__array__") and not (is_array(leaf) or isinstance(leaf, np.generic)):
                error = registry.unknown_array(leaf)
                prefix(error, _argument(fn, args, kwargs, place))
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


def say(error: MemoryConversionError, place: str, cast: str) -> None:
    """Say in an error of a conversion where it was, and how a decorated function asks for a cast."""
    prefix(error, place)
    if isinstance(error, DtypeNotSupportedError):
        error.args = (re.sub(r'Pass dtype="(\w+)"(.*) to ask for a cast', cast, str(error)),)
