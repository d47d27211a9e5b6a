"""The base class of frameworks, and components with defaults that work through host memory."""

from __future__ import annotations

import math
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, TypeVar, overload

import numpy as np

from arraybridge.errors import (
    Advice,
    ArrayNotSupportedError,
    Cast,
    DeviceNotFoundError,
    DtypeNotSupportedError,
)
from arraybridge.frameworks import dlpack_capsules, dtype_names, host_memory, protocols, read_only
from arraybridge.frameworks.accelerators import DeviceDetails, GpuMemory, Holding, Streams
from arraybridge.frameworks.autodiff import NOT_DIFFERENTIABLE, Autodiff
from arraybridge.frameworks.sparse import NO_SPARSE_ARRAYS, SparseArrays
from arraybridge.reasons import Cause, Reason
from arraybridge.types import Device, gpu_device, hooks

if TYPE_CHECKING:
    from arraybridge.frameworks.metadata import FrameworkMetadata

__all__ = [
    "CPU",
    "Batching",
    "Component",
    "Devices",
    "FastPath",
    "Framework",
    "IndexedBatching",
    "Interchange",
    "Memory",
    "Observation",
    "Runtime",
    "component",
    "conversion_errors",
    "is_c_contiguous",
    "nbytes_of_parts",
    "sparse_array_error",
    "take_over",
]

CPU = Device("cpu", 0)


class Pytree(NamedTuple):  # a dataclass would take 2 % of the time of `import arraybridge`
    """One level of an object whose class is registered as a pytree with a framework.

    Attributes:
        children: The child values that the class registers.
        places: The path of each child from the object, such as ``.x``.
        structure: The rest of the object. It is equal for objects of the same structure.
        rebuild: A function that returns a similar object with other children.
    """

    children: Sequence[Any]
    places: Sequence[str]
    structure: Any
    rebuild: Callable[[Sequence[Any]], Any]


class OneLevel:
    """An ``is_leaf`` function that flattens a single level: every node except the first is a leaf.

    It therefore also flattens an object that contains itself, without infinite recursion.
    """

    __slots__ = ("_has_root",)

    def __init__(self) -> None:
        self._has_root = False

    def __call__(self, node: Any) -> bool:
        is_leaf = self._has_root
        self._has_root = True
        return is_leaf


class Component:
    """A component of a framework, with defaults that work through host memory.

    Attributes:
        framework: The framework that the component belongs to.
    """

    framework: Framework

    def __init__(self, framework: Framework) -> None:
        self.framework = framework


C = TypeVar("C", bound=Component)


class component(Generic[C]):  # noqa: N801  # used like a function
    """A descriptor that assigns a component to a framework class.

    Each instance of the framework creates its own component on first access.
    """

    def __init__(self, cls: type[C]) -> None:
        self.cls = cls

    def __set_name__(self, owner: type[Framework], name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type[Framework]) -> component[C]: ...
    @overload
    def __get__(self, instance: Framework, owner: type[Framework]) -> C: ...
    def __get__(self, instance: Framework | None, owner: type[Framework]) -> Any:
        if instance is None:
            return self
        created = self.cls(instance)
        vars(instance)[self.name] = created  # the next access finds this attribute first
        return created


class Observation:
    """Properties of a framework's arrays that a trace reads. The defaults fit any framework."""

    #: Whether a call may return a host array before its values are computed.
    is_asynchronous: ClassVar[bool] = False
    #: Whether the framework's own functions accept arrays with any strides.
    has_strides: ClassVar[bool] = False
    #: Whether the framework's functions narrow 64-bit dtypes by default.
    narrows_64_bit: ClassVar[bool] = False

    def read(self, owner: Framework, x: Any) -> tuple[Any, int, int | None, Device]:
        """Return the dtype, the size, the address and the device of an array.

        Args:
            owner: The framework of the array.
            x: The array.

        Returns:
            A tuple ``(dtype, nbytes, address, device)``. The size is in bytes. The address is None for an
            array on several devices.

        Raises:
            MemoryConversionError: If the array has no memory.
        """
        owner.check(x)
        return owner.dtype_name(x), owner.nbytes(x), owner.interchange.address(x), owner.devices.device_of(x)

    def is_idle(self) -> bool:
        """Return whether no computation can be pending."""
        return False

    def unobserved(self) -> AbstractContextManager[Any]:
        """Return a context in which arrays can be read without running code of the traced program."""
        return nullcontext()


class Runtime(Component):
    """Settings, context managers and namespaces with which functions of the framework run.

    Attributes:
        metadata: Metadata of the package that is needed before it is imported. None if ``name`` and
            ``modules`` are sufficient.
        settings: Thread settings that change results. Each is a pair of functions: one returns the current
            value, the other returns a context manager that applies a value.
    """

    metadata: ClassVar[FrameworkMetadata | None] = None
    settings: ClassVar[Sequence[tuple[Callable[[], Any], Callable[[Any], AbstractContextManager[Any]]]]] = ()

    #: The properties of the framework's arrays that a trace reads.
    observation: ClassVar[Observation] = Observation()

    def open_pytree(self, x: Any) -> Pytree | None:
        """Return one level of an object whose class is registered as a pytree with the framework.

        Args:
            x: Any object.

        Returns:
            Its children and structure; None if its class is not registered.
        """
        return None

    def device_guard(self, x: Any) -> AbstractContextManager[Any]:
        """Return a context in which the framework's functions accept ``x`` and keep 64-bit dtypes.

        Args:
            x: An array of the framework.

        Returns:
            A context manager. By default, that of `x64_context`.
        """
        return self.x64_context()

    def array_classes(self) -> tuple[type, ...]:
        """Return the array classes, or their base classes, for libraries that dispatch by class."""
        return self.framework.fast_path.fast_types()

    def array_namespace(self) -> Any:
        """Return the array API namespace for the framework's arrays; None if there is none."""
        return None

    def thread_settings(self) -> Callable[[], AbstractContextManager[Any]]:
        """Capture the settings of the current thread.

        Returns:
            A function whose context managers apply these settings to another thread.
        """
        captured = [(current, apply, current()) for current, apply in self.settings]

        @contextmanager
        def applied() -> Iterator[None]:
            with ExitStack() as stack:
                for current, apply, value in captured:
                    if current() != value:
                        stack.enter_context(apply(value))
                yield

        return applied

    def x64_context(self) -> AbstractContextManager[Any]:
        """Return a context in which arithmetic keeps 64-bit dtypes."""
        return nullcontext()

    def annotation(self, name: str) -> AbstractContextManager[Any]:
        """Return a context that records a span in the framework's profiler.

        Args:
            name: The label of the span.

        Returns:
            A context manager. It does nothing if the framework has no profiler.
        """
        return nullcontext()

    def late_errors(self, cls: type) -> Callable[[Any], object] | None:
        """Return a function that waits for an array and raises any error that its computation caused.

        Args:
            cls: The class of the array.

        Returns:
            A function of one array; None if arrays of this class do not raise errors late.
        """
        return None


class Devices(Component):
    """The devices of a framework, and the devices of its arrays.

    Attributes:
        has_only_host: Whether its arrays are always in host memory, so ``gpu_id`` has no effect (NumPy).
        selects_per_thread: Whether `selected` affects only the calling thread, not the whole process.
    """

    has_only_host: ClassVar[bool] = False
    selects_per_thread: ClassVar[bool] = True

    def device_of(self, x: Any) -> Device:
        """Return the device of an array.

        Args:
            x: An array of the framework.

        Returns:
            Its device. By default, the CPU.
        """
        return CPU

    def replica(self, x: Any, device: Device) -> Any | None:
        """Return one of the equal arrays that make up a replicated array.

        Args:
            x: An array of the framework.
            device: The preferred device.

        Returns:
            The array on ``device`` if there is one, otherwise any other; None if ``x`` is not replicated over
            several devices.
        """
        return None

    def available(self) -> tuple[Device, ...]:
        """Return all devices that the framework can use on this machine."""
        return (CPU,)

    def visible_devices(self) -> tuple[Device, ...]:
        """Return the available devices, without initializing the driver if possible."""
        return self.available()

    def accelerator(self, index: int) -> Device:
        """Return the device for ``gpu_id=index``, regardless of whether it exists.

        Args:
            index: The number of the accelerator.

        Returns:
            The device.
        """
        return gpu_device(index)

    def default_device(self) -> Device:
        """Return the device for arrays that come from a device the framework does not have."""
        return CPU

    def find_device(self, device: Device) -> Device:
        """Return the framework's own entry for a device.

        Args:
            device: The requested device.

        Returns:
            The equal device among the available ones.

        Raises:
            DeviceNotFoundError: If the framework does not have the device. The message lists the available
                ones.
        """
        devices = self.available()
        for own in devices:
            if own == device and self.has_accelerator(device.accelerator):
                return own
        raise _missing_device_error(self.framework, device)

    def accelerators(self) -> tuple[str, ...]:
        """Return the kinds of its accelerators as they appear in device strings, such as ``("cuda",)``."""
        # PyTorch also calls ROCm devices "cuda".
        kinds = {2: ("cuda",), 8: ("mps",), 10: ("rocm", "cuda"), 14: ("xpu",)}
        return kinds.get(self.framework.interchange.dlpack_device or 0, ())

    def has_accelerator(self, kind: str) -> bool:
        """Return whether its accelerators are of a kind.

        Args:
            kind: The kind in a device string, such as ``"cuda"``; ``""`` for any kind.

        Returns:
            True also for ``""``, and if the framework does not know the kinds of its accelerators.
        """
        return not kind or kind in (self.accelerators() or (kind,))

    def missing_device_reason(self) -> str:
        """Return sentences that explain why there is no accelerator and how to get one; ``""`` if unknown."""
        return ""

    def to_device(self, x: Any, device: Device) -> Any:
        """Return a copy of an array on another device of this framework.

        Args:
            x: An array of the framework.
            device: One of the available devices.

        Returns:
            The copy. It is complete, or ordered on the framework's stream, when the method returns.
        """
        return self.framework.from_host(self.framework.to_host(x), device)

    def check_move(self, x: Any, device: Device) -> None:
        """Raise for an array that cannot be moved to another device of this framework.

        Args:
            x: An array of the framework.
            device: One of the available devices.

        Raises:
            MemoryConversionError: If the array cannot be moved.
        """

    def selected(self, device: Device) -> AbstractContextManager[Any]:
        """Return a context in which a device is the framework's current device for this thread.

        Args:
            device: One of the available devices.

        Returns:
            A context manager that restores the previous device on exit.
        """
        return nullcontext()

    def is_started(self) -> bool:
        """Return whether the driver of the accelerators is initialized. Memory is only queried if it is."""
        return False

    def is_scattered(self, x: Any) -> bool:
        """Return whether the memory of an array is distributed over several devices.

        Args:
            x: An array of the framework.

        Returns:
            False by default.
        """
        return False

    def read_device(self, x: Any) -> Device | None:
        """Return the device that a native device object denotes.

        Args:
            x: Any object, such as a ``torch.device``.

        Returns:
            The device; None if ``x`` is not a device of this framework.
        """
        return None

    def native_device(self, device: Device) -> Any:
        """Return the native object or name for a device.

        Args:
            device: One of the available devices.

        Returns:
            An object such as a ``torch.device``. By default, a device string such as ``"gpu:0"``.
        """
        return str(device)


class Interchange(Component):
    """Exchange of memory with other frameworks, and the reasons why it cannot be shared.

    Attributes:
        dlpack_device: The DLPack device type of its accelerator arrays (2: CUDA), or None. Frameworks with
            the same device type can share memory on accelerators.
        all_pickle: Whether all of its arrays can be pickled without loss.
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
            The address in bytes; 0 if it is unknown.
        """
        return 0

    def copy_reason(self, x: Any) -> Cause | str | None:
        """Return why the values of an array cannot be read in place.

        Args:
            x: An array of the framework.

        Returns:
            The reason why the values must be copied with `to_host` or `copy`; None if they can be read in
            place. A framework from another package may return its own text, which follows "because".
        """
        return None

    def cannot_stride(
        self, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int
    ) -> Cause | str | None:
        """Return why this framework cannot view memory with a given layout.

        Args:
            shape: The number of elements along each axis.
            strides: The stride along each axis, in bytes.
            itemsize: The size of an element, in bytes.

        Returns:
            The reason; None if it can view the memory. A framework from another package may return its own
            text, which follows "because".
        """
        return None

    def import_from(self, x: Any, source: Framework, device: Device) -> Any:
        """Return an array that shares the accelerator memory of an array of another framework.

        Work queued on the exporter's stream runs before work that this framework queues afterwards. The
        default waits until that work is done and then calls ``from_dlpack`` of the first of ``modules``.

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
        """Return an object that ``from_dlpack`` of other frameworks accepts.

        Args:
            x: An array on an accelerator.
            device: The device of ``x``.

        Returns:
            An object whose ``__dlpack__`` orders the work queued on ``x`` before the work of the given
            stream, or waits for it. By default, ``x`` itself.
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
            source: The name of the present dtype.
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


class Memory(Component):
    """The framework's memory on accelerators, and its out-of-memory errors."""

    def is_oom(self, error: BaseException) -> bool:
        """Return whether an exception is an out-of-memory error of this framework.

        Args:
            error: Any exception. Its cause is not considered.

        Returns:
            By default, whether it is a ``MemoryError``.
        """
        return isinstance(error, MemoryError)

    def is_oom_text(self, text: str) -> bool:
        """Return whether a message quoted by another exception is an out-of-memory message of this framework.

        Args:
            text: The message. The class of the quoted exception is unknown.

        Returns:
            True only for messages that begin like the framework's own.
        """
        return False

    def device_details(self, device: Device) -> DeviceDetails:
        """Return the name, identity and memory size of a device, as far as the framework knows them.

        Args:
            device: One of the available devices.

        Returns:
            The details.
        """
        return DeviceDetails(device.name)

    def device_memory(self, device: Device) -> GpuMemory | None:
        """Return the free and total memory of a GPU.

        Args:
            device: One of the available devices.

        Returns:
            Both sizes in bytes; None if the framework does not know them.
        """
        return None

    def free_memory_of(self, device: Device) -> int:
        """Return the memory that the framework can still allocate on a GPU, including its cache.

        Args:
            device: One of the available devices.

        Returns:
            The size in bytes; 0 if it is unknown.
        """
        from arraybridge import hardware  # takes 1 ms; not needed by `import arraybridge`

        free = hardware.free_memory(device.index) if device.kind == "gpu" else None
        if free is None:
            memory = self.device_memory(device)
            free = 0 if memory is None else memory.free
        return free + sum(one.cached or 0 for one in self.usage() if one.device == device)

    def usage(self) -> list[Holding]:
        """Return the memory that the framework holds, with one entry per device that it has opened."""
        return []

    def reset_peak(self) -> None:
        """Reset `Holding.peak` on all devices, if the framework counts it."""

    def oom_error(self) -> Exception:
        """Return an error like those that the framework raises when memory runs out, for simulations."""
        return MemoryError("Unable to allocate memory (simulated)")

    def free_cache(self, device: Device | None, compiled: bool = False) -> int:
        """Release cached memory.

        Args:
            device: The device; None for all devices.
            compiled: Whether to release compiled programs too. Defaults to False.

        Returns:
            The released size in bytes; 0 for a device that the framework does not have.
        """
        return 0

    def pinned_bytes(self, nbytes: int) -> np.ndarray | None:
        """Allocate page-locked host memory.

        Args:
            nbytes: The size in bytes.

        Returns:
            A uint8 array of shape ``(nbytes,)``; None if there is no GPU.
        """
        return None

    def synchronize(self) -> None:
        """Wait for all work that this process has queued, on every device that it has opened."""


class Batching(Component):
    """Functions that split arrays into parts and join parts. The defaults work through host memory."""

    def slice_axis(self, x: Any, axis: int, start: int, stop: int) -> Any:
        """Return a range of rows of an array, as a view if the framework has views.

        Args:
            x: An array of the framework.
            axis: The axis of the rows.
            start: The index of the first row.
            stop: The index after the last row.

        Returns:
            ``x[start:stop]`` along ``axis``, on the same device.
        """
        framework = self.framework
        values = framework.to_host(x)[_rows(axis, len(framework.shape(x)), start, stop)]
        return framework.from_host(host_memory.aligned_copy(values), framework.devices.device_of(x))

    def concatenate(self, parts: list[Any], axis: int) -> Any:
        """Join arrays along an axis.

        Args:
            parts: Arrays of one device, with equal shapes except along ``axis``.
            axis: The axis to join along.

        Returns:
            A new array on the same device.
        """
        return self._joined("concat", np.concatenate, parts, axis)

    def stack(self, planes: list[Any]) -> Any:
        """Stack arrays along a new first axis.

        Args:
            planes: Arrays of the same shape and dtype, on the same device.

        Returns:
            A new array of shape ``(len(planes), *shape)`` on the same device.
        """
        return self._joined("stack", np.stack, planes, 0)

    def _joined(self, name: str, on_host: Callable[..., np.ndarray], arrays: list[Any], axis: int) -> Any:
        """Join arrays by a function of the array API, or on the host if there is no namespace."""
        namespace = self.framework.runtime.array_namespace()
        if namespace is None:
            host = on_host([self.framework.to_host(x) for x in arrays], axis)
            return self.framework.from_host(
                host_memory.aligned_copy(host), self.framework.devices.device_of(arrays[0])
            )
        with self.framework.runtime.device_guard(arrays[0]):
            return getattr(namespace, name)(arrays, axis=axis)

    def unstack(self, x: Any) -> list[Any]:
        """Split an array along its first axis, into views if the framework has views.

        Args:
            x: An array of shape ``(n, ...)``.

        Returns:
            ``n`` arrays on the same device, without the first axis.
        """
        framework = self.framework
        device = framework.devices.device_of(x)
        return [
            framework.from_host(host_memory.aligned_copy(plane), device) for plane in framework.to_host(x)
        ]

    def output_buffer(self, part: Any, shape: tuple[int, ...]) -> Any:
        """Return an empty array to which parts are assigned by index.

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
        return self.framework.from_host(host_memory.aligned_empty(shape, dtype_names.np_dtype(dtype)), device)

    def reinterpret(self, memory: Any, shape: tuple[int, ...], dtype: str) -> Any:
        """Return a view of the first bytes of an array as another array.

        Args:
            memory: A C-contiguous array with at least as many bytes.
            shape: The shape of the view.
            dtype: The name of the view's dtype.

        Returns:
            The view; None if the framework does not support such views.
        """
        return None


def _rows(axis: int, rank: int, start: int, stop: int) -> tuple[slice, ...]:
    """Return the index of the rows from ``start`` to ``stop`` along ``axis``."""
    return (*(slice(None),) * (axis % rank), slice(start, stop))


class IndexedBatching(Batching):
    """Functions that split arrays by NumPy-style indexing, on their device."""

    def slice_axis(self, x: Any, axis: int, start: int, stop: int) -> Any:
        with self.framework.runtime.device_guard(x):
            return x[_rows(axis, len(self.framework.shape(x)), start, stop)]

    def unstack(self, x: Any) -> list[Any]:
        with self.framework.runtime.device_guard(x):
            return [x[i] for i in range(self.framework.shape(x)[0])]


class FastPath(Component):
    """Functions for host arrays that need no special handling.

    For an array that needs it, they raise a built-in exception or one of ``errors``. The slow path catches
    the exception and handles the array.
    """

    def fast_types(self) -> tuple[type, ...]:
        """Return the exact types that the fast functions accept. Subclasses take the slow path."""
        return ()

    #: A function ``(x, alignment)`` that returns the plan key of a host array for a target with that
    #: alignment. `check`, `device_of`, `copy_reason`, `requires_grad`, `supports` and `cannot_view` return
    #: equal results for arrays with equal keys. Raises for an array that is not in host memory.
    plan_key: Any = None
    #: A function that returns the NumPy view of a host array.
    fast_view: Any = None
    #: A function that returns an array that shares the memory of a NumPy array, faster than through DLPack.
    fast_from_view: Any = None
    #: A function that exports a host array, aligned to `host_memory.ALIGNMENT` bytes, as a DLPack capsule.
    fast_export: Any = None
    #: A function that imports a capsule from or into an immutable framework. A mutable framework copies 0-d
    #: arrays, because immutable frameworks cache scalars.
    fast_import: Any = None


class Framework(ABC):
    """A framework whose arrays can be converted: core methods, and components with defaults.

    To add a framework, derive from this class and define ``name``, ``modules`` and `owns`. If the first
    module has no ``from_dlpack``, also define `from_host`, and `host_view` or `to_host`. Then pass an
    instance to `register`.

    Attributes:
        name: The name that users pass.
        modules: The packages that define the types of its arrays. Objects of other packages are never passed
            to `owns`.
        alignment: The alignment in bytes that sharing requires; 1 for any alignment. 0 if `from_host` always
            copies.
        mutable: Whether its arrays can be modified in place.
        respects_read_only: Whether its arrays can be read-only. Views of immutable memory are read-only.
        dtypes: The names of its dtypes. None if it has all dtypes of NumPy.
        max_rank: The maximum number of axes, at most that of NumPy.
        has_host: Whether its arrays can be in host memory.
        errors: Other exceptions that it raises for arrays that it does not support.
        runtime: Settings, context managers and namespaces; see `Runtime`.
        devices: Its devices, and the devices of its arrays; see `Devices`.
        interchange: How it exports and imports memory; see `Interchange`.
        memory: Its memory on accelerators, and its out-of-memory errors; see `Memory`.
        batching: How its arrays are split and joined; see `Batching`.
        fast_path: Functions for host arrays that need no special handling; see `FastPath`.
        streams: Its streams on accelerators; see `Streams`.
        autodiff: Its derivatives; see `Autodiff`.
        sparse: Its sparse arrays, if it has any; see `SparseArrays`.

    Example:
        >>> import numpy as np, arraybridge
        >>> class Table:  # the class of another library, without DLPack
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
    max_rank: ClassVar[int] = host_memory.MAX_RANK
    has_host: ClassVar[bool] = True
    errors: ClassVar[tuple[type[Exception], ...]] = ()

    streams: Streams = Streams()
    autodiff: Autodiff = NOT_DIFFERENTIABLE
    sparse: SparseArrays = NO_SPARSE_ARRAYS
    runtime = component(Runtime)
    devices = component(Devices)
    interchange = component(Interchange)
    memory = component(Memory)
    batching = component(Batching)
    fast_path = component(FastPath)

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
            ArrayNotSupportedError: If it has no such values. The advice states what to pass instead.
            DtypeNotSupportedError: If its elements are not numbers.
        """

    def dtype_name(self, x: Any) -> str:
        """Return NumPy's name of the dtype of an array.

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
        """Return the size of an array.

        Args:
            x: An array of the framework.

        Returns:
            The size of its elements in bytes, without gaps between them.
        """
        return int(x.nbytes)

    # -- host memory ------------------------------------------------------------------------------

    def host_view(self, x: Any) -> np.ndarray:
        """Return a NumPy view of an array's host memory.

        The view must keep the memory alive and in place, even if ``x`` is deleted. The default uses DLPack,
        including for bfloat16 and float8.

        Args:
            x: An array in host memory.

        Returns:
            The view. It is read-only if the framework is immutable.

        Raises:
            NotImplementedError: If the framework has no host arrays, or ``x`` has no ``__dlpack__``.
        """
        if not self.has_host or not hasattr(x, "__dlpack__"):
            raise NotImplementedError(
                f"{self.name} exports no host memory through DLPack. Define host_view() or to_host()."
            )
        view = dlpack_capsules.from_capsule(x.__dlpack__(), dtype_names.np_dtype(self.dtype_name(x)))
        return read_only.writable_alias(view) if self.mutable else view

    def to_host(self, x: Any) -> np.ndarray:
        """Copy an array to host memory.

        Args:
            x: An array of the framework, on any device.

        Returns:
            A complete copy that nothing else refers to.
        """
        return host_memory.aligned_copy(self.host_view(x))

    def from_host(self, view: np.ndarray, device: Device) -> Any:
        """Return an array with the values of a NumPy array.

        The default calls ``from_dlpack`` of the first of ``modules``, including for bfloat16 and float8, and
        then `Devices.to_device` for another device.

        Args:
            view: The values. On the CPU, `cannot_view` returned None for it. For other devices, it may have
                any layout.
            device: One of the available devices.

        Returns:
            On the CPU, an array that shares the memory of ``view``. On another device, a complete copy.
        """
        if device != CPU:
            on_host = self.from_host(host_memory.aligned_copy(view) if self.cannot_view(view) else view, CPU)
            return self.devices.to_device(on_host, device)
        capsule = dlpack_capsules.capsule(view)
        return sys.modules[self.modules[0]].from_dlpack(protocols.Importable(capsule))

    def cannot_view(self, view: np.ndarray) -> Cause | str | None:
        """Return why this framework cannot share the host memory of a NumPy array.

        Args:
            view: An array of any layout.

        Returns:
            The reason; None if it can share the memory. A framework from another package may return its own
            text, which follows "because".
        """
        if not self.alignment:
            return Cause(Reason.COPIES_ONLY, framework=self.name)
        if not view.dtype.isnative:
            return Cause(Reason.BYTE_ORDER)
        if not view.size:
            return None
        objection = self.interchange.cannot_stride(view.shape, view.strides, view.dtype.itemsize)
        if objection:
            return objection
        if self.alignment > 1 and host_memory.address(view) % self.alignment:
            return Cause(Reason.MISALIGNED, framework=self.name, alignment=self.alignment)
        return None

    # -- values -----------------------------------------------------------------------------------

    def copy(self, x: Any) -> Any:
        """Return a copy of an array.

        Args:
            x: An array of the framework.

        Returns:
            A C-contiguous copy on the same device, complete or ordered on its stream.
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
        values = host_memory.cast(self.to_host(x), dtype)
        return self.from_host(host_memory.aligned_copy(values), self.devices.device_of(x))

    def supports(self, dtype: str, shape: tuple[int, ...]) -> None:
        """Raise for a dtype or a shape that this framework does not support.

        Args:
            dtype: The name of the dtype.
            shape: The number of elements along each axis.

        Raises:
            DtypeNotSupportedError: If it does not have the dtype. The advice names a cast.
            ArrayNotSupportedError: If it does not support the number of axes or the size.
        """
        if len(shape) > self.max_rank:
            instead = f"it supports at most {self.max_rank} axes; reshape the array first"
            raise no_counterpart_error(self, f"an array of rank {len(shape)}", instead)
        if self.dtypes is not None and dtype not in self.dtypes:
            raise _missing_dtype_error(self, dtype, self.dtypes)

    @property
    def decorator(self) -> Any:
        """The decorator for functions written in this framework, such as ``arraybridge.torch``."""
        return hooks.decorator_of(self.name)


def _missing_device_error(framework: Framework, device: Device) -> DeviceNotFoundError:
    """Return the error for a device that ``framework`` does not have on this machine."""
    devices = framework.devices.available()
    requested = f"{device} of kind {device.accelerator!r}" if device.accelerator else str(device)
    found = ", ".join(str(d) for d in devices) or "no devices"
    advice = f'Pass one of these, such as device="{devices[0]}".' if devices else ""
    if framework.has_host and device.kind != "cpu":
        advice = (
            "Pass an available device, such as device='cpu'. To use the CPU whenever a GPU is missing, write"
            " \"with arraybridge.settings(missing_gpu='host'):\" around the call, or set the environment"
            " variable ARRAYBRIDGE_MISSING_GPU=host for all threads."
        )
    why = framework.devices.missing_device_reason() if _could_have(devices, device) else ""
    explanation = f" {why}" if why else ""
    return DeviceNotFoundError(
        f"{framework.name} has no device {requested} here; it has {found}.{explanation}",
        target_type=framework.name,
        reason=why or f"{framework.name} has no device {requested}",
        code=Reason.NO_DEVICE,
        advice=advice,
    )


def _could_have(devices: Sequence[Device], missing: Device) -> bool:
    """Return whether a framework with these devices could have the missing one on another machine."""
    if not devices:
        return True
    if missing.kind == "gpu":
        return missing.accelerator in ("", "cuda", "rocm")  # no build has all other accelerators
    return missing.kind == "opencl" and any(device.kind == "opencl" for device in devices)


# Names such as float6_e2m3fn and int1. NumPy stores each element in a byte; other libraries pack several
# elements into one byte.
_SUB_BYTE = re.compile(r"(?:u?int[1-7]|float[1-7]_\w+)$")
# Maps dtypes that only NumPy has to the nearest common dtype.
_NEAREST = {
    "float128": "float64",
    "float96": "float64",
    "complex256": "complex128",
    "complex192": "complex128",
}


def _missing_dtype_error(framework: Framework, dtype: str, dtypes: Iterable[str]) -> DtypeNotSupportedError:
    """Return the error for a dtype that arrays of ``framework`` cannot have."""
    if is_sub_byte(dtype):
        reason = f"{framework.name} cannot import {dtype}, because each library packs it differently"
        problem = f"{reason}."
    else:
        reason = f"{framework.name} has no dtype {dtype}"
        problem = f"{reason}; nothing was converted, because any other dtype could lose values."
    cast = _possible_cast(dtype, dtypes)
    if cast is None:
        advice = Advice(f"It has no {_kind_of_dtype(dtype)} dtype: convert x.real and x.imag separately.")
    else:
        advice = cast.by_option()
    return DtypeNotSupportedError(
        problem,
        target_type=framework.name,
        reason=reason,
        advice=advice,
        cast=cast,
    )


def _possible_cast(dtype: str, dtypes: Iterable[str]) -> Cast | None:
    """Return the suggested cast, which is to a dtype of the same kind so that values keep their meaning."""
    kind = _kind_of_dtype(dtype)
    same = [other for other in dtypes if _kind_of_dtype(other) == kind]
    if not same:
        return None
    exact = _exact_cast(dtype)
    if exact is not None and exact in same:
        return Cast(exact, keeps_values=True)
    nearest = _NEAREST.get(dtype)
    if nearest is not None and nearest in same:
        return Cast(nearest)
    usual = ("float32", "complex64", "int32")
    first, *others = [*sorted(set(same) & set(usual)), *sorted(set(same) - set(usual))]
    return Cast(first, tuple(others))


def _exact_cast(dtype: str) -> str | None:
    """Return a common dtype that holds every value of an uncommon dtype, or None."""
    if is_sub_byte(dtype):
        return wider_dtype(dtype)
    if dtype in ("float16", "bfloat16") or dtype.startswith("float8"):
        return "float32"
    return "uint8" if dtype == "bool" else None


def _kind_of_dtype(dtype: str) -> str:
    if dtype.startswith(("int", "uint", "bool")):
        return "integer"
    return "complex" if dtype.startswith("complex") else "floating"


def conversion_errors(*frameworks: Framework) -> tuple[type[Exception], ...]:
    """Return the exceptions that frameworks raise for arrays that they do not support.

    Args:
        frameworks: The frameworks that take part in a conversion.

    Returns:
        Built-in exceptions, and those in `Framework.errors`.
    """
    own = (error for framework in frameworks for error in framework.errors)
    return (TypeError, ValueError, RuntimeError, BufferError, NotImplementedError, *own)


def c_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Return the strides in bytes of a C-contiguous array."""
    return tuple(itemsize * math.prod(shape[axis:]) for axis in range(1, len(shape) + 1))


def unsupported_cast_error(
    framework: Framework, source: str, dtype: str, instead: str, *expressions: str
) -> DtypeNotSupportedError:
    """Return the error for a cast that a framework does not have, with the expressions to use instead."""
    return DtypeNotSupportedError(
        f"Cannot cast {source} to {dtype}: {framework.name} does not have this cast.",
        reason=f"{framework.name} cannot cast {source} to {dtype}",
        advice=Advice(instead, expressions),
    )


def is_c_contiguous(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    """Return whether strides (in bytes) are those of a C-contiguous array."""
    expected = itemsize
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent != 1 and stride != expected:
            return False
        expected *= extent
    return True


def unsupported_array_error(
    framework: Framework, what: str, instead: str, *expressions: str
) -> ArrayNotSupportedError:
    """Return the error for an array of ``framework`` that has no dense, concrete values.

    ``instead`` has a ``{}`` for each of the expressions, which refer to the array as ``{x}``.
    """
    return ArrayNotSupportedError(
        f"{what} of {framework.name} cannot be converted",
        source_type=framework.name,
        reason=what,
        advice=Advice(instead, expressions),
    )


def no_counterpart_error(
    framework: Framework, what: str, instead: str, *expressions: str
) -> ArrayNotSupportedError:
    """Return the error for an array of another framework that ``framework`` cannot represent."""
    reason = f"{framework.name} cannot hold {what}"
    return ArrayNotSupportedError(
        reason, target_type=framework.name, reason=reason, advice=Advice(instead, expressions)
    )


def nbytes_of_parts(framework: Framework, x: Any) -> int:
    """Return the bytes of the parts of a sparse array; 0 if they are not arrays that fit together."""
    try:
        parts = framework.sparse.take_apart(x)
    except ArrayNotSupportedError:
        return 0
    return 0 if parts is None else sum(framework.nbytes(one) for one in parts.arrays)


def take_over(framework: Framework, x: Any) -> Any:
    """Return an array from another stream such that this thread's stream may use and free it.

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


def sparse_array_error(framework: Framework, x: Any) -> ArrayNotSupportedError:
    """Return the error for a sparse array where only dense arrays are supported."""
    sparse = framework.sparse
    layout = sparse.layout(x)
    return ArrayNotSupportedError(
        f"A sparse {layout.upper()} array of {sparse.title} is not a dense array.",
        source_type=framework.name,
        reason=f"it is a sparse {layout.upper()} array",
        advice=Advice("Pass its stored values, {}.", (sparse.expressions(x).values,)),
    )


def unsupported_dtype_error(
    framework: Framework, dtype: object, instead: str, *expressions: str
) -> DtypeNotSupportedError:
    """Return the error for a dtype of ``framework`` that no other framework supports."""
    return DtypeNotSupportedError(
        f"{framework.name} arrays of dtype {dtype} cannot be converted",
        source_type=framework.name,
        reason=f"no other framework supports {dtype}",
        advice=Advice(instead, expressions),
    )


def sub_byte_dtype_error(framework: Framework, dtype: str) -> DtypeNotSupportedError:
    """Return the error for elements smaller than a byte. It suggests an exact cast."""
    return DtypeNotSupportedError(
        f"{framework.name} arrays of dtype {dtype} cannot be converted, because each library packs elements"
        " smaller than a byte differently",
        source_type=framework.name,
        reason=f"each library packs {dtype} differently",
        advice=Advice("pass {}, which holds every value", (f'{{x}}.astype("{wider_dtype(dtype)}")',)),
    )


def is_sub_byte(dtype: str) -> bool:
    """Return whether the elements of a dtype are smaller than a byte."""
    return _SUB_BYTE.match(dtype) is not None


def wider_dtype(dtype: str) -> str:
    """Return a byte-sized or larger dtype that holds every value of a dtype with smaller elements."""
    if dtype.startswith("float"):
        return "float32"
    return "uint8" if dtype.startswith("u") else "int8"
