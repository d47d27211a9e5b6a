"""The options of the decorators: their names and types, and the one place where they are checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypedDict

from arraybridge.conversion.convert import Grad
from arraybridge.conversion.decide import dtype_name
from arraybridge.errors import UnknownFrameworkError, nearest
from arraybridge.frameworks import registry
from arraybridge.functions.dtypes import DtypeConversion
from arraybridge.types import Device, DeviceLike, FrameworkLike, GpuId, check_gpu_id

__all__ = ["DecoratorKeywords", "DecoratorOptions", "check_contract", "checked_options"]


class DecoratorKeywords(TypedDict, total=False):
    """The keyword arguments of a decorator besides ``output_type``, to a type checker."""

    gpu_id: GpuId
    device: DeviceLike | None
    input_type: FrameworkLike | None
    strict: bool
    oom_recovery: bool | Literal["split"]
    max_retries: int
    split_axis: int
    min_split: int
    dtype: Any
    dtype_conversion: DtypeConversion
    slice_by_slice: bool
    contract: Callable[[Any], Any] | None
    grad: Grad | Literal["flow"]
    stream: bool


class DecoratorOptions(NamedTuple):
    """The options of one decorator, checked; `FrameworkDecorator.__call__` says what each means."""

    framework: str
    gpu_id: GpuId = None
    device: Device | None = None
    input_type: str | None = None
    strict: bool = False
    output_type: str = ""
    oom_recovery: bool | Literal["split"] = False
    max_retries: int = 2
    split_axis: int = 0
    min_split: int = 1
    dtype: str | None = None
    dtype_conversion: DtypeConversion = DtypeConversion.NATIVE_OUTPUT
    slice_by_slice: bool = False
    contract: Callable[[Any], Any] | None = None
    grad: Grad | Literal["flow"] = "error"
    stream: bool = True


_NAMES = DecoratorOptions._fields[1:]


def checked_options(framework: str, given: dict[str, Any]) -> DecoratorOptions:
    """The options, each of the right type and in its range.

    Raises:
        TypeError: one is unknown, or of the wrong type.
        ValueError: one has a value that it cannot have.
    """
    for name in given:
        if name not in _NAMES:
            raise TypeError(
                f"@{framework} has no option {name!r}{nearest(name, _NAMES)}; it has {', '.join(_NAMES)}"
            )
    given = dict(given)
    for name in ("strict", "slice_by_slice", "stream"):
        if not isinstance(given.get(name, False), bool):
            raise TypeError(f"{name}={given[name]!r} must be True or False")
    for name, least in (("max_retries", 0), ("min_split", 1), ("split_axis", None)):
        value = given.get(name, 1)
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name}={value!r} must be a whole number")
        if least is not None and value < least:
            raise ValueError(f"{name}={value!r} must be at least {least}")
    given["gpu_id"] = check_gpu_id(given.get("gpu_id"))
    if given.get("device") is not None:
        if given["gpu_id"] is not None:
            raise ValueError(f"pass gpu_id={given['gpu_id']!r} or device={given['device']!r}, not both")
        given["device"] = Device.parse(given["device"])
    if given.get("input_type") is not None:
        given["input_type"] = registry.framework_name(given["input_type"])
    elif given.get("strict"):
        raise ValueError("strict=True refuses what is not of input_type; say which, as in input_type='numpy'")
    if given.get("output_type") is None and given.get("grad") == "flow":
        given["output_type"] = "input"
    given["output_type"] = _output_type(framework, given.get("output_type"))
    _check_choice("grad", given.get("grad", "error"), ("error", "detach", "flow"))
    if not isinstance(given.get("oom_recovery", False), bool):
        _check_choice("oom_recovery", given["oom_recovery"], ("split",), " or True or False")
    if given.get("dtype") is not None:
        given["dtype"] = dtype_name(given["dtype"])
    _check_conversion(given.get("dtype_conversion", DtypeConversion.NATIVE_OUTPUT))
    check_contract(given.get("contract"))
    return DecoratorOptions(framework, **given)


def _check_conversion(conversion: Any) -> None:
    if not isinstance(conversion, DtypeConversion):
        names = [member.name for member in DtypeConversion]
        hint = nearest(str(conversion), [name.lower() for name in names])
        raise TypeError(
            f"dtype_conversion={conversion!r} must be a member of DtypeConversion{hint}: {', '.join(names)}"
        )


def _check_choice(option: str, value: Any, choices: tuple[str, ...], more: str = "") -> None:
    if not isinstance(value, str):
        raise TypeError(f"{option}={value!r} must be {' or '.join(map(repr, choices))}{more}")
    if value not in choices:
        expected = " or ".join(map(repr, choices))
        raise ValueError(f"{option}={value!r} must be {expected}{more}{nearest(value, choices)}")


def check_contract(contract: Any) -> None:
    """Refuse a contract that cannot be called.

    Raises:
        TypeError: it is no function.
    """
    if contract is not None and not callable(contract):
        raise TypeError(f"contract={contract!r} must be a function of the result")


def _output_type(framework: str, name: Any) -> str:
    if name is None:
        return framework
    if name == "input":
        return "input"
    try:
        return registry.framework_name(name)
    except UnknownFrameworkError as error:
        hint = nearest(name, ["input"])
        raise UnknownFrameworkError(f"{error}; output_type may also be 'input'{hint}") from None
