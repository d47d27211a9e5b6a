"""How the results of a decorated function go back to its caller."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

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


def giving_back(fn: Callable[..., Any], skip: int, options: DecoratorOptions) -> GiveBack:
    """What converts the arrays of a result as the options say, and checks the contract."""
    label, contract, dtype_conversion = label_of(fn), options.contract, options.dtype_conversion
    grad = "detach" if options.grad == "detach" else "error"
    output, by_input = options.output_type, options.output_type == "input"
    form, to_output = conversion("numpy" if by_input else output, grad)

    def give_back(
        result: Any,
        args: Args,
        kwargs: Kwargs,
        form: Any = form,
        change: Change = to_output,
        deliver: Change = to_output,
        first: Any = None,
    ) -> Any:
        cls = type(result)
        plan = None if open_logs else by_form.get(form, no_plans).get(cls)
        try:
            if plan is not None:
                try:
                    result = plan(result)
                except plans.declined:
                    result = change(result)
            elif (kind := kinds.get(cls) or kind_of(result)) == ARRAY:
                result = _leaf(change, deliver, output, first, result)
            elif kind == TREE or isinstance(result, np.generic):
                result = map_arrays(result, partial(_leaf, change, deliver, output, first), also=np.generic)
        except MemoryConversionError as error:
            say(error, f"{label}(), result", r'Cast it to "\1"\2 in the function')
            raise
        return result if contract is None else check_result(contract, result, label)

    def give_back_by_input(result: Any, args: Args, kwargs: Kwargs) -> Any:
        first = first_array(args[skip:] if skip else args, kwargs)
        if not by_input or type(first) is np.ndarray:
            way, deliver = form, to_output
        else:
            way, deliver = None, _as_it_is if first is None else _homeward(first, grad)
        if native:
            return give_back(result, args, kwargs, way, deliver, deliver, first)
        return give_back(
            result, args, kwargs, None, _recasting(deliver, dtype_conversion, first), deliver, first
        )

    native = dtype_conversion is DtypeConversion.NATIVE_OUTPUT
    return give_back if native and not by_input else give_back_by_input


def _as_it_is(x: Any) -> Any:
    return x


def _homeward(first: Any, grad: Any) -> Change:
    """What brings an array to the framework, the device and the carrier of what the caller brought."""
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
        return change

    def carried(x: Any) -> Any:
        array = change(x)
        return carrier.rebuild(first, array) if array.shape == source.shape(origin) else array

    return carried


def _leaf(change: Change, deliver: Change, output: str, first: Any, x: Any) -> Any:
    """An array, or one of NumPy's scalars: an array without axes elsewhere, where there are such arrays."""
    if kinds.get(type(x)) == ARRAY:
        return change(x)
    if not isinstance(x, np.generic):
        return x if is_carrier(x) else change(x)  # a carrier that the function made stays one
    if output == "input":
        output = "numpy" if first is None else source_of(first)[0].name
    if output == "numpy" or not is_array(x):
        return x
    try:
        registry.framework(output).supports("float32", ())
    except ArrayNotSupportedError:  # it has no arrays without axes
        return x
    return deliver(np.asarray(x))


def _recasting(deliver: Change, dtype_conversion: DtypeConversion, first: Any) -> Change:
    """``deliver``, which also converts the dtype."""
    dtype = dtype_conversion.value
    if dtype_conversion is DtypeConversion.PRESERVE_INPUT:
        if first is None:
            return deliver
        source, array = source_of(first)
        dtype = source.dtype_name(array)

    def change(x: Any) -> Any:
        dtypes = source_of(x)[0].dtypes
        if dtypes is None or dtype in dtypes:
            return deliver(convert_dtype(x, dtype))
        return convert_dtype(deliver(x), dtype)  # its own framework has no such dtype

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
