"""The options of the decorators: what each is called, takes and means, in one table; and their check."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Literal, TypedDict

from arraybridge.conversion.convert import Grad
from arraybridge.conversion.decide import dtype_name
from arraybridge.errors import UnknownFrameworkError, nearest
from arraybridge.frameworks import registry
from arraybridge.functions.dtypes import DtypeConversion
from arraybridge.types import Device, DeviceLike, FrameworkLike, GpuId, check_gpu_id

__all__ = ["DecoratorKeywords", "DecoratorOptions", "check_contract", "checked_options"]


class DecoratorKeywords(TypedDict, total=False):
    """The options of a decorator besides ``output_type``, on which the type of the result depends."""

    #: The accelerator to run on, or ``"auto"`` for the one with the most free memory. Left out, arrays stay
    #: where they are, or go to the host where the framework does not reach them.
    gpu_id: GpuId
    #: Any device instead, in words as ``"cpu:1"``, or the device object of a framework.
    device: DeviceLike | None
    #: The framework that callers are expected to bring; readable as ``input_memory_type``.
    input_type: FrameworkLike | None
    #: Refuse arrays of any other framework than ``input_type``.
    strict: bool
    #: True frees memory and tries again when memory runs out; ``"split"`` also halves the batch. Plain
    #: functions only.
    oom_recovery: bool | Literal["split"]
    #: How often to try again.
    max_retries: int
    #: The axis to halve along.
    split_axis: int
    #: The fewest rows of a part.
    min_split: int
    #: A dtype to cast the arrays among the arguments to, on their way in. Left out, they keep their own.
    dtype: Any
    #: The dtype of the results, see `DtypeConversion`. Left out, they keep their own.
    dtype_conversion: DtypeConversion
    #: Call the function for each plane of its 3-D arrays, and stack what comes back. Plain functions only.
    slice_by_slice: bool
    #: Called with the result; where it returns a false value, the call fails.
    contract: Callable[[Any], Any] | None
    #: What to do with a torch tensor that requires grad and enters another framework: ``"error"``, or
    #: ``"detach"``. Inside torch the graph is kept. ``"flow"``: arrays of other frameworks may be passed that
    #: are being differentiated; results are of the caller's framework, whose backward pass goes through.
    grad: Grad | Literal["flow"]
    #: False runs the function on the caller's CUDA stream, for kernels that are launched on the default one;
    #: else each thread has a stream of its own.
    stream: bool


class DecoratorOptions(SimpleNamespace):
    """The options of one decorator, checked, each an attribute; and ``framework``, that of the decorator."""

    def _replace(self, **changes: Any) -> DecoratorOptions:
        return DecoratorOptions(**{**vars(self), **changes})


# -- what is checked -----------------------------------------------------------------------------------


def _flag(option: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{option}={value!r} must be True or False")
    return value


def _number(least: float) -> Callable[[str, Any], int]:
    def check(option: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{option}={value!r} must be a whole number")
        if value < least:
            raise ValueError(f"{option}={value!r} must be at least {least}")
        return value

    return check


def _word(*choices: str, more: str = "") -> Callable[[str, Any], str]:
    expected = " or ".join(map(repr, choices)) + more

    def check(option: str, value: Any) -> str:
        if not isinstance(value, str):
            raise TypeError(f"{option}={value!r} must be {expected}")
        if value not in choices:
            raise ValueError(f"{option}={value!r} must be {expected}{nearest(value, choices)}")
        return value

    return check


def _recovery(option: str, value: Any) -> Any:
    return value if isinstance(value, bool) else _word("split", more=" or True or False")(option, value)


def _output(_: str, value: Any) -> str:
    if value == "input":
        return "input"
    try:
        return registry.framework_name(value)
    except UnknownFrameworkError as error:
        hint = nearest(value, ["input"])
        raise UnknownFrameworkError(f"{error}; output_type may also be 'input'{hint}") from None


def _conversion(option: str, value: Any) -> DtypeConversion:
    if not isinstance(value, DtypeConversion):
        names = [member.name for member in DtypeConversion]
        hint = nearest(str(value), [name.lower() for name in names])
        raise TypeError(f"{option}={value!r} must be a member of DtypeConversion{hint}: {', '.join(names)}")
    return value


def check_contract(contract: Any) -> Any:
    """Refuse a contract that cannot be called.

    Raises:
        TypeError: it is no function.
    """
    if contract is not None and not callable(contract):
        raise TypeError(f"contract={contract!r} must be a function of the result")
    return contract


#: Option → its default, and what checks any other value and makes it plain.
_TABLE: dict[str, tuple[Any, Callable[[str, Any], Any]]] = {
    "gpu_id": (None, lambda _, value: check_gpu_id(value)),
    "device": (None, lambda _, value: Device.parse(value)),
    "input_type": (None, lambda _, value: registry.framework_name(value)),
    "strict": (False, _flag),
    "output_type": (None, _output),
    "oom_recovery": (False, _recovery),
    "max_retries": (2, _number(0)),
    "split_axis": (0, _number(float("-inf"))),
    "min_split": (1, _number(1)),
    "dtype": (None, lambda _, value: dtype_name(value)),
    "dtype_conversion": (DtypeConversion.NATIVE_OUTPUT, _conversion),
    "slice_by_slice": (False, _flag),
    "contract": (None, lambda _, value: check_contract(value)),
    "grad": ("error", _word("error", "detach", "flow")),
    "stream": (True, _flag),
}


def checked_options(framework: str, keywords: dict[str, Any]) -> DecoratorOptions:
    """The options, each of the right type and in its range.

    Raises:
        TypeError: one is unknown, or of the wrong type.
        ValueError: one has a value that it cannot have.
    """
    for option in keywords:
        if option not in _TABLE:
            hint = nearest(option, _TABLE)
            raise TypeError(f"@{framework} has no option {option!r}{hint}; it has {', '.join(_TABLE)}")
    options = DecoratorOptions(framework=framework)
    for option, (default, check) in _TABLE.items():
        value = keywords.get(option, default)
        unset = value is default or (value is None and default is None)
        setattr(options, option, value if unset else check(option, value))
    if options.gpu_id is not None and options.device is not None:
        raise ValueError(f"pass gpu_id={options.gpu_id!r} or device={keywords['device']!r}, not both")
    if options.strict and options.input_type is None:
        raise ValueError("strict=True refuses what is not of input_type; say which, as in input_type='numpy'")
    options.output_type = options.output_type or ("input" if options.grad == "flow" else framework)
    return options
