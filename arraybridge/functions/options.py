"""The options of the decorators: what each is called, takes and means, in one table; and their check."""

# The annotations of the table are read, so that they are not to be strings.

from collections.abc import Callable
from enum import Enum
from types import SimpleNamespace
from typing import Annotated, Any, Literal, NamedTuple, Self, TypedDict

from arraybridge.conversion.convert import Grad
from arraybridge.conversion.decide import dtype_name
from arraybridge.errors import UnknownFrameworkError, nearest
from arraybridge.frameworks import registry
from arraybridge.functions.dtypes import DtypeConversion
from arraybridge.types import Device, DeviceLike, FrameworkLike, GpuId, check_gpu_id


class _Option(NamedTuple):
    """What an option is where it is left out, and what checks any other value and makes it plain."""

    default: Any
    check: Callable[[str, Any], Any]


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


def _number(least: float) -> Callable[[str, Any], int]:
    def check(option: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{option}={value!r} must be a whole number")
        if value < least:
            raise ValueError(f"{option}={value!r} must be at least {least}")
        return value

    return check


def _framework(option: str, value: Any) -> str:
    if option == "output_type" and value == "input":
        return "input"
    try:
        return registry.framework_name(value)
    except UnknownFrameworkError as error:
        also = "" if option != "output_type" else f"; it may also be 'input'{nearest(value, ['input'])}"
        raise UnknownFrameworkError(f"{error}{also}") from None


def _function(option: str, value: Any) -> Any:
    if not callable(value):
        raise TypeError(f"{option}={value!r} must be a function of the result")
    return value


class DecoratorKeywords(TypedDict, total=False):
    """The options of a decorator besides ``output_type``, on which the type of the result depends."""

    #: The accelerator to run on, or ``"auto"`` for the one with the most free memory. Left out, arrays stay
    #: where they are, or go to the host where the framework does not reach them.
    gpu_id: Annotated["GpuId", _Option(None, lambda _, value: check_gpu_id(value))]
    #: Any device instead, in words as ``"cpu:1"``, or the device object of a framework.
    device: Annotated["DeviceLike | None", _Option(None, lambda _, value: Device.parse(value))]
    #: The framework that callers are expected to bring; readable as ``input_memory_type``.
    input_type: Annotated["FrameworkLike | None", _Option(None, _framework)]
    #: Refuse arrays of any other framework than ``input_type``.
    strict: Annotated[bool, _Option(False, _choice(True, False))]
    #: True frees memory and tries again when memory runs out; ``"split"`` also halves the batch. Plain
    #: functions only.
    oom_recovery: Annotated[bool | Literal["split"], _Option(False, _choice(True, False, "split"))]
    #: How often to try again.
    max_retries: Annotated[int, _Option(2, _number(0))]
    #: The axis to halve along.
    split_axis: Annotated[int, _Option(0, _number(float("-inf")))]
    #: The fewest rows of a part.
    min_split: Annotated[int, _Option(1, _number(1))]
    #: A dtype to cast the arrays among the arguments to, on their way in. Left out, they keep their own.
    dtype: Annotated[Any, _Option(None, lambda _, value: dtype_name(value))]
    #: The dtype of the results, see `DtypeConversion`. Left out, they keep their own.
    dtype_conversion: Annotated[
        DtypeConversion, _Option(DtypeConversion.NATIVE_OUTPUT, _choice(*DtypeConversion))
    ]
    #: Call the function for each plane of its 3-D arrays, and stack what comes back. Plain functions only.
    slice_by_slice: Annotated[bool, _Option(False, _choice(True, False))]
    #: Called with the result; where it returns a false value, the call fails.
    contract: Annotated[Callable[[Any], Any] | None, _Option(None, _function)]
    #: What to do with a torch tensor that requires grad and enters another framework: ``"error"``, or
    #: ``"detach"``. Inside torch the graph is kept. ``"flow"``: arrays of other frameworks may be passed that
    #: are being differentiated; results are of the caller's framework, whose backward pass goes through.
    grad: Annotated[Grad | Literal["flow"], _Option("error", _choice("error", "detach", "flow"))]
    #: False runs the function on the caller's CUDA stream, for kernels that are launched on the default one;
    #: else each thread has a stream of its own.
    stream: Annotated[bool, _Option(True, _choice(True, False))]


_TABLE: dict[str, _Option] = {
    "output_type": _Option(None, _framework),
    **{
        option: annotation.__metadata__[0] for option, annotation in DecoratorKeywords.__annotations__.items()
    },
}


class DecoratorOptions(SimpleNamespace):
    """The options of one decorator, checked, each an attribute.

    ``framework`` is that of the decorator; without ``converts`` it only declares.
    """

    @property
    def declared(self) -> str | None:
        """The framework of which all arrays among the arguments have to be; None where any will do."""
        return self.input_type if self.strict else None

    def _replace(self, **changes: Any) -> Self:
        return type(self)(**{**vars(self), **changes})


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
    options = DecoratorOptions(framework=framework, converts=True)
    for option, (default, check) in _TABLE.items():
        value = keywords.get(option, default)
        setattr(options, option, value if value is default else check(option, value))
    if options.gpu_id is not None and options.device is not None:
        raise ValueError(f"pass gpu_id={options.gpu_id!r} or device={keywords['device']!r}, not both")
    if options.strict and options.input_type is None:
        raise ValueError("strict=True refuses what is not of input_type; say which, as in input_type='numpy'")
    if framework == "numpy":
        options.gpu_id = None  # it lives on the host, whatever gpu_id says
    options.output_type = options.output_type or ("input" if options.grad == "flow" else framework)
    return options
