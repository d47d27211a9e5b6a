"""How the results of a decorated function go back to its caller."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from arraybridge.arrays import ARRAY, LEAF, is_array, is_carrier, kinds, source_of
from arraybridge.batches import plain
from arraybridge.carriers.carrier import carrier_of
from arraybridge.conversion import plans
from arraybridge.conversion.convert import convert_memory
from arraybridge.conversion.plans import by_form
from arraybridge.conversion.trace import open_logs
from arraybridge.errors import ArrayNotSupportedError, MemoryConversionError
from arraybridge.frameworks import registry
from arraybridge.frameworks.base import Framework
from arraybridge.functions.arguments import Args, Change, Kwargs, conversion, first_array, no_plans, say
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
    label, contract, splits = label_of(fn), options.contract, options.oom_recovery == "split"
    by_input = options.output_type == "input"
    recasts = options.dtype_conversion is not DtypeConversion.NATIVE_OUTPUT
    form, convert = conversion("numpy" if by_input else options.output_type, options.grad)
    deliver: Deliver = _homeward(convert, options.grad) if by_input else lambda _, x: convert(x)
    leave = _leaving(_recasting(deliver, options.dtype_conversion) if recasts else deliver, deliver, options)

    def give_back(result: Any, args: Args, kwargs: Kwargs) -> Any:
        cls, first, planned = type(result), None, form
        if by_input or recasts:
            first = first_array((*args[skip:], *kwargs.values()) if skip or kwargs else args)
            planned = form if by_input and type(first) is np.ndarray and not recasts else None
        plan = None if open_logs else by_form.get(planned, no_plans).get(cls)
        try:
            if plan is not None:
                try:
                    result = plan(result)
                except plans.declined:
                    result = convert(result)
            elif kinds.get(cls) != LEAF or isinstance(result, np.generic):
                home = None if first is None else (first, *source_of(first))
                if kinds.get(cls) == ARRAY:
                    result = leave(home, result)
                else:
                    result = plain(result) if splits else result
                    result = map_arrays(result, partial(leave, home), also=np.generic)
        except MemoryConversionError as error:
            say(error, f"{label}(), result", r'Cast it to "\1"\2 in the function')
            raise
        return result if contract is None else check_result(contract, result, label)

    return give_back


def _homeward(to_numpy: Change, grad: Any) -> Deliver:
    """What takes an array to the framework, the device and the carrier of what the caller brought."""

    def deliver(home: Home | None, x: Any) -> Any:
        if home is None:
            return x
        first, framework, origin = home
        if framework.name == "numpy":
            x = to_numpy(x)
        else:
            device = framework.device_of(origin)
            if open_logs or not framework.owns(x) or framework.device_of(x) != device:
                x = convert_memory(x, framework.name, grad=grad, device=device)
        carrier = None if kinds.get(type(first)) else carrier_of(first)
        return x if carrier is None or x.shape != framework.shape(origin) else carrier.rebuild(first, x)

    return deliver


def _leaving(change: Deliver, deliver: Deliver, options: DecoratorOptions) -> Deliver:
    """``change`` for arrays, and ``deliver`` for NumPy's scalars where these are arrays without axes."""
    output = options.output_type

    def leave(home: Home | None, x: Any) -> Any:
        if kinds.get(type(x)) == ARRAY:
            return change(home, x)
        if not isinstance(x, np.generic):
            return x if is_carrier(x) else change(home, x)  # a carrier that the function made stays one
        target = output if output != "input" else "numpy" if home is None else home[1].name
        return deliver(home, np.asarray(x)) if target != "numpy" and _becomes_array(x, target) else x

    return leave


def _becomes_array(scalar: np.generic, target: str) -> bool:
    """Whether one of NumPy's scalars can be an array without axes there."""
    try:
        registry.framework(target).supports("float32", ())
    except ArrayNotSupportedError:  # it has no such arrays
        return False
    return is_array(scalar)


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
