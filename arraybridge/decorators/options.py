"""The options of the decorators, with their types, defaults and checks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal, TypedDict

import numpy as np

from arraybridge.advice import Advice
from arraybridge.conversion.convert import Grad
from arraybridge.conversion.device_resolution import Placement, check_gpu_id, check_placement
from arraybridge.conversion.request import dtype_name
from arraybridge.decorators.dtype_conversion import DtypeConversion, DtypeConversionName
from arraybridge.device import Device, DeviceLike
from arraybridge.errors import UnknownFrameworkError, nearest
from arraybridge.formatting import either, one_of
from arraybridge.interface import registry
from arraybridge.interface.devices import CPU
from arraybridge.types import FrameworkLike, GpuId
from arraybridge.validation import bool_option, raise_unknown_option, whole_number


class DecoratorKeywords(TypedDict, total=False):
    """The options of a decorator, except ``output_type``."""

    # For editors and type checkers. The type of the result depends on `output_type`. The defaults are those
    # of `DecoratorOptions`; a test compares them with the comments here.

    #: The accelerator to run on, or ``"auto"`` for the one with the most free memory. Without it, arrays stay
    #: on their device if the framework has that device, and otherwise move to the host, or to the default
    #: device of a framework that has no host arrays. Defaults to ``None``.
    gpu_id: GpuId
    #: The device to run on, instead of ``gpu_id``. It is a device string such as ``"cpu:1"``, or the device
    #: object of a framework. Defaults to ``None``.
    device: DeviceLike | None
    #: The expected framework of the arguments, available as ``input_memory_type``. Defaults to ``None``.
    input_type: FrameworkLike | None
    #: Whether arrays of frameworks other than ``input_type`` raise an error. Defaults to ``False``.
    strict: bool
    #: ``True`` frees memory and retries when memory runs out; ``"split"`` also divides the batch into parts.
    #: Requires a plain function. Defaults to ``False``.
    oom_recovery: bool | Literal["split"]
    #: The maximum number of retries when memory runs out. Defaults to ``2``; at most 1 with ``"split"``.
    max_retries: int
    #: The axis along which ``oom_recovery="split"`` splits arrays. Defaults to ``0``.
    split_axis: int
    #: The minimum number of rows per part of a split batch. Defaults to ``1``.
    min_split: int
    #: A dtype to which the array arguments are cast. Defaults to ``None``, which keeps their dtypes.
    dtype: Any
    #: The dtype of the arrays in the results, see `DtypeConversion`. Unlike the casts of ``dtype``,
    #: conversions to integers scale floating-point values to the range of the dtype. NumPy scalars keep their
    #: dtype. Defaults to ``DtypeConversion.NATIVE_OUTPUT``, which keeps all dtypes.
    dtype_conversion: DtypeConversion | DtypeConversionName
    #: Whether to call the function for each plane of its 3-D array arguments and stack the resulting arrays.
    #: Results that are not arrays, such as NumPy scalars, are returned in a list. Arrays in containers of
    #: arguments are not split. Requires a plain function. Defaults to ``False``.
    slice_by_slice: bool
    #: A function of the result; if it returns a false value other than None, the call raises `ValueError`.
    #: Defaults to ``None``.
    contract: Callable[[Any], Any] | None
    #: How PyTorch tensors that require grad are converted to another framework. ``"error"`` raises, and
    #: ``"detach"`` drops the graph. Without a conversion, tensors keep their graph. ``"flow"`` accepts arrays
    #: that another framework differentiates. Results are arrays of that framework, whose backward pass
    #: differentiates through the function. Defaults to ``"error"``.
    grad: Grad | Literal["flow"]
    #: Whether the function runs with 64-bit types enabled. Only JAX has this setting. Defaults to ``None``,
    #: which leaves it unchanged, and warns once if a 64-bit array is passed while it is off.
    x64: bool | None
    #: Whether each thread runs the function on a separate CUDA stream. ``False`` uses the caller's stream,
    #: for kernels that are launched on the default stream. Defaults to ``True``.
    stream: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoratorOptions:
    """The checked options of one decorator.

    Attributes:
        framework: The framework of the decorator.
        output_type: The framework of the results, or ``"input"``.
        converts: Whether arguments and results are converted; false for `memory_types`.

    `DecoratorKeywords` describes the other attributes.
    """

    framework: str
    output_type: str
    converts: bool = True
    gpu_id: GpuId = None
    device: Device | None = None
    input_type: str | None = None
    strict: bool = False
    oom_recovery: bool | Literal["split"] = False
    max_retries: int = 2
    split_axis: int = 0
    min_split: int = 1
    dtype: str | None = None
    dtype_conversion: DtypeConversion = DtypeConversion.NATIVE_OUTPUT
    slice_by_slice: bool = False
    contract: Callable[[Any], Any] | None = None
    grad: Grad | Literal["flow"] = "error"
    x64: bool | None = None
    stream: bool = True

    @property
    def warns_of_narrowing(self) -> bool:
        """Whether to warn if the function would compute with fewer bits than its arguments have."""
        return self.x64 is None and self.dtype is None and registry.metadata_of(self.framework).has_x64

    @property
    def placement(self) -> Placement:
        """The device on which the function runs."""
        return Placement(self.framework, self.device, self.gpu_id, self.converts)

    @property
    def required_source(self) -> str | None:
        """The framework that all array arguments must belong to; None for any."""
        return self.input_type if self.strict else None

    @property
    def uses_accelerator(self) -> bool:
        """Whether the options name an accelerator."""
        return self.gpu_id is not None or (self.device or CPU).kind != "cpu"

    @property
    def splits(self) -> bool:
        """Whether the batch is halved when memory runs out."""
        return self.oom_recovery == "split"


def check_keywords(framework: str, keywords: dict[str, Any], *, converts: bool = True) -> DecoratorOptions:
    """Check the options that a caller passed to a decorator, and return them with defaults for the others.

    Args:
        framework: The framework of the decorator.
        keywords: The options that the caller passed.
        converts: Whether arguments and results are converted.

    Raises:
        TypeError: If an option is unknown or of the wrong type.
        ValueError: If an option has an invalid value.
    """
    options = [x for x in _CHECKS if x != "x64" or registry.metadata_of(framework).has_x64]
    for option in keywords:
        if option not in options:
            raise_unknown_option(f"@{framework} has no option", option, options)
    checked = {
        option: value if value is _DEFAULTS[option] else _CHECKS[option](option, value)
        for option, value in keywords.items()
    }
    check_placement(checked.get("gpu_id"), keywords.get("device"))
    if checked.get("strict") and checked.get("input_type") is None:
        raise ValueError(
            "strict=True requires input_type, the only framework that it accepts. Pass it, as in"
            " input_type='numpy'."
        )
    _check_recovery_options(checked)
    if registry.metadata_of(framework).has_only_host:
        checked["gpu_id"] = None  # arrays of this framework are always on the host
    if checked.get("output_type") is None:
        checked["output_type"] = "input" if checked.get("grad") == "flow" else framework
    return DecoratorOptions(framework=framework, converts=converts, **checked)


def _check_recovery_options(options: dict[str, Any]) -> None:
    """Raise `ValueError` for an option that has no effect without ``oom_recovery``."""
    recovery = options.get("oom_recovery")
    for option, needed in (("max_retries", True), ("split_axis", "split"), ("min_split", "split")):
        if option in options and recovery not in (needed, "split"):
            raise ValueError(
                f"{option}={options[option]!r} has no effect without oom_recovery={needed!r}. Pass both, or"
                f" omit {option}."
            )


# -- the checks ----------------------------------------------------------------------------------------


def _check_output_type(option: str, value: Any) -> str:
    if isinstance(value, str) and value == "input":
        return "input"
    if not isinstance(value, str):
        raise TypeError(
            f"{option} expects a framework name, got {type(value).__name__}. Pass a string such as 'torch',"
            " pass 'input' for the framework of the first argument, or omit the option."
        )
    try:
        return registry.framework_name(value, option)
    except UnknownFrameworkError as error:
        error.advise(Advice(f"{option} may also be 'input'{nearest(value, ['input'])}."))
        raise


def _check_gpu_id(option: str, value: Any) -> GpuId:
    return check_gpu_id(value)


def _check_device(option: str, value: Any) -> Device:
    return Device.parse(value)


def _check_framework(option: str, value: Any) -> str:
    return registry.framework_name(value, option)


def _check_oom_recovery(option: str, value: Any) -> Any:
    if isinstance(value, np.bool_):
        return bool(value)
    return _check_choice(option, value, (True, False, "split"))


def _check_dtype(option: str, value: Any) -> str:
    return dtype_name(value)


def _check_dtype_conversion(option: str, value: Any) -> DtypeConversion:
    """Return the `DtypeConversion` for a member or for its name or value, such as ``"preserve_input"``."""
    if not isinstance(value, (DtypeConversion, str)):
        names = one_of(member.name.lower() for member in DtypeConversion)
        raise TypeError(
            f"{option} expects a DtypeConversion or its name, got {type(value).__name__}. Pass"
            f" {names}, or omit {option} to keep the dtype that the function returns."
        )
    try:
        return DtypeConversion(value)
    except ValueError as error:
        raise ValueError(f"{option}={error}") from None


def _check_contract(option: str, value: Any) -> Any:
    if not callable(value):
        raise TypeError(
            f"{option} expects a function of the result, got {type(value).__name__}. Pass a callable that"
            " returns whether the result is valid."
        )
    return value


def _check_choice(option: str, value: Any, choices: tuple[Any, ...]) -> Any:
    """Return the value if it is one of the choices.

    Raises:
        ValueError: If the value is not one of the choices, but has the type of one of them.
        TypeError: If the value has another type.
    """
    types = {type(choice) for choice in choices}
    if type(value) in types and value in choices:
        return value
    error = ValueError if type(value) in types else TypeError
    hint = nearest(str(value), [str(choice) for choice in choices])
    raise error(f"{option}={value!r} must be {either(choices)}{hint}.")


#: The check of each option. It is called with the name of the option and a value that is not the default.
_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "output_type": _check_output_type,
    "gpu_id": _check_gpu_id,
    "device": _check_device,
    "input_type": _check_framework,
    "strict": bool_option,
    "oom_recovery": _check_oom_recovery,
    "max_retries": partial(whole_number, least=0),
    "split_axis": whole_number,
    "min_split": partial(whole_number, least=1),
    "dtype": _check_dtype,
    "dtype_conversion": _check_dtype_conversion,
    "slice_by_slice": bool_option,
    "contract": _check_contract,
    "grad": partial(_check_choice, choices=("error", "detach", "flow")),
    "x64": bool_option,
    "stream": bool_option,
}
_DEFAULTS: dict[str, Any] = {"output_type": None} | {
    field.name: field.default for field in fields(DecoratorOptions) if field.name in _CHECKS
}
