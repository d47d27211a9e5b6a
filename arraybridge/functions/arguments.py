"""How the arguments of a decorated function come to its framework."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import numpy as np

from arraybridge.arrays import ARRAY, LEAF, TREE, is_array, kind_of, kinds
from arraybridge.batches import plain
from arraybridge.conversion.convert import convert_memory
from arraybridge.conversion.decide import find_source
from arraybridge.conversion.destination import target_device
from arraybridge.conversion.trace import open_logs
from arraybridge.errors import MemoryConversionError
from arraybridge.frameworks import registry
from arraybridge.frameworks.base import CPU, Framework
from arraybridge.frameworks.foreign import unknown_array
from arraybridge.frameworks.parts import itself
from arraybridge.functions.conversions import ByType, Change, careful, conversion, shared
from arraybridge.functions.options import DecoratorOptions
from arraybridge.functions.wrap import label_of
from arraybridge.options import Placement, busy_workers, card_meant, worker_device
from arraybridge.trees import leaves_of, prefix
from arraybridge.types import Device

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
#: What returns the arguments as the function wants them, and whether an array is among them.
Bring = Callable[[Args, Kwargs], tuple[list[Any], Kwargs, bool]]


def bringing(fn: Callable[..., Any], skip: int, options: DecoratorOptions) -> Bring:
    """What converts the arguments but the first ``skip``, self. The caller's own stay as they came."""
    unmark, strict, of_one_call = unmark_of(options), options.strict, entering(options)
    planned = shared(_planned, *_asked(options), unmark)
    on_card = options.gpu_id is not None or (options.device is not None and options.device.kind != "cpu")

    def bring(args: Args, kwargs: Kwargs) -> tuple[list[Any], Kwargs, bool]:
        by_type: dict[type, Change] = planned
        if on_card or busy_workers or open_logs:
            by_type = careful(of_one_call(), unmark)
        arguments = args[skip:] if skip else args
        if kwargs:
            arguments = (*arguments, *kwargs.values())
        values: list[Any] = []
        try:
            for value in arguments:
                values.append(by_type[type(value)](value))  # noqa: PERF401  # their number tells which it was
        except MemoryConversionError as error:
            cast = rf'Pass dtype= to the decorator to ask for a cast: @{options.framework}(dtype="\1")\2'
            say(error, _argument(fn, args, kwargs, skip + len(values)), cast)
            raise
        # Most functions have an array for their first argument, or one that was just converted.
        arrays = len(values) > 0 and (kinds.get(type(values[0])) == ARRAY or values[0] is not arguments[0])
        if strict or not arrays:
            arrays = first_array(values) is not None
            if strict or not arrays:
                _refuse_tables(fn, args, kwargs, skip)
        if skip:
            values[:0] = args[:skip]
        if kwargs:
            kwargs = {word: values.pop(len(args)) for word in kwargs}
        return values, kwargs, arrays

    return bring


def unmark_of(options: DecoratorOptions) -> Change:
    """What takes off the marks of `fixed`, which say what is not to be split."""
    return plain if options.oom_recovery == "split" else itself


def _asked(options: DecoratorOptions) -> tuple[Any, ...]:
    """What `conversion` is told of the arguments."""
    device = None if options.device is None else str(options.device)
    return options.framework, options.declared, options.grad, options.dtype, device


def _planned(target: str, declared: str | None, grad: Any, dtype: Any, device: Any, unmark: Change) -> ByType:
    return ByType(*conversion(target, declared, grad, dtype, device), unmark)


def entering(options: DecoratorOptions) -> Callable[[], Change]:
    """What says, for one call, what brings each of its arrays to where the function runs."""
    convert, _ = conversion(*_asked(options))
    named = options.gpu_id is not None or options.device is not None

    def of_one_call() -> Change:
        place = None if named or options.framework == "numpy" else worker_device.get()
        return _to_device(options, place) if named or place is not None else convert

    return of_one_call


def _to_device(options: DecoratorOptions, device: Device | None) -> Change:
    """What brings the arrays of one call to this device, or to the one that is named: ``"auto"``, to one."""
    framework, declared, dtype = registry.framework(options.framework), options.declared, options.dtype
    may_stay = dtype is None and declared in (None, framework.name) and not open_logs

    def change(x: Any) -> Any:
        nonlocal device
        device = device or named_device(framework, options)
        stays = may_stay and framework.owns(x) and framework.device_of(x) == device
        if stays and not framework.is_scattered(x):
            return x
        return convert_memory(x, declared, framework.name, grad=options.grad, device=device, dtype=dtype)

    return change


def named_device(framework: Framework, options: DecoratorOptions | Placement) -> Device:
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
    find_source(x, options.declared, options.framework)


def _refuse_tables(fn: Callable[..., Any], args: Args, kwargs: Kwargs, skip: int) -> None:
    """Refuse what could be made an array and is none, as a table of pandas.

    The function was written for arrays, and would be run on what its framework does not know.
    """
    for place, value in enumerate((*args, *kwargs.values())):
        if place < skip or kinds.get(type(value)) in (LEAF, ARRAY):
            continue
        for leaf in leaves_of(value):
            if hasattr(type(leaf), "__array__") and not (is_array(leaf) or isinstance(leaf, np.generic)):
                error = unknown_array(leaf)
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
    """Say in an error of a conversion where it was, and which options of a decorator would help."""
    prefix(error, place)
    words = str(error).replace("leave the source out", "leave strict=True out")
    error.args = (re.sub(r'Pass dtype="(\w+)"(.*) to ask for a cast', cast, words),)
