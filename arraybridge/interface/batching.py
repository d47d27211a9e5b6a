"""The component `Batching`: functions that split and join a framework's arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from arraybridge.device import Device
from arraybridge.host import buffers, dtype_names
from arraybridge.interface.component import Component

__all__ = ["Batching", "IndexedBatching"]


class Batching(Component):
    """Functions that split arrays into parts and join parts. The defaults work through host memory."""

    def common_dtype(self, x: Any) -> str:
        """Return the name of the dtype that arrays must have to be joined with ``x``.

        Args:
            x: An array of the framework.

        Returns:
            The name of its dtype; for text, a name without the length.
        """
        return self.framework.dtype_name(x)

    def slice_axis(self, x: Any, axis: int, start: int, stop: int) -> Any:
        """Return a range of rows of an array, as a view if the framework has views.

        Args:
            x: An array of the framework.
            axis: The axis of the rows.
            start: The index of the first row.
            stop: The index after the last row.

        Returns:
            ``x[start:stop]`` along ``axis``, on the same device.

        Raises:
            CannotSplitError: If the array must not be split, such as one that several processes share.
        """
        values = self.framework.to_host(x)[_rows_along(axis, len(self.framework.shape(x)), start, stop)]
        return self._from_host(values, self.framework.devices.device_of(x))

    def _from_host(self, values: np.ndarray, device: Device) -> Any:
        """Return an array with the values of a copy in host memory, or of a part of it."""
        # On the CPU, the array may share the memory of the values.
        is_shared = device.kind == "cpu" and self.framework.alignment
        return self.framework.from_host(buffers.copy_aligned(values) if is_shared else values, device)

    def concatenate(self, parts: list[Any], axis: int) -> Any:
        """Join arrays along an axis.

        Args:
            parts: Arrays on the same device, with equal shapes except along ``axis``.
            axis: The axis to join along.

        Returns:
            A new array on the same device.
        """
        return self._join("concat", np.concatenate, parts, axis)

    def stack(self, planes: list[Any]) -> Any:
        """Stack arrays along a new first axis.

        Args:
            planes: Arrays of the same shape and dtype, on the same device.

        Returns:
            A new array of shape ``(len(planes), *shape)`` on the same device.
        """
        return self._join("stack", np.stack, planes, 0)

    def _join(self, name: str, on_host: Callable[..., np.ndarray], arrays: list[Any], axis: int) -> Any:
        """Join arrays with an array API function, or on the host if the framework has no array namespace."""
        namespace = self.framework.runtime.array_namespace()
        if namespace is None:
            host = on_host([self.framework.to_host(x) for x in arrays], axis)
            return self._from_host(host, self.framework.devices.device_of(arrays[0]))
        with self.framework.runtime.device_guard(arrays[0]):
            return getattr(namespace, name)(arrays, axis=axis)

    def unstack(self, x: Any) -> list[Any]:
        """Split an array along its first axis, into views if the framework has views.

        Args:
            x: An array of shape ``(n, ...)``.

        Returns:
            ``n`` arrays on the same device, without the first axis.
        """
        device = self.framework.devices.device_of(x)
        return [self._from_host(plane, device) for plane in self.framework.to_host(x)]

    def output_buffer(self, part: Any, shape: tuple[int, ...]) -> Any:
        """Return an uninitialized array into which parts are written by index.

        Args:
            part: The first part, which determines dtype and device.
            shape: The shape of the whole array.

        Returns:
            The array; None if parts are collected and concatenated at the end instead.
        """
        return None

    def empty(self, shape: tuple[int, ...], dtype: str, device: Device) -> Any:
        """Return an uninitialized array.

        Args:
            shape: The number of elements along each axis.
            dtype: The name of the dtype.
            device: One of the available devices.

        Returns:
            An array on that device.
        """
        return self.framework.from_host(buffers.allocate_aligned(shape, dtype_names.np_dtype(dtype)), device)

    def reinterpret(self, memory: Any, shape: tuple[int, ...], dtype: str) -> Any:
        """Return a view of the first bytes of an array as another array.

        Args:
            memory: A C-contiguous array with at least as many bytes as the view.
            shape: The shape of the view.
            dtype: The name of the view's dtype.

        Returns:
            The view; None if the framework does not support such views.
        """
        return None


def _rows_along(axis: int, rank: int, start: int, stop: int) -> tuple[slice, ...]:
    """Return the index of the rows from ``start`` to ``stop`` along ``axis``."""
    return (*(slice(None),) * (axis % rank), slice(start, stop))


class IndexedBatching(Batching):
    """Functions that split arrays with NumPy-style indexing, on the device of each array."""

    def slice_axis(self, x: Any, axis: int, start: int, stop: int) -> Any:
        with self.framework.runtime.device_guard(x):
            return x[_rows_along(axis, len(self.framework.shape(x)), start, stop)]

    def unstack(self, x: Any) -> list[Any]:
        with self.framework.runtime.device_guard(x):
            return [x[i] for i in range(self.framework.shape(x)[0])]
