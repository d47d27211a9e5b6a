"""The options of the decorators: what each is called, takes and means, in one table; and their check."""

# The annotations of the table are read, so that they are not to be strings.

from collections.abc import Callable
from enum import Enum
from types import SimpleNamespace
from typing import Annotated, Any, Literal, TypedDict

from arraybridge.conversion.convert import Grad
from arraybridge.conversion.decide import dtype_name
from arraybridge.conversion.destination import check_gpu_id
from arraybridge.errors import Advice, UnknownFrameworkError, nearest
from arraybridge.frameworks import registry
from arraybridge.frameworks.base import CPU
from arraybridge.functions.dtypes import DtypeConversion, DtypeConversionName
from arraybridge.types import Device, DeviceLike, FrameworkLike, GpuId


def _choice(*choices: Any) -> Callable[[str, Any], Any]:
    """One of these: another value of such a type is a `ValueError`, and anything else a `TypeError`."""
    types = {type(choice) for choice in choices}
    words = [str(choice.value if isinstance(choice, Enum) else choice) for choice in choices]

    def check(option: str, value: Any) -> Any:
        if type(value) in types and value in choices:
            return value
        error = ValueError if type(value) in types else TypeError
        expected = " or ".join(str(c) if isinstance(c, Enum) else repr(c) for c in choices)
        raise error(f"{option}={value!r} must be {expected}{nearest(str(value), words)}")

    return check


def _dtype_conversion(option: str, value: Any) -> DtypeConversion:
    """Return a member for itself, its name (``"preserve_input"``, ``"uint8"``) or its value."""
    if isinstance(value, DtypeConversion):
        return value
    names = {text: member for member in DtypeConversion for text in (member.value, member.name.lower())}
    if isinstance(value, str):
        member = names.get(value.lower())
        if member is not None:
            return member
        expected = ", ".join(member.name.lower() for member in DtypeConversion)
        raise ValueError(
            f"{option}={value!r} is not a conversion. Pass one of {expected}{nearest(value, names)}."
        )
    raise TypeError(
        f"{option} expects a DtypeConversion or its name, got {type(value).__name__}. Pass {option}='uint8'."
    )


def _number(least: float) -> Callable[[str, Any], int]:
    def check(option: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{option}={value!r} must be a whole number")
        if value < least:
            raise ValueError(f"{option}={value!r} must be at least {least}")
        return value

    return check


def _framework(option: str, value: Any) -> str:
    if option == "output_type" and isinstance(value, str) and value == "input":
        return "input"
    try:
        return registry.framework_name(value)
    except UnknownFrameworkError as error:
        if option == "output_type":
            error.advise(Advice(f"It may also be 'input'{nearest(value, ['input'])}."))
        raise


def _function(option: str, value: Any) -> Any:
    if not callable(value):
        raise TypeError(f"{option}={value!r} must be a function of the result")
    return value


class DecoratorKeywords(TypedDict, total=False):
    """The options of a decorator besides ``output_type``, on which the type of the result depends.

    Beside its type, each has what it is where it is left out, and what checks any other value.
    """

    #: The accelerator to run on, or ``"auto"`` for the one with the most free memory. Left out, arrays stay
    #: where they are, or go to the host where the framework does not reach them.
    gpu_id: Annotated["GpuId", None, lambda _, value: check_gpu_id(value)]
    #: Any device instead, in words as ``"cpu:1"``, or the device object of a framework.
    device: Annotated["DeviceLike | None", None, lambda _, value: Device.parse(value)]
    #: The framework that callers are expected to bring; readable as ``input_memory_type``.
    input_type: Annotated["FrameworkLike | None", None, _framework]
    #: Refuse arrays of any other framework than ``input_type``.
    strict: Annotated[bool, False, _choice(True, False)]
    #: True frees memory and tries again when memory runs out; ``"split"`` also halves the batch. Plain
    #: functions only.
    oom_recovery: Annotated[bool | Literal["split"], False, _choice(True, False, "split")]
    #: How often to try again.
    max_retries: Annotated[int, 2, _number(0)]
    #: The axis to halve along.
    split_axis: Annotated[int, 0, _number(float("-inf"))]
    #: The fewest rows of a part.
    min_split: Annotated[int, 1, _number(1)]
    #: A dtype to cast the arrays among the arguments to, on their way in. Left out, they keep their own.
    dtype: Annotated[Any, None, lambda _, value: dtype_name(value)]
    #: The dtype of the results, see `DtypeConversion`. Left out, they keep their own.
    dtype_conversion: Annotated[
        "DtypeConversion | DtypeConversionName", DtypeConversion.NATIVE_OUTPUT, _dtype_conversion
    ]
    #: Call the function for each plane of its 3-D arrays, and stack what comes back. Plain functions only.
    slice_by_slice: Annotated[bool, False, _choice(True, False)]
    #: Called with the result; where it returns a false value, the call fails.
    contract: Annotated[Callable[[Any], Any] | None, None, _function]
    #: What to do with a torch tensor that requires grad and enters another framework: ``"error"``, or
    #: ``"detach"``. Inside torch the graph is kept. ``"flow"``: arrays of other frameworks may be passed that
    #: are being differentiated; results are of the caller's framework, whose backward pass goes through.
    grad: Annotated[Grad | Literal["flow"], "error", _choice("error", "detach", "flow")]
    #: False runs the function on the caller's CUDA stream, for kernels that are launched on the default one;
    #: else each thread has a stream of its own.
    stream: Annotated[bool, True, _choice(True, False)]


_TABLE: dict[str, tuple[Any, Callable[[str, Any], Any]]] = {
    "output_type": (None, _framework),
    **{option: one.__metadata__ for option, one in DecoratorKeywords.__annotations__.items()},
}


def checked_options(framework: str, keywords: dict[str, Any]) -> SimpleNamespace:
    """The options, each of the right type and in its range, as attributes.

    Besides: ``framework``, that of the decorator; ``converts``, without which it only declares; ``declared``,
    the framework that all arrays have to be of, None for any; ``on_card``, whether it names an accelerator.

    Raises:
        TypeError: one is unknown, or of the wrong type.
        ValueError: one has a value that it cannot have.
    """
    for option in keywords:
        if option not in _TABLE:
            hint = nearest(option, _TABLE)
            raise TypeError(f"@{framework} has no option {option!r}{hint}; it has {', '.join(_TABLE)}")
    options = SimpleNamespace(framework=framework, converts=True)
    for option, (default, check) in _TABLE.items():
        value = keywords.get(option, default)
        setattr(options, option, value if value is default else check(option, value))
    if options.gpu_id is not None and options.device is not None:
        raise ValueError(f"pass gpu_id={options.gpu_id!r} or device={keywords['device']!r}, not both")
    if options.strict and options.input_type is None:
        raise ValueError("strict=True refuses what is not of input_type; say which, as in input_type='numpy'")
    if framework == "numpy":
        options.gpu_id = None  # it lives on the host, whatever gpu_id says
    options.declared = options.input_type if options.strict else None
    options.on_card = options.gpu_id is not None or (options.device or CPU).kind != "cpu"
    options.output_type = options.output_type or ("input" if options.grad == "flow" else framework)
    return options


def changed(options: SimpleNamespace, **changes: Any) -> SimpleNamespace:
    """The options with some changed."""
    return SimpleNamespace(**{**vars(options), **changes})
