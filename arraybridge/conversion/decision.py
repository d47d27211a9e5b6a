"""Requests and decisions of conversions, and the errors that several decisions raise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from arraybridge.errors import CopyRequiredError, GradientError, MemoryConversionError, error_text
from arraybridge.frameworks.autodiff import NOT_DIFFERENTIABLE
from arraybridge.frameworks.base import Framework, conversion_errors
from arraybridge.reasons import Cause, Reason
from arraybridge.tracing.route import Method, Route
from arraybridge.types import Device, DeviceLike, FrameworkLike, GpuId

__all__ = ["Decision", "Request", "conversion_error", "copy_required_error", "graph_required_error", "is_oom"]


@dataclass(slots=True, eq=False, repr=False)
class Request:
    """The arguments of a conversion, except the array.

    For a `convert_memory` call, they have the values that the user passed. For the parts of a sparse array,
    they are normalized.
    """

    target: FrameworkLike
    declared: FrameworkLike | None = None
    gpu_id: GpuId = None
    device: DeviceLike | None = None
    copy: bool | None = None
    dtype: Any = None
    grad: str = "error"


@dataclass(slots=True, eq=False, repr=False)
class Decision:
    """A route, and the function that performs the conversion."""

    route: Route
    source: Framework
    target: Framework
    #: The array that was passed; if it is of another library, the array that was imported from it.
    data: Any
    #: Also converts any other array for which `decide` would make this decision. The plan cache relies on it.
    convert: Callable[[Any], Any]
    #: Converts any sparse array of this class and layout, with a function that converts its parts. None for
    #: dense arrays, and for sparse ones that are converted as a whole.
    convert_by_parts: Callable[[Any, Callable[[Any, Request], Any]], Any] | None = None

    @property
    def conversion_errors(self) -> tuple[type[Exception], ...]:
        """The exceptions that the two frameworks raise for arrays that they do not support."""
        return conversion_errors(self.source, self.target)

    def __call__(self) -> Any:
        """Convert the array."""
        try:
            return self.convert(self.data)
        except MemoryConversionError:
            raise
        except self.conversion_errors as error:
            if is_oom(error, self.source, self.target):
                raise
            raise conversion_error(self.source, self.target, self.route.method, error) from error


def graph_required_error(source: Framework, target: Framework, *, is_sparse: bool = False) -> GradientError:
    """Return the error for an array that requires grad, whose graph the conversion would drop."""
    through = ""
    if target.autodiff is not NOT_DIFFERENTIABLE and not is_sparse:
        flow = f"@{target.name}(grad='flow')"
        through = f", or decorate the function with {flow}, which preserves gradients"
    cause = Cause(Reason.REQUIRES_GRAD)
    return GradientError(
        f"the {source.name} tensor requires grad, and its graph would end in the conversion to"
        f" {target.name}.",
        reason=cause.text,
        code=cause.code,
        advice="Pass grad='detach' to the conversion or decorator, or detach the tensor first, to convert"
        f" only its values{through}.",
    )


def copy_required_error(
    source: Framework, target: Framework, device: Device, method: Method, cause: Cause
) -> CopyRequiredError:
    """Return the error for ``copy=False`` if a copy is necessary."""
    reason = cause.text
    return CopyRequiredError(
        f"copy=False was passed, but {source.name} → {target.name} on {device} must copy this array,"
        f" because {reason}.",
        method=method,
        reason=reason,
        code=cause.code,
        advice="Pass copy=None to allow the copy.",
    )


def is_oom(error: Exception, source: Framework, target: Framework) -> bool:
    """Return whether an exception is an out-of-memory error of one of the frameworks."""
    return source.memory.is_oom(error) or target.memory.is_oom(error)


def conversion_error(
    source: Framework, target: Framework, method: str, error: Exception
) -> MemoryConversionError:
    """Return an arraybridge error that describes an exception raised by a framework."""
    reason = error_text(error)
    how = f" with method {method!r}" if method else ""
    advice = "Convert it to NumPy first to find out which framework raises the error."
    if source.devices.has_only_host or target.devices.has_only_host:
        failing = source.name if target.devices.has_only_host else target.name
        advice = f"The error is from {failing}. Pass a plain, dense copy of the array."
    return MemoryConversionError(
        f"{source.name} → {target.name} failed{how} ({reason}).",
        source_type=source.name,
        target_type=target.name,
        method=method,
        reason=reason,
        advice=advice,
    )
