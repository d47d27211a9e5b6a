"""`Framework`, the base class of frameworks."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from arraybridge.device import Device
from arraybridge.errors import ArrayNotSupportedError
from arraybridge.hooks import hooks
from arraybridge.host import buffers, dlpack_capsules, dtype_names, file_maps, read_only_memory
from arraybridge.interface.autodiff import NOT_DIFFERENTIABLE, Autodiff
from arraybridge.interface.batching import Batching
from arraybridge.interface.component import Component, component
from arraybridge.interface.devices import CPU, Devices
from arraybridge.interface.interchange import Interchange
from arraybridge.interface.memory import Memory
from arraybridge.interface.runtime import NO_CONTEXT, Runtime
from arraybridge.interface.sparse import NO_SPARSE_ARRAYS, SparseArrays
from arraybridge.interface.streams import Streams
from arraybridge.interface.unsupported import missing_dtype_error, no_counterpart_error
from arraybridge.reasons import Cause, Reason

__all__ = [
    "FastPath",
    "Framework",
    "NoPlanError",
    "isolate",
    "native_errors",
    "take_over",
]


class NoPlanError(Exception):
    """Raised by a plan or a fast function for an array that needs the slow path; users never see it."""


class FastPath(Component):
    """Functions for host arrays that need no special handling.

    For other arrays, these functions raise `NoPlanError`, and the slow path handles the array. They translate
    the exceptions of the framework where they call it, so that no other error is mistaken for such an array.
    """

    def fast_types(self) -> tuple[type, ...]:
        """Return the exact types that the fast functions accept. Arrays of subclasses take the slow path."""
        return ()

    #: A function ``(x, alignment)`` that returns the plan key of a host array for a target with that
    #: alignment. `check`, `device_of`, `copy_reason`, `requires_grad`, `supports` and `cannot_view` return
    #: equal results for arrays with equal keys. The function raises `NoPlanError` for an array that is not in
    #: host memory.
    plan_key: Any = None
    #: A function that returns the NumPy view of a host array.
    fast_view: Any = None
    #: A function that returns an array that shares the memory of a NumPy array, faster than through DLPack.
    fast_from_view: Any = None
    #: A function that exports a host array, aligned to `buffers.ALIGNMENT` bytes, as a DLPack capsule.
    fast_export: Any = None
    #: A function that imports a DLPack capsule of host memory. If this framework's arrays are mutable, the
    #: function copies 0-d arrays, because frameworks with immutable arrays cache scalars
    #: (tensorflow/tensorflow#109357). It may raise the framework's exceptions, because it may be a function
    #: of the framework.
    fast_import: Any = None


class Framework(ABC):
    """The base class of frameworks: core methods, and components that have defaults.

    To add a framework, derive from this class and define ``name``, ``modules`` and `owns`. If the first
    module has no ``from_dlpack``, also define `from_host`, and `host_view` or `to_host`. Then pass an
    instance to `register`.

    Attributes:
        name: The name that users pass.
        modules: The packages that define the types of its arrays. Objects of other packages are never passed
            to `owns`.
        alignment: The alignment in bytes that sharing requires; 1 for any alignment. 0 if `from_host` always
            copies. If it is greater than 1, bools whose bytes are neither 0 nor 1 are copied.
        mutable: Whether its arrays can be modified in place.
        respects_read_only: Whether its arrays can be read-only. If so, arrays that share read-only memory are
            read-only.
        dtypes: The names of its dtypes. None if it supports all NumPy dtypes.
        max_rank: The maximum number of axes, at most that of NumPy.
        has_host: Whether its arrays can be in host memory.
        errors: The exceptions, other than built-in ones, that it raises for arrays that it does not support.
        runtime: Settings, context managers and namespaces; see `Runtime`.
        devices: Its devices, and the devices of its arrays; see `Devices`.
        interchange: How it exports and imports memory; see `Interchange`.
        memory: Its memory on accelerators, and its out-of-memory errors; see `Memory`.
        batching: How its arrays are split and joined; see `Batching`.
        fast_path: Functions for host arrays that need no special handling; see `FastPath`.
        streams: Its streams on accelerators; see `Streams`.
        autodiff: Its automatic differentiation; see `Autodiff`.
        sparse: Its sparse arrays, if it has any; see `SparseArrays`.

    Example:
        >>> import numpy as np, arraybridge
        >>> class Table:  # a class from another library, without DLPack
        ...     def __init__(self, values):
        ...         self.values = values
        ...         self.shape, self.dtype, self.nbytes = values.shape, values.dtype, values.nbytes
        >>> class Tables(arraybridge.Framework):
        ...     name = "tables"
        ...     modules = (Table.__module__.partition(".")[0],)  # the package of the class
        ...     max_rank = 2
        ...     def owns(self, x):
        ...         return isinstance(x, Table)
        ...     def host_view(self, x):
        ...         return x.values
        ...     def from_host(self, view, device):
        ...         return Table(view)
        >>> _ = arraybridge.register(Tables(), replace=True)
        >>> arraybridge.to_torch(Table(np.ones((1, 2))))
        tensor([[1., 1.]], dtype=torch.float64)
        >>> arraybridge.convert(np.ones((2, 2, 2)), "tables")
        Traceback (most recent call last):
            ...
        arraybridge.errors.ArrayNotSupportedError: ...
    """

    name: ClassVar[str]
    modules: ClassVar[tuple[str, ...]] = ()
    alignment: ClassVar[int] = 1
    mutable: ClassVar[bool] = True
    respects_read_only: ClassVar[bool] = False
    dtypes: ClassVar[frozenset[str] | None] = None
    max_rank: ClassVar[int] = buffers.MAX_RANK
    has_host: ClassVar[bool] = True
    errors: ClassVar[tuple[type[Exception], ...]] = ()

    streams: Streams = Streams()
    autodiff: Autodiff = NOT_DIFFERENTIABLE
    sparse: SparseArrays = NO_SPARSE_ARRAYS
    runtime: component[Runtime] = component(Runtime)
    devices: component[Devices] = component(Devices)
    interchange: component[Interchange] = component(Interchange)
    memory: component[Memory] = component(Memory)
    batching: component[Batching] = component(Batching)
    fast_path: component[FastPath] = component(FastPath)

    # -- arrays -----------------------------------------------------------------------------------

    @abstractmethod
    def owns(self, x: Any) -> bool:
        """Return whether an object is an array of this framework or of a subclass.

        Args:
            x: Any object.

        Returns:
            A result that depends only on the type of ``x``.
        """

    def check(self, x: Any) -> None:
        """Raise for an array without dense, concrete values, such as a sparse, masked or traced array.

        Args:
            x: An array of the framework.

        Raises:
            ArrayNotSupportedError: If the array has no such values. The advice states what to pass instead.
            DtypeNotSupportedError: If the elements of the array are not numbers.
        """

    def dtype_name(self, x: Any) -> str:
        """Return NumPy's name for the dtype of an array.

        Args:
            x: An array of the framework.

        Returns:
            A name such as ``"float32"`` or ``"bfloat16"``.
        """
        return dtype_names.name_of(np.dtype(x.dtype))

    def shape(self, x: Any) -> tuple[int, ...]:
        """Return the shape of an array.

        Args:
            x: An array of the framework.

        Returns:
            The number of elements along each axis.
        """
        return tuple(x.shape)

    def nbytes(self, x: Any) -> int:
        """Return the size of an array in bytes.

        Args:
            x: An array of the framework.

        Returns:
            The total size of its elements, without gaps between them. For a sparse array, the total size of
            its parts; 0 if it has no parts.
        """
        if not self.sparse.layout(x):
            return int(x.nbytes)
        try:
            parts = self.sparse.take_apart(x)
        except ArrayNotSupportedError:
            return 0
        return 0 if parts is None else sum(map(self.nbytes, parts.arrays))

    # -- host memory ------------------------------------------------------------------------------

    def host_view(self, x: Any) -> np.ndarray:
        """Return a NumPy view of an array's host memory.

        The view must keep the memory alive and in place, even if ``x`` is deleted. By default, this method
        uses DLPack, even for bfloat16 and float8.

        Args:
            x: An array in host memory.

        Returns:
            The view. It is read-only if the framework is immutable.

        Raises:
            NotImplementedError: If the framework has no host arrays, or ``x`` has no ``__dlpack__``.
        """
        if not self.has_host or not hasattr(x, "__dlpack__"):
            raise NotImplementedError(
                f"{self.name} does not export host memory through DLPack. Define host_view() or to_host()."
            )
        view = dlpack_capsules.from_capsule(x.__dlpack__())
        return read_only_memory.writable_alias(view) if self.mutable else view

    def to_host(self, x: Any) -> np.ndarray:
        """Copy an array to host memory.

        Args:
            x: An array of the framework, on any device.

        Returns:
            A complete copy that nothing else refers to.
        """
        return buffers.copy_aligned(self.host_view(x))

    def from_host(self, view: np.ndarray, device: Device) -> Any:
        """Return an array with the values of a NumPy array.

        By default, this method calls the ``from_dlpack`` function of the first module in ``modules``, even
        for bfloat16 and float8. If ``device`` is not the CPU, it then calls `Devices.to_device`.

        Args:
            view: The values. If ``device`` is the CPU and ``alignment`` is not 0, `cannot_view` has returned
                None for this array. In other cases, the array may have any layout.
            device: One of the available devices.

        Returns:
            On the CPU, an array that shares the memory of ``view``, unless ``alignment`` is 0. In other
            cases, a complete copy.
        """
        if device != CPU:
            on_host = self.from_host(buffers.copy_normalized(view) if self.cannot_view(view) else view, CPU)
            return self.devices.to_device(on_host, device)
        capsule = dlpack_capsules.capsule(view)
        return sys.modules[self.modules[0]].from_dlpack(dlpack_capsules.Importable(capsule))

    def cannot_view(self, view: np.ndarray) -> Cause | str | None:
        """Return the reason why this framework cannot share the host memory of a NumPy array.

        Args:
            view: An array of any layout.

        Returns:
            The reason; None if the framework can share the memory. A framework from another
            package may return its own text, which messages append to "because".
        """
        if not self.alignment:
            return Cause(Reason.COPIES_ONLY, framework=self.name)
        if not view.dtype.isnative:
            return Cause(Reason.BYTE_ORDER)
        if not view.size:
            return None
        cause = self.interchange.cannot_stride(view.shape, view.strides, view.dtype.itemsize)
        if cause:
            return cause
        if self.alignment > 1 and buffers.address(view) % self.alignment:
            return file_maps.misalignment(view, self.name, self.alignment)
        # The frameworks that require alignment are compiled for bools whose bytes are 0 or 1.
        if self.alignment > 1 and view.dtype.char == "?" and buffers.has_other_bools(view):
            return Cause(Reason.BOOL_BYTES, framework=self.name)
        return None

    # -- values -----------------------------------------------------------------------------------

    def copy(self, x: Any) -> Any:
        """Return a copy of an array.

        Args:
            x: An array of the framework.

        Returns:
            A C-contiguous copy on the same device. It is complete, or ordered on the framework's stream.
        """
        return self.from_host(self.to_host(x), self.devices.device_of(x))

    def cast(self, x: Any, dtype: str) -> Any:
        """Cast an array by the rules of this framework.

        Args:
            x: An array of the framework.
            dtype: The name of the requested dtype.

        Returns:
            An array of the same shape on the same device.
        """
        values = buffers.cast(self.to_host(x), dtype)
        return self.from_host(buffers.copy_aligned(values), self.devices.device_of(x))

    def write(self, out: Any, x: Any) -> None:
        """Write the values of an array to an existing array, cast by the rules of this framework.

        The two arrays may overlap in memory. By default, this method writes to the host memory of ``out``.

        Args:
            out: An array of the framework, if its arrays are mutable. It has no lazy values.
            x: An array of the framework on any device, or a NumPy array of any layout, of the same shape.
        """
        view = x if isinstance(x, np.ndarray) else self.host_view(x)

        def write_values(memory: np.ndarray) -> None:
            buffers.copy_into(memory, view)

        self.interchange.fill(out, write_values)

    def supports(self, dtype: str, shape: tuple[int, ...]) -> None:
        """Raise for a dtype or a shape that this framework does not support.

        Args:
            dtype: The name of the dtype.
            shape: The number of elements along each axis.

        Raises:
            DtypeNotSupportedError: If the framework does not have the dtype. The advice names a cast.
            ArrayNotSupportedError: If the framework does not support the number of axes or the size.
        """
        if len(shape) > self.max_rank:
            cause = f"{self.name} supports at most {self.max_rank} axes"
            raise no_counterpart_error(self, f"an array of rank {len(shape)}", cause, "Reshape the array.")
        if self.dtypes is not None and dtype not in self.dtypes:
            raise missing_dtype_error(self, dtype, self.dtypes)

    @property
    def decorator(self) -> Any:
        """The decorator for functions written in this framework, such as ``arraybridge.torch``."""
        return hooks.decorator_of(self.name)


def native_errors(*frameworks: Framework) -> tuple[type[Exception], ...]:
    """Return the exceptions that frameworks raise for arrays that they do not support.

    Args:
        frameworks: The frameworks that take part in a conversion.

    Returns:
        Built-in exceptions, and the `Framework.errors` of each framework.
    """
    own = (error for framework in frameworks for error in framework.errors)
    return (TypeError, ValueError, RuntimeError, BufferError, NotImplementedError, *own)


def isolate(source: Framework, target: Framework) -> AbstractContextManager[Any]:
    """Return a context manager outside of the caller's modes and transforms, for a conversion between two.

    Within one framework, operations remain part of them, so that they are recorded and differentiated.
    """
    if source is target:
        return NO_CONTEXT
    first = source.runtime.isolate()
    second = target.runtime.isolate()
    if first is NO_CONTEXT and second is NO_CONTEXT:
        return NO_CONTEXT
    return _enter_both(first, second)


@contextmanager
def _enter_both(first: AbstractContextManager[Any], second: AbstractContextManager[Any]) -> Iterator[None]:
    with first, second:
        yield


def take_over(framework: Framework, x: Any) -> Any:
    """Make an array from another stream safe to use and free on this thread's stream, and return the result.

    The parts of a sparse array are taken over one by one, because `Streams.take_over` takes dense arrays.
    """
    if not framework.sparse.layout(x):
        return framework.streams.take_over(x)
    parts = framework.sparse.take_apart(x)
    if parts is None:
        return x
    values, *indices = [framework.streams.take_over(part) for part in parts.arrays]
    if all(new is old for new, old in zip((values, *indices), parts.arrays, strict=True)):
        return x
    return framework.sparse.put_together(replace(parts, values=values, indices=tuple(indices)), like=x)
