"""Errors raised by conversions: disallowed copies, dropped gradients, and exceptions from frameworks."""

from __future__ import annotations

from arraybridge.device import Device
from arraybridge.errors import CopyRequiredError, GradientError, MemoryConversionError, error_text
from arraybridge.frameworks.autodiff import NOT_DIFFERENTIABLE
from arraybridge.frameworks.base import Framework
from arraybridge.reasons import Cause, Reason
from arraybridge.route import Method

__all__ = ["conversion_error", "copy_required_error", "graph_required_error", "is_oom"]


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
    advice = "Convert the array to NumPy first to find out which framework raises the error."
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
