"""The request for a conversion, the decision about its route, and checks of options and dtypes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from arraybridge.conversion.device_resolution import check_placement
from arraybridge.conversion.typed_errors import raise_conversion_error
from arraybridge.device import DeviceLike
from arraybridge.errors import DtypeNotSupportedError, nearest
from arraybridge.formatting import either, one_of
from arraybridge.host import dtype_names
from arraybridge.interface import registry
from arraybridge.interface.framework import Framework, isolate, native_errors
from arraybridge.route import Route
from arraybridge.types import FrameworkLike, GpuId

__all__ = ["Decision", "Request", "dtype_name"]


@dataclass(slots=True, eq=False, repr=False)
class Request:
    """The arguments of a conversion, except the array.

    For a `convert_memory` call, the attributes have the values that the user passed. For the parts of a
    sparse array, these values are normalized. ``declared`` is the source that the caller named, or None.
    ``is_bare`` states whether only a target was passed.
    """

    target: FrameworkLike
    declared: FrameworkLike | None = None
    gpu_id: GpuId = None
    device: DeviceLike | None = None
    copy: bool | None = None
    dtype: Any = None
    grad: str = "error"
    out: Any = None
    is_bare: bool = field(init=False)

    def __post_init__(self) -> None:
        names_device = self.gpu_id is not None or self.device is not None
        has_options = names_device or self.copy is not None or self.dtype is not None or self.out is not None
        self.is_bare = not has_options and self.declared is None and self.grad == "error"


@dataclass(slots=True, eq=False, repr=False)
class Decision:
    """A route, and the function that performs the conversion."""

    route: Route
    source: Framework
    target: Framework
    #: The array that was passed; for a carrier or an array of another library, the array obtained from it.
    data: Any
    #: Converts ``data``, and any other array for which `decide` makes the same decision: plans rely on this.
    convert: Callable[[Any], Any]
    #: Converts any sparse array of this class and layout, with a function that converts its parts. None for
    #: dense arrays, and for sparse ones that are converted as a whole.
    convert_by_parts: Callable[[Any, Callable[[Any, Request], Any]], Any] | None = None
    #: Writes ``data`` to the array ``out``, and any arrays like ``data`` and ``out``. None without ``out``.
    write: Callable[[Any, Any], None] | None = None

    @property
    def native_errors(self) -> tuple[type[Exception], ...]:
        """The exceptions that the two frameworks raise for arrays that they do not support."""
        return native_errors(self.source, self.target)

    def __call__(self) -> Any:
        """Convert the array."""
        try:
            with isolate(self.source, self.target):
                return self.convert(self.data)
        except self.native_errors as error:
            raise_conversion_error(self.source, self.target, self.route.method, error)


def check_options(request: Request) -> Request:
    """Check the options of a request, without an array, and return the request with normalized options.

    Raises:
        ValueError: If an option is invalid, or no framework has the declared name.
        TypeError: If the declared source is not a name.
        DtypeNotSupportedError: If casts to the dtype are not supported.
    """
    copy = request.copy
    if request.declared is not None:
        registry.framework_name(request.declared)
    if not isinstance(request.grad, str) or request.grad not in ("error", "detach"):
        raise _grad_error(request.grad)
    if copy is not None and not isinstance(copy, (bool, np.bool_)):
        raise ValueError(f"copy={copy!r} must be None, True or False.")
    if request.gpu_id is not None or request.device is not None:
        check_placement(request.gpu_id, request.device)
    if request.dtype is not None:
        dtype_name(request.dtype)
    return replace(request, copy=bool(copy)) if isinstance(copy, np.bool_) else request


def _grad_error(grad: Any) -> ValueError:
    """Return the error for an invalid value of ``grad``."""
    if isinstance(grad, str) and grad == "flow":
        return ValueError(
            "grad='flow' is not supported for conversions: gradients can only flow through a function. Use it"
            " with the decorators @torch, @jax and @tensorflow. To drop the graph, pass grad='detach'."
        )
    return ValueError(f"grad={grad!r} must be 'error' or 'detach'{nearest(str(grad), ('error', 'detach'))}.")


# The dtypes that error messages list. `dtype_name` also accepts other float8 dtypes, int4 and uint4.
_DTYPES = dtype_names.PLAIN | {"bfloat16", "float8_e4m3fn", "float8_e5m2"}


def dtype_name(dtype: Any) -> str:
    """Return the NumPy name of a dtype, which may be passed as a name or as a dtype of any framework.

    Raises:
        DtypeNotSupportedError: If casts to this dtype are not supported.
    """
    name = dtype_names.name_of_any(dtype)
    if name in _DTYPES or name.startswith(("float8", "int4", "uint4")):
        return name
    raise DtypeNotSupportedError(
        f"dtype={dtype!r} is not a supported dtype{_nearest_dtype(name)}.",
        advice=f"Pass {either(_USUAL[name]) if name in _USUAL else one_of(sorted(_DTYPES))}.",
        reason=f"unknown dtype {name}",
    )


#: The usual dtypes of each kind, for names without a width.
_USUAL = {
    "int": ("int64", "int32"),
    "uint": ("uint64", "uint8"),
    "float": ("float32", "float64"),
    "complex": ("complex64", "complex128"),
    "half": ("float16",),
    "single": ("float32",),
    "double": ("float64",),
    "long": ("int64",),
}


def _nearest_dtype(name: str) -> str:
    """Return text such as ``" (did you mean 'int8'?)"``, or ``""`` if no supported dtype is similar.

    For a width that is a power of 2, the text suggests the next larger supported width, or the largest. For a
    kind without a width, the advice names the usual widths instead.
    """
    if name in _USUAL:
        return ""
    kind = name.rstrip("0123456789")
    bits = sorted(int(one.removeprefix(kind)) for one in _DTYPES if one.rstrip("0123456789") == kind != one)
    width = name.removeprefix(kind)
    if bits and width and int(width).bit_count() == 1:  # a power of 2 is not a typo
        return f" (did you mean '{kind}{min((b for b in bits if b >= int(width)), default=bits[-1])}'?)"
    return nearest(name, _DTYPES)


def is_dtype(x: Any) -> bool:
    """Return whether ``x`` is one of the common dtypes (`_DTYPES`) of any framework, or its name."""
    return dtype_names.name_of_any(x) in _DTYPES
