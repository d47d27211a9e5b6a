"""The component `Interchange`: sharing of memory with other frameworks, and the layouts that prevent it."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from arraybridge.device import Device
from arraybridge.host import dtype_names
from arraybridge.interface.component import Component
from arraybridge.reasons import Cause

__all__ = ["Interchange", "is_c_contiguous"]


class Interchange(Component):
    """Exchange of memory with other frameworks, and the reasons why memory cannot be shared.

    Attributes:
        dlpack_device: The DLPack device type of its arrays on accelerators (2: CUDA); None if there is
            no such type. Frameworks with the same device type can share memory on accelerators.
        all_pickle: Whether all arrays of the framework can be pickled without loss.
        cast_expression: Python code that casts an array ``{x}``, for the advice in errors.
        reshape_expression: Python code that reshapes an array ``{x}``, for the advice in errors.
    """

    all_pickle: ClassVar[bool] = True
    cast_expression: ClassVar[str] = '{{x}}.astype("{dtype}")'
    reshape_expression: ClassVar[str] = "{{x}}.reshape({shape})"
    dlpack_device: int | None = None

    def strides(self, x: Any) -> tuple[int, ...]:
        """Return the strides of an array.

        Args:
            x: An array of the framework.

        Returns:
            One stride per axis, in bytes. By default, those of a C-contiguous array.
        """
        return c_strides(self.framework.shape(x), dtype_names.np_dtype(self.framework.dtype_name(x)).itemsize)

    def address(self, x: Any) -> int:
        """Return the address of the first element of an array on an accelerator.

        Args:
            x: An array of the framework.

        Returns:
            The address; 0 if it is unknown.
        """
        return 0

    def nearest_shape(self, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return the shape to which errors advise to reshape an array.

        Args:
            shape: The number of elements along each axis.

        Returns:
            A shape that this framework supports, with at most one extent of -1; None if it supports
            ``shape``, or no shape with as many elements.
        """
        return (-1,) if len(shape) > self.framework.max_rank else None

    def copy_reason(self, x: Any) -> Cause | str | None:
        """Return the reason why the values of an array cannot be read in place.

        Args:
            x: An array of the framework.

        Returns:
            The reason why the values must be copied with `to_host` or `copy`; None if they can be read in
            place. A framework from another package may return its own text, which messages append to
            "because".
        """
        return None

    def can_read_into(self, x: Any, view: np.ndarray) -> bool:
        """Return whether `read_into` can copy an array to this memory without another copy.

        Args:
            x: An array of the framework.
            view: A writable NumPy array of any layout.

        Returns:
            False by default.
        """
        return False

    def read_into(self, x: Any, view: np.ndarray) -> None:
        """Copy values that cannot be read in place, such as those on an accelerator, to host memory.

        Args:
            x: An array of the framework.
            view: A NumPy array of the same shape and dtype, for which `can_read_into` returns true.
        """
        raise NotImplementedError

    def fill(self, out: Any, write: Callable[[np.ndarray], object]) -> None:
        """Call a function that writes to the host memory of an array.

        Args:
            out: An array of the framework in host memory, if its arrays are mutable.
            write: A function of a NumPy view of this memory.
        """
        write(self.framework.host_view(out))
        self.record_write(out)

    def record_write(self, out: Any) -> None:
        """Record that the values of an array were changed by NumPy, if the framework counts changes.

        Args:
            out: An array of the framework in host memory, if its arrays are mutable.
        """

    def cannot_stride(
        self, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int
    ) -> Cause | str | None:
        """Return the reason why this framework cannot view memory with a given layout.

        Args:
            shape: The number of elements along each axis.
            strides: The stride along each axis, in bytes.
            itemsize: The size of an element, in bytes.

        Returns:
            The reason; None if the framework can view the memory. A framework from another package may return
            its own text, which messages append to "because".
        """
        return None

    def import_from(self, x: Any, source: Any, device: Device) -> Any:
        """Return an array that shares the accelerator memory of another framework's array.

        Work queued on the exporter's stream runs before work that this framework queues afterwards. The
        default waits until that work is done, and then calls the ``from_dlpack`` function of the first module
        in ``modules``.

        Args:
            x: An array of ``source`` on an accelerator.
            source: The framework of ``x``.
            device: The device of ``x``.

        Returns:
            An array of this framework that keeps the memory alive.
        """
        # PyTorch exports only from the current GPU (pytorch/pytorch#195721).
        with source.devices.select(device):
            source.interchange.block_until_ready(x)
            return sys.modules[self.framework.modules[0]].from_dlpack(source.interchange.export(x, device))

    def export(self, x: Any, device: Device) -> Any:
        """Return an object that the ``from_dlpack`` functions of other frameworks accept.

        Args:
            x: An array on an accelerator.
            device: The device of ``x``.

        Returns:
            An object whose ``__dlpack__`` orders the queued work that computes ``x`` before later work on the
            given stream, or waits for it. By default, ``x`` itself.
        """
        return x

    def normalize_bools(self, x: Any) -> Any:
        """Return an array on an accelerator whose bools are stored as the bytes 0 and 1.

        Args:
            x: An array on an accelerator.

        Returns:
            A copy if ``x`` has bools that are stored as other bytes. By default, and for other dtypes, ``x``.
        """
        return x

    def block_until_ready(self, x: Any) -> None:
        """Wait until an array is computed, if possible by waiting only for its stream.

        Args:
            x: An array of the framework.
        """

    def check_copy(self, x: Any) -> None:
        """Raise for an array that `Framework.copy` does not support.

        Args:
            x: An array of the framework.

        Raises:
            MemoryConversionError: If the array cannot be copied.
        """

    def check_castable(self, x: Any) -> None:
        """Raise for an array that `Framework.cast` does not support, regardless of the dtype.

        Args:
            x: An array of the framework.

        Raises:
            MemoryConversionError: If the array cannot be cast.
        """

    def check_cast(self, source: str, dtype: str) -> None:
        """Raise if this framework cannot cast between two dtypes.

        Args:
            source: The name of the current dtype.
            dtype: The name of the requested dtype.

        Raises:
            DtypeNotSupportedError: If there is no such cast.
        """

    def is_plain(self, x: Any) -> bool:
        """Return whether an array is a plain array.

        Args:
            x: An array of the framework.

        Returns:
            False for parameters, variables, instances of subclasses, and arrays with attributes.
        """
        return True


def c_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Return the strides in bytes of a C-contiguous array."""
    return tuple(itemsize * math.prod(shape[axis:]) for axis in range(1, len(shape) + 1))


def is_c_contiguous(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    """Return whether strides (in bytes) are those of a C-contiguous array."""
    expected = itemsize
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent != 1 and stride != expected:
            return False
        expected *= extent
    return True
