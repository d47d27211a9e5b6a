"""How the results of a decorated function go back to its caller."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from arraybridge.arrays import ARRAY, is_carrier, kinds, source_of
from arraybridge.carriers.carrier import carrier_of
from arraybridge.conversion.convert import convert_memory
from arraybridge.conversion.trace import open_logs
from arraybridge.errors import ArrayNotSupportedError, DtypeNotSupportedError, MemoryConversionError
from arraybridge.frameworks.base import Framework
from arraybridge.functions.arguments import Args, Kwargs, first_array, say, unmark_of
from arraybridge.functions.conversions import ByType, Change, conversion, shared
from arraybridge.functions.dtypes import DtypeConversion, convert_dtype
from arraybridge.functions.options import DecoratorOptions
from arraybridge.functions.wrap import label_of
from arraybridge.trees import map_arrays

#: What returns the result for the caller, given the arguments as they came.
GiveBack = Callable[[Any, Args, Kwargs], Any]
#: The caller's first array, its framework, and it as an array of that: of a carrier the one that it carries.
Home = tuple[Any, Framework, Any]
#: What changes one array of a result, given where the first argument came from; None where nobody asks.
Deliver = Callable[[Home | None, Any], Any]


def giving_back(fn: Callable[..., Any], skip: int, options: DecoratorOptions) -> GiveBack:
    """What converts the arrays of a result as the options say, and checks the contract."""
    label, contract, by_input = label_of(fn), options.contract, options.output_type == "input"
    target, unmark = "numpy" if by_input else options.output_type, unmark_of(options)
    recasts = options.dtype_conversion is not DtypeConversion.NATIVE_OUTPUT
    planned = shared(_planned, target, options.grad, unmark)
    deliver = _homeward(options.grad) if by_input else _to_framework(target, options.grad)
    leave = _leaf(_recasting(deliver, options.dtype_conversion) if recasts else deliver, deliver)

    def by_home(result: Any, args: Args, kwargs: Kwargs) -> Any:
        first = first_array((*args[skip:], *kwargs.values()) if skip or kwargs else args)
        if type(first) is np.ndarray and not (recasts or open_logs):
            return planned[type(result)](result)
        home = None if first is None else (first, *source_of(first))
        if kinds.get(type(result)) == ARRAY:
            return leave(home, result)
        return map_arrays(unmark(result), partial(leave, home), also=np.generic)

    def give_back(result: Any, args: Args, kwargs: Kwargs) -> Any:
        try:
            if by_input or recasts or open_logs:
                result = by_home(result, args, kwargs)
            else:
                result = planned[type(result)](result)
        except MemoryConversionError as error:
            say(error, f"{label}(), result", r'Cast it to "\1"\2 in the function')
            raise
        return result if contract is None else check_result(contract, result, label)

    return give_back


def _planned(target: str, grad: Any, unmark: Change) -> ByType:
    _, form = conversion(target, None, grad)
    deliver = _to_framework(target, grad)
    return ByType(partial(_leaf(deliver, deliver), None), form, unmark, np.generic)


def _leaf(change: Deliver, deliver: Deliver) -> Deliver:
    """``change`` for arrays, and ``deliver`` for NumPy's scalars, where these become arrays elsewhere."""

    def leave(home: Home | None, x: Any) -> Any:
        if kinds.get(type(x)) == ARRAY:
            return change(home, x)
        if not isinstance(x, np.generic):
            return x if is_carrier(x) else change(home, x)  # a carrier that the function made stays one
        try:
            array = deliver(home, np.asarray(x))
        except (ArrayNotSupportedError, DtypeNotSupportedError):
            return x
        return x if isinstance(array, np.ndarray) else array

    return leave


def _to_framework(target: str, grad: Any) -> Deliver:
    """What takes an array to this framework, wherever the arguments came from."""
    convert, _ = conversion(target, None, grad)
    return lambda _, x: convert(x)


def _homeward(grad: Any) -> Deliver:
    """What takes an array to the framework, the device and the carrier of what the caller brought."""

    def deliver(home: Home | None, x: Any) -> Any:
        if home is None:
            return x
        first, framework, origin = home
        device = framework.device_of(origin)
        if open_logs or not framework.owns(x) or framework.device_of(x) != device:
            x = convert_memory(x, framework.name, grad=grad, device=device)
        carrier = None if kinds.get(type(first)) else carrier_of(first)
        return x if carrier is None or x.shape != framework.shape(origin) else carrier.rebuild(first, x)

    return deliver


def _recasting(deliver: Deliver, dtype_conversion: DtypeConversion) -> Deliver:
    """``deliver``, which also converts the dtype."""

    def change(home: Home | None, x: Any) -> Any:
        dtype = dtype_conversion.value
        if dtype_conversion is DtypeConversion.PRESERVE_INPUT:
            if home is None:
                return deliver(home, x)
            _, framework, array = home
            dtype = framework.dtype_name(array)
        dtypes = source_of(x)[0].dtypes
        if dtypes is None or dtype in dtypes:
            return deliver(home, convert_dtype(x, dtype))
        return convert_dtype(deliver(home, x), dtype)  # its own framework has no such dtype

    return change


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
