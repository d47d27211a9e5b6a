"""The interface of carriers: objects that wrap one array."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from arraybridge.advice import Advice
from arraybridge.errors import ArrayNotSupportedError

__all__ = ["Carrier"]

#: The reason why tables with nulls are not converted.
NULLS = "arrays cannot hold nulls"


class Carrier:
    """The interface for objects that wrap one array; `register_carrier` registers an instance of a subclass.

    A subclass defines `carries` and `array`. It also defines `rebuild` if results should be restored to
    such objects. Each conversion calls `carries` and `array`, and caches nothing about the object.

    Example:
        >>> import numpy as np, arraybridge
        >>> class Scan:  # a class of another library
        ...     def __init__(self, pixels, patient):
        ...         self.pixels, self.patient = pixels, patient
        >>> class Scans(arraybridge.Carrier):
        ...     def carries(self, x):
        ...         return isinstance(x, Scan)
        ...     def array(self, x):
        ...         return x.pixels
        ...     def rebuild(self, x, array):
        ...         return Scan(array, x.patient)
        >>> _ = arraybridge.register_carrier(Scans())
        >>> @arraybridge.torch(output_type="input")
        ... def double(x):
        ...     return x * 2  # a tensor here
        >>> double(Scan(np.ones(2), "Ada")).patient
        'Ada'
    """

    #: Python code that returns the array of the carrier ``{x}``, for the advice in error messages.
    expression: ClassVar[str] = ""

    def carries(self, x: Any) -> bool:
        """Return whether ``x`` is a carrier of this kind; only called if no framework owns ``x``.

        An exception is treated as False, so that unrelated objects in arguments do not break calls.
        """
        raise NotImplementedError

    def array(self, x: Any) -> Any:
        """Return the array that ``x`` carries, of any framework, if ``x`` keeps the array's memory alive.

        Otherwise, if the values have to be copied, return a pair. Its first item is a NumPy array, or an
        object with ``shape``, ``dtype``, ``nbytes`` and slicing, such as a file, which is read later. The
        second item is the reason as text that follows "because". The carriers of this library return a
        `Cause` instead of text.
        """
        raise NotImplementedError

    def rebuild(self, x: Any, array: Any) -> Any:
        """Return an object like ``x`` that carries another array of the same shape and framework.

        Return the array itself if there is no such object, for example for files or for unsupported dtypes.
        """
        return array


class Unread:
    """Values that are not in memory yet, for `Carrier.array` to return; ``read`` reads them on demand."""

    def __init__(self, shape: tuple[int, ...], dtype: Any, read: Callable[[], np.ndarray]) -> None:
        self.shape = shape
        self.dtype: np.dtype[Any] = np.dtype(dtype)
        self._read = read

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __getitem__(self, key: Any) -> Any:
        values = self._read()
        return values if key is ... else values[key]  # an unnecessary view takes 0.2 µs


def is_of(x: Any, package: str, *names: str) -> bool:
    """Return whether ``x`` is an instance of one of a package's classes, without importing the package."""
    module = sys.modules.get(package)
    if module is None:
        return False
    for name in names:  # noqa: SIM110  # any() with a generator takes 0.4 µs longer
        if isinstance(x, getattr(module, name)):
            return True
    return False


def contents_error(what: str, cause: str, advice: str, *expressions: str) -> ArrayNotSupportedError:
    """Return the error for an object whose contents cannot be converted exactly.

    Args:
        what: The object, such as ``"a mode-P image"``.
        cause: The reason, as a clause.
        advice: A sentence with a ``{}`` for each of the expressions, which refer to the object as ``{x}``.
        expressions: The expressions.
    """
    return ArrayNotSupportedError(
        f"Cannot convert {what}: {cause}.", reason=cause, advice=Advice(advice, expressions)
    )
