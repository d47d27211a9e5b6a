"""Errors raised by conversions: disallowed copies, dropped gradients, and exceptions from frameworks."""

from __future__ import annotations

import re
from typing import NoReturn

from arraybridge.device import Device
from arraybridge.errors import CopyRequiredError, GradientError, MemoryConversionError, error_text
from arraybridge.interface.autodiff import NOT_DIFFERENTIABLE
from arraybridge.interface.framework import Framework
from arraybridge.reasons import Cause, Reason
from arraybridge.route import Method

# CUDA errors after which all CUDA calls of a process fail ("the process must be terminated and relaunched" in
# the documentation of cudaError_t, CUDA 13), as CUDA, PyTorch, CuPy, JAX and TensorFlow report them.
_BROKEN_GPU = re.compile(
    r"illegal (?:memory access|instruction)|misaligned address|unspecified launch failure|device-side assert"
    r"|CUDA_ERROR_(?:ILLEGAL_ADDRESS|MISALIGNED_ADDRESS|LAUNCH_FAILED|ASSERT)"
    r"|cudaError(?:IllegalAddress|MisalignedAddress|LaunchFailure|Assert)"
)
# Errors of CUDA in a process that was forked after its parent had initialized the driver.
_FORKED_GPU = re.compile(
    r"CUDA in forked subprocess|cudaErrorInitializationError|CUDA_ERROR_NOT_INITIALIZED|initialization error"
)

__all__ = ["copy_required_error", "graph_required_error", "raise_conversion_error"]


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
    advice = "Pass copy=None to allow the copy"
    if cause.code in (Reason.MISALIGNED, Reason.MISALIGNED_ELEMENTS):
        advice += ", or create the array with aligned(shape, dtype)"
    return CopyRequiredError(
        f"copy=False was passed, but {source.name} → {target.name} on {device} must copy this array,"
        f" because {reason}.",
        method=method,
        reason=reason,
        code=cause.code,
        advice=f"{advice}.",
    )


def raise_conversion_error(source: Framework, target: Framework, method: str, error: Exception) -> NoReturn:
    """Raise an error of this package that describes an exception raised by a framework.

    Errors of this package and out-of-memory errors are raised unchanged.
    """
    is_typed = isinstance(error, MemoryConversionError)
    if is_typed or source.memory.is_oom(error) or target.memory.is_oom(error):
        raise error
    reason = error_text(error)
    how = f" with method {method!r}" if method else ""
    advice = "Convert the array to NumPy first to find out which framework raises the error."
    if source.devices.has_only_host or target.devices.has_only_host:
        failing = source.name if target.devices.has_only_host else target.name
        advice = f"The error is from {failing}. Pass a plain, dense copy of the array."
    if _BROKEN_GPU.search(reason):
        advice = "After this error, the process cannot use the GPU anymore. Restart it."
    elif _FORKED_GPU.search(reason):
        advice = (
            "CUDA cannot be used in a process that was forked after CUDA had started. Start the process with"
            ' multiprocessing.get_context("spawn").'
        )
    raise MemoryConversionError(
        f"{source.name} → {target.name} failed{how} ({reason}).",
        source_type=source.name,
        target_type=target.name,
        method=method,
        reason=reason,
        advice=advice,
    ) from error
