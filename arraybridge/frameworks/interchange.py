"""The component `Interchange`: sharing of memory with other frameworks, and the layouts that prevent it."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any, ClassVar

from arraybridge.device import Device
from arraybridge.frameworks import dtype_names
from arraybridge.frameworks.component import Component
from arraybridge.reasons import Cause

if TYPE_CHECKING:
    from arraybridge.frameworks.base import Framework

__all__ = ["Interchange", "is_c_contiguous"]


class Interchange(Component):
    """Exchange of memory with other frameworks, and the reasons why memory cannot be shared.

    Attributes:
        dlpack_device: The DLPack device type of its arrays on accelerators (2: CUDA); None if there is
            no such type. Frameworks with the same device type can share memory on accelerators.
        all_pickle: Whether all arrays of the framework can be pickled without loss.
    """

    all_pickle: ClassVar[bool] = True
    dlpack_device: int | None = None

    def strides(self, x: Any) -> tuple[int, ...]:
        """Return the strides of an array on an accelerator.

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

    def import_from(self, x: Any, source: Framework, device: Device) -> Any:
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
        with source.devices.selected(device):  # PyTorch exports only from the current GPU
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
