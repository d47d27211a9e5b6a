"""The base class of frameworks and its components, whose defaults work through host memory."""

from __future__ import annotations

import math
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, TypeVar, overload

import numpy as np

from arraybridge.errors import (
    Advice,
    ArrayNotSupportedError,
    Cast,
    DeviceNotFoundError,
    DtypeNotSupportedError,
    MissingGpuWarning,
    warn,
)
from arraybridge.frameworks import dlpack_capsules, dtype_names, host_memory, protocols, read_only
from arraybridge.frameworks.accelerators import DeviceDetails, GpuMemory, Holding, Streams
from arraybridge.frameworks.autodiff import NOT_DIFFERENTIABLE, Autodiff
from arraybridge.reasons import Cause, Reason
from arraybridge.settings import missing_gpu
from arraybridge.types import Device, hooks

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
    "find_device_or_host",
    "is_c_contiguous",
]

CPU = Device("cpu", 0)


class Pytree(NamedTuple):  # a dataclass would take 2 % of the time of `import arraybridge`
    """One level of an object whose class is registered as a pytree with a framework.

    Attributes:
        children: The values that the class lists.
        places: The place of each child, such as ``.x``.
        structure: Everything else; equal for objects of the same structure.
        rebuild: A function that makes a similar object from other children.
    """

    children: Sequence[Any]
    places: Sequence[str]
    structure: Any
    rebuild: Callable[[Sequence[Any]], Any]


class OneLevel:
    """An ``is_leaf`` function for flattening one level: everything is a leaf, except the first object.

    Also an object that contains itself is flattened, without an endless recursion.
    """

    __slots__ = ("_has_root",)

    def __init__(self) -> None:
        self._has_root = False

    def __call__(self, node: Any) -> bool:
        is_leaf = self._has_root
        self._has_root = True
        return is_leaf


class Component:
    """A part of a framework, with defaults that work through host memory.

    Attributes:
        framework: The framework that it belongs to.
    """

    framework: Framework

    def __init__(self, framework: Framework) -> None:
        self.framework = framework


C = TypeVar("C", bound=Component)


class component(Generic[C]):  # noqa: N801  # used like a function
    """Assign a component to a framework class; each instance makes its own component at the first access."""

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
        # The next access finds it among the attributes of the instance.
        made = vars(instance)[self.name] = self.cls(instance)
        return made


class Observation:
    """How a trace reads arrays around calls of other libraries. The defaults fit any framework."""

    #: Whether an array on the host may still be computed when a call returns it.
    is_asynchronous: ClassVar[bool] = False
    #: Whether its own calls accept arrays of any strides.
    has_strides: ClassVar[bool] = False
    #: Whether its calls narrow 64-bit dtypes by default.
    narrows_64_bit: ClassVar[bool] = False

    def read(self, owner: Framework, x: Any) -> tuple[Any, int, int | None, Device]:
        """Return dtype, bytes, address and device of an array.

        The address is None for an array on several devices. The method raises for an array without memory.
        """
        owner.check(x)
        return owner.dtype_name(x), owner.nbytes(x), owner.interchange.address(x), owner.devices.device_of(x)

    def is_idle(self) -> bool:
        """Return whether no computation can be pending."""
        return False

    def unobserved(self) -> AbstractContextManager[Any]:
        """Return a context in which arrays are read without calling code of the program."""
        return nullcontext()


class Runtime(Component):
    """Settings, context managers and namespaces with which functions of the framework run.

    Attributes:
        metadata: Metadata about the package that is needed before it is imported, if ``name`` and ``modules`` do
            not say it all.
        settings: Settings of a thread that change results. Each is a function that returns the value, and one
            that makes a context manager for a value.
    """

    metadata: ClassVar[FrameworkMetadata | None] = None
    settings: ClassVar[Sequence[tuple[Callable[[], Any], Callable[[Any], AbstractContextManager[Any]]]]] = ()

    #: How a trace reads its arrays.
    observation: ClassVar[Observation] = Observation()

    def open_pytree(self, x: Any) -> Pytree | None:
        """Return the children of an object whose class is registered as a pytree here, or None."""
        return None

    def device_guard(self, x: Any) -> AbstractContextManager[Any]:
        """Return a context in which the framework's functions accept ``x`` and keep 64-bit dtypes."""
        return self.x64_context()

    def array_classes(self) -> tuple[type, ...]:
        """Return the classes of its arrays, or base classes, for libraries that dispatch by class."""
        return self.framework.fast_path.fast_types()

    def array_namespace(self) -> Any:
        """Return the array API namespace for its arrays, or None."""
        return None

    def thread_settings(self) -> Callable[[], AbstractContextManager[Any]]:
        """Return a context manager that applies the settings of the current thread to another thread."""
        values = [(current, under, current()) for current, under in self.settings]

        @contextmanager
        def same() -> Iterator[None]:
            with ExitStack() as stack:
                for current, under, value in values:
                    if current() != value:
                        stack.enter_context(under(value))
                yield

        return same

    def x64_context(self) -> AbstractContextManager[Any]:
        """Return a context in which arithmetic keeps 64-bit dtypes."""
        return nullcontext()

    def annotation(self, name: str) -> AbstractContextManager[Any]:
        """Return a span of that name in the framework's profiler; an empty context if it has no profiler."""
        return nullcontext()

    def late_errors(self, cls: type) -> Callable[[Any], object] | None:
        """Return a function that waits for an array of this class, if its errors need that; or None."""
        return None


class Devices(Component):
    """Devices of the framework, and the devices of its arrays.

    Attributes:
        has_only_host: Whether its arrays are always in host memory, so that ``gpu_id`` has no effect (NumPy).
        selects_per_thread: Whether `selected` affects only the calling thread, not the whole process.
    """

    has_only_host: ClassVar[bool] = False
    selects_per_thread: ClassVar[bool] = True

    def device_of(self, x: Any) -> Device:
        """Return the device of an array."""
        return CPU

    def replica(self, x: Any, device: Device) -> Any | None:
        """Return one of the equal arrays that make up ``x``, if possible the one on ``device``.

        None for an array that is not replicated over several devices.
        """
        return None

    def available(self) -> tuple[Device, ...]:
        """Return all devices that the framework can use here."""
        return (CPU,)

    def visible_devices(self) -> tuple[Device, ...]:
        """Return the available devices, without initializing the driver if possible."""
        return self.available()

    def accelerator(self, index: int) -> Device:
        """Return the device for ``gpu_id=index``."""
        return Device("gpu", index)

    def default_device(self) -> Device:
        """Return the device for arrays from a device that this framework does not have."""
        return CPU

    def find_device(self, device: Device) -> Device:
        """Return the framework's own entry for ``device``.

        Raises:
            DeviceNotFoundError: If it does not have the device. The message lists the available devices.
        """
        devices = self.available()
        for own in devices:
            if own == device and self.has_accelerator(device.accelerator):
                return own
        raise _no_such_device(self.framework, device)

    def accelerators(self) -> tuple[str, ...]:
        """Return the kinds of its accelerators, as device strings name them: ``("cuda",)``."""
        kinds = {2: ("cuda",), 8: ("mps",), 10: ("rocm", "cuda"), 14: ("xpu",)}  # PyTorch calls ROCm cuda too
        return kinds.get(self.framework.interchange.dlpack_device or 0, ())

    def has_accelerator(self, kind: str) -> bool:
        """Return whether its accelerators are of this kind; true for ``""``, and if it does not know."""
        return not kind or kind in (self.accelerators() or (kind,))

    def missing_device_reason(self) -> str:
        """Return a sentence that states why there is no accelerator and how to get one, or ``""``."""
        return ""

    def to_device(self, x: Any, device: Device) -> Any:
        """Return a copy of the array on another device of this framework, complete on return."""
        return self.framework.from_host(self.framework.to_host(x), device)

    def check_move(self, x: Any, device: Device) -> None:
        """Raise for one of its own arrays that cannot move to another of its devices."""

    def selected(self, device: Device) -> AbstractContextManager[Any]:
        """Return a context in which ``device`` is the framework's current device for this thread."""
        return nullcontext()

    def is_started(self) -> bool:
        """Return whether the accelerator driver is initialized. Memory is only queried then."""
        return False

    def is_scattered(self, x: Any) -> bool:
        """Return whether the memory of an array is distributed over several devices."""
        return False

    def read_device(self, x: Any) -> Device | None:
        """Return the device for a native device object such as ``torch.device``; None for other objects."""
        return None

    def native_device(self, device: Device) -> Any:
        """Return the native object or name of a device; a device string if the framework has neither."""
        return str(device)


class Interchange(Component):
    """How arrays are handed to other frameworks, and when they cannot be shared.

    Attributes:
        dlpack_device: The DLPack device type of its accelerator arrays (2: CUDA), or None. Frameworks of
            the same type share memory there.
        all_pickle: Whether each of its arrays can be pickled without a loss.
    """

    all_pickle: ClassVar[bool] = True
    dlpack_device: int | None = None

    def strides(self, x: Any) -> tuple[int, ...]:
        """Return the strides in bytes of an array on an accelerator."""
        return c_strides(self.framework.shape(x), dtype_names.np_dtype(self.framework.dtype_name(x)).itemsize)

    def address(self, x: Any) -> int:
        """Return the address of the first element of an array on an accelerator; 0 if it is unknown."""
        return 0

    def copy_reason(self, x: Any) -> Cause | str | None:
        """Return why the values cannot be read where they are, or None; `to_host` and `copy` copy them.

        A framework from another package may return its own text, which follows "because".
        """
        return None

    def cannot_stride(
        self, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int
    ) -> Cause | str | None:
        """Return why this framework cannot view memory with these strides (in bytes), or None.

        A framework from another package may return its own text, which follows "because".
        """
        return None

    def import_from(self, x: Any, source: Framework, device: Device) -> Any:
        """Return an array that shares the accelerator memory of ``x``, an array of ``source`` on ``device``.

        Work queued on the source's stream is ordered before the consumer's work. By default, this waits until
        it is done, and then calls ``from_dlpack`` of the first of ``modules``.
        """
        with source.devices.selected(device):  # PyTorch only exports from the current GPU
            source.interchange.block_until_ready(x)
            return sys.modules[self.framework.modules[0]].from_dlpack(source.interchange.export(x, device))

    def export(self, x: Any, device: Device) -> Any:
        """Return ``x``, on a GPU, in a form that ``from_dlpack`` of other frameworks accepts.

        Its ``__dlpack__`` orders the work queued on ``x`` before the work of the given stream, or waits.
        """
        return x

    def block_until_ready(self, x: Any) -> None:
        """Wait until ``x`` is computed, if possible only for its stream."""

    def check_copy(self, x: Any) -> None:
        """Raise for an array that `copy` does not support."""

    def check_cast(self, source: str, dtype: str) -> None:
        """Raise if this framework cannot cast from one dtype to another.

        Raises:
            DtypeNotSupportedError: If there is no such cast.
        """

    def is_plain(self, x: Any) -> bool:
        """Return whether ``x`` is a plain array: no parameter, variable, subclass or attributes."""
        return True


class Memory(Component):
    """Memory that the framework holds on accelerators, and its out-of-memory errors."""

    def is_oom(self, error: BaseException) -> bool:
        """Return whether ``error``, regardless of its cause, is an out-of-memory error of this framework."""
        return isinstance(error, MemoryError)

    def is_oom_text(self, text: str) -> bool:
        """Return whether a message that another error quotes is an out-of-memory message of this framework.

        Recognizes only messages that begin like the framework's own, because the class of the quoted error is
        unknown.
        """
        return False

    def device_details(self, device: Device) -> DeviceDetails:
        """Return name, identity and memory size of a device, as far as the framework knows them."""
        return DeviceDetails(device.name)

    def device_memory(self, device: Device) -> GpuMemory | None:
        """Return the memory of a GPU; None if the framework does not know it."""
        return None

    def free_memory_of(self, device: Device) -> int:
        """Return the bytes that the framework can still allocate on a GPU with its cache; 0 if unknown."""
        from arraybridge import hardware  # costs 1 ms, which `import arraybridge` saves

        free = hardware.free_memory(device.index) if device.kind == "gpu" else None
        if free is None:
            memory = self.device_memory(device)
            free = 0 if memory is None else memory.free
        return free + sum(one.cached or 0 for one in self.usage() if one.device == device)

    def usage(self) -> list[Holding]:
        """Return the memory that the framework holds, one entry per device that it has opened."""
        return []

    def reset_peak(self) -> None:
        """Reset `Holding.peak` on all devices, if the framework counts it."""

    def oom_error(self) -> Exception:
        """Return an error like the one that the framework raises when memory runs out, to simulate it."""
        return MemoryError("Unable to allocate: a rehearsal")

    def free_cache(self, device: Device | None, compiled: bool = False) -> int:
        """Release cached memory on ``device`` (None: all devices), and return the number of bytes.

        ``compiled`` also releases compiled programs. Returns 0 for a device that the framework does not have.
        """
        return 0

    def pinned_bytes(self, nbytes: int) -> np.ndarray | None:
        """Return page-locked host memory as a uint8 array of shape ``(nbytes,)``; None without a GPU."""
        return None

    def synchronize(self) -> None:
        """Wait for all work that this process has queued, on every device that it has opened."""


class Batching(Component):
    """Splits arrays into parts and joins parts; through host memory by default."""

    def slice_axis(self, x: Any, axis: int, start: int, stop: int) -> Any:
        """Return ``x[start:stop]`` along ``axis``, as a view if the framework has views."""
        framework = self.framework
        values = framework.to_host(x)[_rows(axis, len(framework.shape(x)), start, stop)]
        return framework.from_host(host_memory.aligned_copy(values), framework.devices.device_of(x))

    def concatenate(self, parts: list[Any], axis: int) -> Any:
        """Return a new array that joins arrays of one device along ``axis``."""
        return self._joined("concat", np.concatenate, parts, axis)

    def stack(self, planes: list[Any]) -> Any:
        """Return a new array that stacks arrays of one shape, dtype and device along a new first axis."""
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
        """Return the arrays along the first axis, as views if the framework has views."""
        framework = self.framework
        device = framework.devices.device_of(x)
        return [
            framework.from_host(host_memory.aligned_copy(plane), device) for plane in framework.to_host(x)
        ]

    def output_buffer(self, part: Any, shape: tuple[int, ...]) -> Any:
        """Return an empty array like ``part`` with another shape, to which parts are assigned by index.

        None if parts are collected and concatenated at the end instead.
        """
        return None

    def empty(self, shape: tuple[int, ...], dtype: str, device: Device) -> Any:
        """Return an uninitialized array."""
        return self.framework.from_host(host_memory.aligned_empty(shape, dtype_names.np_dtype(dtype)), device)

    def reinterpret(self, memory: Any, shape: tuple[int, ...], dtype: str) -> Any:
        """Return a view of the first bytes of ``memory`` as another array; None without such views."""
        return None


def _rows(axis: int, rank: int, start: int, stop: int) -> tuple[slice, ...]:
    """Return the index of the rows from ``start`` to ``stop`` along ``axis``."""
    return (*(slice(None),) * (axis % rank), slice(start, stop))


class IndexedBatching(Batching):
    """Splits arrays by indexing them as NumPy does, on their device."""

    def slice_axis(self, x: Any, axis: int, start: int, stop: int) -> Any:
        with self.framework.runtime.device_guard(x):
            return x[_rows(axis, len(self.framework.shape(x)), start, stop)]

    def unstack(self, x: Any) -> list[Any]:
        with self.framework.runtime.device_guard(x):
            return [x[i] for i in range(self.framework.shape(x)[0])]


class FastPath(Component):
    """Functions for host arrays that need no special handling.

    They raise for an array that needs it: a Python error, or one of ``errors``, which no user sees.
    """

    def fast_types(self) -> tuple[type, ...]:
        """Return the exact types that the fast functions accept; subclasses take the slow path."""
        return ()

    #: ``(x, alignment)`` → the plan key of a host array for a target with that alignment. Arrays with equal
    #: keys have equal results of `check`, `device_of`, `copy_reason`, `requires_grad`, `supports` and
    #: `cannot_view`. Raises for an array that is not in host memory.
    plan_key: Any = None
    #: A function that returns the NumPy view of a host array.
    fast_view: Any = None
    #: A function that returns an array sharing the memory of a NumPy array, faster than through DLPack.
    fast_from_view: Any = None
    #: A function that exports a host array, aligned to `hostmemory.ALIGNMENT` bytes, as a DLPack capsule.
    fast_export: Any = None
    #: A function that imports a capsule from an immutable framework, or into one. A mutable framework copies
    #: 0-d arrays, because immutable frameworks cache scalars.
    fast_import: Any = None


class Framework(ABC):
    """A framework that arrays are converted from and to: a core, and components with defaults.

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
        respects_read_only: Whether it can mark arrays as read-only. Views of immutable memory are read-only.
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
    runtime = component(Runtime)
    devices = component(Devices)
    interchange = component(Interchange)
    memory = component(Memory)
    batching = component(Batching)
    fast_path = component(FastPath)

    # -- which arrays, and what they hold ---------------------------------------------------------

    @abstractmethod
    def owns(self, x: Any) -> bool:
        """Return whether ``x`` is an array of this framework or of a subclass. Depends only on its type."""

    def check(self, x: Any) -> None:
        """Raise for an array without dense, concrete values, such as a sparse, masked or traced array.

        Raises:
            ArrayNotSupportedError: If it has no such values. The advice states what to pass instead.
            DtypeNotSupportedError: If its elements are not numbers.
        """

    def dtype_name(self, x: Any) -> str:
        """Return NumPy's name of the array's dtype, such as ``"float32"`` or ``"bfloat16"``."""
        return dtype_names.name_of(np.dtype(x.dtype))

    def shape(self, x: Any) -> tuple[int, ...]:
        """Return the shape of an array."""
        return tuple(x.shape)

    def nbytes(self, x: Any) -> int:
        """Return the size of the elements in bytes, without gaps."""
        return int(x.nbytes)

    # -- host memory ------------------------------------------------------------------------------

    def host_view(self, x: Any) -> np.ndarray:
        """Return a NumPy view of the array's host memory, read-only if the framework is immutable.

        The view must keep the memory alive and in place, even if ``x`` is deleted. The default uses DLPack,
        including for bfloat16 and float8.
        """
        if not self.has_host or not hasattr(x, "__dlpack__"):
            raise NotImplementedError(f"{self.name} shows no host memory")
        view = dlpack_capsules.from_capsule(x.__dlpack__(), dtype_names.np_dtype(self.dtype_name(x)))
        return read_only.writable_alias(view) if self.mutable else view

    def to_host(self, x: Any) -> np.ndarray:
        """Return a copy of the values in host memory that nothing else refers to, complete on return."""
        return host_memory.aligned_copy(self.host_view(x))

    def from_host(self, view: np.ndarray, device: Device) -> Any:
        """Return an array on ``device`` with the values of ``view``.

        On a CPU device it shares the memory of ``view``, for which `cannot_view` returned None. On another
        device it is a copy, complete on return, and ``view`` may have any layout.

        The default calls ``from_dlpack`` of the first of ``modules``, including for bfloat16 and float8, and
        then `Devices.to_device` for another device.
        """
        if device != CPU:
            on_host = self.from_host(host_memory.aligned_copy(view) if self.cannot_view(view) else view, CPU)
            return self.devices.to_device(on_host, device)
        capsule = dlpack_capsules.capsule(view)
        return sys.modules[self.modules[0]].from_dlpack(protocols.Importable(capsule))

    def cannot_view(self, view: np.ndarray) -> Cause | str | None:
        """Return why this framework cannot share the host memory of ``view``, or None.

        A framework from another package may return its own text, which follows "because".
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
        """Return a C-contiguous copy on the same device, complete on return or ordered on its stream."""
        return self.from_host(self.to_host(x), self.devices.device_of(x))

    def cast(self, x: Any, dtype: str) -> Any:
        """Return ``x`` cast to another dtype by the rules of this framework."""
        values = self.to_host(x).astype(dtype_names.np_dtype(dtype))
        return self.from_host(host_memory.aligned_copy(values), self.devices.device_of(x))

    def supports(self, dtype: str, shape: tuple[int, ...]) -> None:
        """Raise for a dtype or a rank that this framework does not have.

        Raises:
            DtypeNotSupportedError: If it does not have the dtype. The advice names a cast.
            ArrayNotSupportedError: If it does not have the rank or the size.
        """
        if len(shape) > self.max_rank:
            instead = f"it takes at most {self.max_rank} axes; reshape it first"
            raise no_counterpart_error(self, f"an array of rank {len(shape)}", instead)
        if self.dtypes is not None and dtype not in self.dtypes:
            raise _no_dtype(self, dtype, self.dtypes)

    @property
    def decorator(self) -> Any:
        """The decorator for functions written in this framework, such as ``arraybridge.torch``."""
        return hooks.decorator_of(self.name)


def _no_such_device(framework: Framework, device: Device) -> DeviceNotFoundError:
    """Return the error for a device that ``framework`` does not have here."""
    devices = framework.devices.available()
    asked = f"{device} of kind {device.accelerator!r}" if device.accelerator else str(device)
    have = ", ".join(str(d) for d in devices) or "no device at all"
    advice = "Pass one of these." if devices else ""
    if framework.has_host and device.kind != "cpu":
        advice = (
            'Pass one of these, or opt in to the host with settings(missing_gpu="host"), or for all'
            " threads with the environment variable ARRAYBRIDGE_MISSING_GPU=host."
        )
    why = framework.devices.missing_device_reason() if device.kind != "cpu" else ""
    explanation = f" {why}" if why else ""
    return DeviceNotFoundError(
        f"{framework.name} has no device {asked} here; it has {have}.{explanation}",
        target_type=framework.name,
        reason=why or f"{framework.name} has no device {asked}",
        code=Reason.NO_DEVICE,
        advice=advice,
    )


# float6_e2m3fn and int1, say; in NumPy they take a whole byte each, elsewhere several share one.
_SUB_BYTE = re.compile(r"(?:u?int[1-7]|float[1-7]_\w+)$")
# Dtypes that only NumPy has, or that libraries pack differently → the cast that loses least, or nothing.
_NEAREST = {
    "float128": "float64",
    "float96": "float64",
    "complex256": "complex128",
    "complex192": "complex128",
}


def _no_dtype(framework: Framework, dtype: str, dtypes: Iterable[str]) -> DtypeNotSupportedError:
    """Return the error for a dtype that arrays of ``framework`` cannot have."""
    if is_sub_byte(dtype):
        reason = f"{framework.name} takes no {dtype} from others, since each library packs it in another way"
        problem = f"{reason}."
    else:
        reason = f"{framework.name} has no dtype {dtype}"
        problem = f"{reason}; nothing was converted, since any other dtype could lose values."
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
    """Return the cast to ask for: to dtypes of the same kind, since no others keep what the values mean."""
    kind = _kind_of_dtype(dtype)
    same = [other for other in dtypes if _kind_of_dtype(other) == kind]
    if not same:
        return None
    exact = wider_dtype(dtype) if is_sub_byte(dtype) else _NEAREST.get(dtype)
    if exact is not None and exact in same:
        return Cast(exact, keeps_values=is_sub_byte(dtype))
    usual = ("float32", "complex64", "uint8" if dtype == "bool" else "int32")
    first, *others = [*sorted(set(same) & set(usual)), *sorted(set(same) - set(usual))]
    return Cast(first, tuple(others))


def _kind_of_dtype(dtype: str) -> str:
    if dtype.startswith(("int", "uint", "bool")):
        return "integer"
    return "complex" if dtype.startswith("complex") else "floating"


def find_device_or_host(framework: Framework, device: Device) -> Device:
    """``device``, if the framework has it; under ``settings(missing_gpu="host")`` the CPU instead of a GPU.

    Raises:
        DeviceNotFoundError: it has not, and its arrays cannot go to the host, or are not to.
    """
    try:
        return framework.devices.find_device(device)
    except DeviceNotFoundError as error:
        if device.kind == "cpu" or not framework.has_host or missing_gpu() != "host":
            raise
        words = f"{framework.name}: {device} is missing, so the host takes its place. {error.reason}"
        warn(words, MissingGpuWarning)
        return CPU


def conversion_errors(*frameworks: Framework) -> tuple[type[Exception], ...]:
    """What these frameworks raise for an array that they do not take."""
    own = (error for one in frameworks for error in one.errors)
    return (TypeError, ValueError, RuntimeError, BufferError, NotImplementedError, *own)


def c_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Strides in bytes of a C-contiguous array."""
    return tuple(itemsize * math.prod(shape[axis:]) for axis in range(1, len(shape) + 1))


def unsupported_cast_error(
    framework: Framework, source: str, dtype: str, instead: str
) -> DtypeNotSupportedError:
    """Return the error for a cast that a framework does not have."""
    return DtypeNotSupportedError(
        f"Cannot cast {source} to {dtype}: {framework.name} does not have this cast.",
        reason=f"{framework.name} cannot cast {source} to {dtype}",
        advice=instead,
    )


def is_c_contiguous(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    """Whether the elements lie one beside the other, in the order of the axes."""
    expected = c_strides(shape, itemsize)
    return all(a == b or n == 1 for a, b, n in zip(strides, expected, shape, strict=True))


def unsupported_array_error(
    framework: Framework, what: str, instead: str, *expressions: str
) -> ArrayNotSupportedError:
    """Return the error for an array of ``framework`` that has no dense, concrete values.

    ``instead`` has ``{}`` in the place of each of the expressions, which are about ``x``, the array.
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
    """Return the error for an array of another framework that has no place in ``framework``."""
    reason = f"{framework.name} cannot hold {what}"
    return ArrayNotSupportedError(
        reason, target_type=framework.name, reason=reason, advice=Advice(instead, expressions)
    )


def unsupported_dtype_error(
    framework: Framework, dtype: object, instead: str, *expressions: str
) -> DtypeNotSupportedError:
    """Return the error for elements of ``framework`` that no other framework can hold."""
    return DtypeNotSupportedError(
        f"{framework.name} arrays of dtype {dtype} cannot be converted",
        source_type=framework.name,
        reason=f"no other framework holds {dtype}",
        advice=Advice(instead, expressions),
    )


def sub_byte_dtype_error(framework: Framework, dtype: str) -> DtypeNotSupportedError:
    """Return the error for an array whose elements are smaller than a byte, with the cast that is exact."""
    return DtypeNotSupportedError(
        f"{framework.name} arrays of dtype {dtype} cannot be converted, because each library packs elements"
        " of less than a byte in another way",
        source_type=framework.name,
        reason=f"each library packs {dtype} in another way",
        advice=Advice("pass {}, which holds every value", (f'{{x}}.astype("{wider_dtype(dtype)}")',)),
    )


def is_sub_byte(dtype: str) -> bool:
    """Return whether the elements of a dtype of that name take less than a byte each."""
    return _SUB_BYTE.match(dtype) is not None


def wider_dtype(dtype: str) -> str:
    """Return the dtype that holds every value of a dtype whose elements take less than a byte each."""
    if dtype.startswith("float"):
        return "float32"
    return "uint8" if dtype.startswith("u") else "int8"
