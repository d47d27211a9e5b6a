"""How the results of a decorated function go back to its caller."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from arraybridge.carriers.carrier import carrier_of
from arraybridge.conversion import plans
from arraybridge.conversion.convert import convert_memory
from arraybridge.conversion.plans import by_form
from arraybridge.conversion.trace import open_logs
from arraybridge.errors import ArrayNotSupportedError, MemoryConversionError
from arraybridge.frameworks import registry
from arraybridge.functions.arguments import Args, Change, Kwargs, conversion, first_array, no_plans, say
from arraybridge.functions.dtypes import DtypeConversion, convert_dtype
from arraybridge.functions.options import DecoratorOptions
from arraybridge.functions.wrap import label_of
from arraybridge.trees import ARRAY, TREE, is_array, is_carrier, kind_of, kinds, map_arrays, source_of

__all__ = ["GiveBack", "check_result", "giving_back"]

#: What returns the result for the caller, given the arguments as they came.
GiveBack = Callable[[Any, Args, Kwargs], Any]


class _Way(NamedTuple):
    """How arrays go back: to which framework, in which form of a conversion (None: in none that is planned).

    ``change`` brings one array there, and ``deliver`` as well, but leaves its dtype.
    """

    target: str
    form: Any
    change: Change
    deliver: Change


def giving_back(fn: Callable[..., Any], skip: int, options: DecoratorOptions) -> GiveBack:
    """What converts the arrays of a result as the options say, and checks the contract."""
    label, contract, dtypes = label_of(fn), options.contract, options.dtype_conversion
    grad = "detach" if options.grad == "detach" else "error"
    by_input = options.output_type == "input"
    outgoing = _to_framework("numpy" if by_input else options.output_type, grad)

    def give_back(result: Any, args: Args, kwargs: Kwargs, way: _Way = outgoing) -> Any:
        plan = None if open_logs else by_form.get(way.form, no_plans).get(type(result))
        try:
            if plan is not None:
                try:
                    result = plan(result)
                except plans.declined:
                    result = way.change(result)
            elif (kind := kinds.get(type(result)) or kind_of(result)) == ARRAY:
                result = _leaf(result, way)
            elif kind == TREE or isinstance(result, np.generic):
                result = map_arrays(result, lambda x: _leaf(x, way), also=np.generic)
        except MemoryConversionError as error:
            say(error, f"{label}(), result", r'Cast it to "\1"\2 in the function')
            raise
        return result if contract is None else check_result(contract, result, label)

    def give_back_by_input(result: Any, args: Args, kwargs: Kwargs) -> Any:
        first = first_array(args[skip:], kwargs)
        way = _home(first, grad) if by_input and type(first) is not np.ndarray else outgoing
        return give_back(result, args, kwargs, way if native else _in_dtype(way, dtypes, first))

    native = dtypes is DtypeConversion.NATIVE_OUTPUT
    return give_back if native and not by_input else give_back_by_input


def _leaf(x: Any, way: _Way) -> Any:
    """An array, or one of NumPy's scalars, which goes as an array without axes where the target has those."""
    if not isinstance(x, np.generic):
        # A carrier that the function made stays one.
        return x if not kinds.get(type(x)) and is_carrier(x) else way.change(x)
    if way.target == "numpy" or not is_array(x):
        return x
    try:
        registry.framework(way.target).supports("float32", ())
    except ArrayNotSupportedError:
        return x
    return way.deliver(np.asarray(x))


def _to_framework(target: str, grad: Any) -> _Way:
    """To a framework, wherever its arrays live."""
    form, change = conversion(target, grad)
    return _Way(target, form, change, change)


def _home(first: Any, grad: Any) -> _Way:
    """To the framework and the device of what the caller brought; nowhere, where that was no array."""
    if first is None:
        return _Way("numpy", None, lambda x: x, lambda x: x)
    source, origin = source_of(first)

    def change(x: Any) -> Any:
        owner, array = source_of(x)
        if source.name != "numpy":
            home, place = source.device_of(origin), owner.device_of(array)
            if home.kind != place.kind or home.index != place.index:
                return convert_memory(x, source.name, grad=grad, device=home)
            if owner is source and not open_logs:
                return x
        return convert_memory(x, source.name, grad=grad)

    carrier = None if kinds.get(type(first)) else carrier_of(first)
    if carrier is None:
        return _Way(source.name, None, change, change)

    def carried(x: Any) -> Any:
        array = change(x)
        return carrier.rebuild(first, array) if array.shape == source.shape(origin) else array

    return _Way(source.name, None, carried, carried)


def _in_dtype(way: _Way, wanted: DtypeConversion, first: Any) -> _Way:
    """The same way, on which arrays get another dtype."""
    dtype = wanted.value
    if wanted is DtypeConversion.PRESERVE_INPUT:
        if first is None:
            return way
        source, array = source_of(first)
        dtype = source.dtype_name(array)

    def change(x: Any) -> Any:
        dtypes = source_of(x)[0].dtypes
        if dtypes is None or dtype in dtypes:
            return way.deliver(convert_dtype(x, dtype))
        return convert_dtype(way.deliver(x), dtype)  # its own framework has no such dtype

    return way._replace(form=None, change=change)


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
