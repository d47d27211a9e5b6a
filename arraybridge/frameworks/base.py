"""The questions that every framework answers.

A framework is one class with one instance. To add one, derive from `Framework`, answer at least
`owns`, `host_view` and `from_host`, and hand an instance to `arraybridge.register`; everything else
has an answer here that works through the host.
"""

from __future__ import annotations

import importlib.util
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from arraybridge.errors import ArrayNotSupportedError, DeviceNotFoundError, DtypeNotSupportedError
from arraybridge.frameworks import hostmemory
from arraybridge.types import Device

__all__ = ["CPU", "Fallback", "Framework", "Mark", "Usage"]

CPU = Device("cpu", 0)


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes that a framework holds on a device; None where it does not count them.

    ``used`` by live arrays, ``cached`` on top of that for arrays to come, ``peak`` the most ever used.
    """

    device: Device
    used: int | None
    cached: int | None
    peak: int | None


class Mark(NamedTuple):
    """A point in a thread's queue of work on an accelerator, as `Framework.mark` makes it.

    ``wait`` lets the queue of the calling thread wait for it, without waiting itself; ``synchronize`` waits;
    ``is_done`` looks.
    """

    framework: Framework
    device: Device
    wait: Callable[[], object]
    synchronize: Callable[[], object]
    is_done: Callable[[], bool]


class Fallback(Exception):  # noqa: N818  # a signal, no error
    """Raised by a fast converter for an array that needs the careful path; never reaches a user."""


class Framework(ABC):
    """What arraybridge must know of a framework.

    Class attributes:
        name: how users name the framework.
        modules: root modules in which the types of its arrays are defined; an object whose class
            comes from none of them is never asked for.
        extra: the extra of arraybridge that installs it, or "" (`install_hint` says more).
        alignment: bytes to which memory must be aligned before the framework can view it.
        mutable: whether its arrays can be written to in place.
        honours_readonly: whether it can mark an array as read-only; views of immutable memory are.
        dtypes: names of the dtypes that it has; None for "whatever NumPy has".
        has_host: whether its arrays can live in host memory.
        dlpack_device: DLPack device type of its accelerator arrays (2: CUDA), or None; two frameworks
            with the same type hand arrays to each other on the card.
        can_pin: whether large arrays may travel through pinned buffers to its cards and back; it then
            answers `pinned_bytes`, `is_pinned`, `enqueue_copy`, `is_bare` and `empty`.
        counts_pinned: whether `free_cache` counts the pinned memory that `pinned_bytes` once handed out.
        all_pickle: whether every array pickles by itself, and bit for bit; where not, `pickles` tells.
        default_modules: root modules to import it by, first one that is installed; `name` where empty.
    """

    name: ClassVar[str]
    modules: ClassVar[tuple[str, ...]] = ()
    extra: ClassVar[str] = ""
    alignment: ClassVar[int] = 1
    mutable: ClassVar[bool] = True
    honours_readonly: ClassVar[bool] = False
    dtypes: ClassVar[frozenset[str] | None] = None
    has_host: ClassVar[bool] = True
    all_pickle: ClassVar[bool] = True
    dlpack_device: int | None = None
    can_pin: bool = False
    counts_pinned: bool = False

    def __repr__(self) -> str:
        return f"<arraybridge framework {self.name!r}>"

    # -- which arrays, and what they hold ---------------------------------------------------------

    @abstractmethod
    def owns(self, x: Any) -> bool:
        """Whether ``x`` is an array of this framework, subclasses included; a question of its type alone."""

    def check(self, x: Any) -> None:
        """Refuse an array that has no dense, concrete values (sparse, masked, traced, …).

        Raises:
            ArrayNotSupportedError: saying what to do instead.
            DtypeNotSupportedError: for elements that are no numbers.
        """

    def dtype_name(self, x: Any) -> str:
        """NumPy's name of the array's dtype: ``"float32"``, ``"bfloat16"``."""
        return str(np.dtype(x.dtype).name)

    def shape(self, x: Any) -> tuple[int, ...]:
        return tuple(x.shape)

    def nbytes(self, x: Any) -> int:
        """Bytes that the elements occupy when they are packed."""
        return int(x.nbytes)

    def array_classes(self) -> tuple[type, ...]:
        """The classes of its arrays, or bases of them, for libraries that go by class."""
        return self.exact_types()

    def is_plain(self, x: Any) -> bool:
        """Whether it is no more than its values: no parameter, variable or subclass, and no attributes."""
        return True

    def pickles(self, x: Any) -> bool:
        """Whether the array pickles by itself, and bit for bit."""
        return self.all_pickle

    def held_bytes(self, x: Any) -> int:
        """Bytes of memory that the array keeps from others."""
        return self.nbytes(x)

    def strides(self, x: Any) -> tuple[int, ...]:
        """Bytes to step along each axis, for an array on an accelerator."""
        return c_strides(self.shape(x), hostmemory.np_dtype(self.dtype_name(x)).itemsize)

    def address(self, x: Any) -> int:
        """Address of the first element, for an array on an accelerator; 0 where it cannot be known."""
        return 0

    def device_of(self, x: Any) -> Device:
        """Where the array lives."""
        return CPU

    def is_scattered(self, x: Any) -> bool:
        """Whether the array's memory is spread over several devices, so that there is nothing to share."""
        return False

    def is_lazy(self, x: Any) -> bool:
        """Whether the values differ from the bytes in memory until `resolve` has made a copy."""
        return False

    def resolve(self, x: Any) -> Any:
        return x

    def requires_grad(self, x: Any) -> bool:
        return False

    def detach(self, x: Any) -> Any:
        return x

    # -- host memory ------------------------------------------------------------------------------

    @abstractmethod
    def host_view(self, x: Any) -> np.ndarray:
        """The array's own host memory as a NumPy array; read-only where the framework is immutable.

        As long as the view lives, the memory may not be freed or moved, whatever becomes of ``x``.
        """

    def to_host(self, x: Any) -> np.ndarray:
        """The array's values in host memory that nothing else refers to, complete on return."""
        return hostmemory.fresh(self.host_view(x))

    @abstractmethod
    def from_host(self, view: np.ndarray, device: Device) -> Any:
        """An array of this framework on ``device`` with the values of ``view``.

        On a CPU device it shares the memory of ``view``, for which `cannot_view` found no objection.
        On another device it is a copy, complete on return, and ``view`` may have any layout.
        """

    def copy_from_host(self, view: np.ndarray, device: Device = CPU) -> Any:
        """An array of this framework on a CPU device with a copy of ``view``, complete on return."""
        return self.from_host(hostmemory.fresh(view), device)

    def cannot_stride(self, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> str:
        """Why this framework cannot view memory with these strides (in bytes), or ``""``."""
        return ""

    def cannot_view(self, view: np.ndarray) -> str:
        """Why this framework cannot share the host memory of ``view``, or ``""``."""
        if not view.dtype.isnative:
            return "its bytes are in the other order"
        objection = self.cannot_stride(view.shape, view.strides, view.dtype.itemsize) if view.size else ""
        if objection:
            return objection
        if self.alignment > 1 and view.size and hostmemory.address(view) % self.alignment:
            return f"its memory is not aligned to {self.alignment} bytes"
        return ""

    # -- devices ----------------------------------------------------------------------------------

    def devices(self) -> tuple[Device, ...]:
        """Every device that the framework can use here."""
        return (CPU,)

    def accelerator(self, index: int) -> Device:
        """The device that ``gpu_id=index`` means."""
        return Device("gpu", index)

    def default_device(self) -> Device:
        """Where an array goes that comes from a device which this framework does not have."""
        return CPU

    def find_device(self, wanted: Device) -> Device:
        """``wanted``, if the framework has it.

        Raises:
            DeviceNotFoundError: it has not; the message lists the devices that are there.
        """
        there = self.devices()
        for device in there:
            if device == wanted:
                return device
        have = ", ".join(str(d) for d in there) or "no device at all"
        advice = " Pass one of these." if there else ""
        if self.has_host and wanted.kind != "cpu":
            advice = ' Pass one of these, or opt in to the host with settings(missing_gpu="host").'
        why = self.missing_device_reason() if wanted.kind != "cpu" else ""
        raise DeviceNotFoundError(
            f"{self.name} has no device {wanted} here; it has {have}." + (f" {why}" if why else "") + advice,
            target_type=self.name,
            reason=why or f"{self.name} has no device {wanted}",
        )

    def missing_device_reason(self) -> str:
        """Why there is no accelerator, and what would bring one, in a sentence; or ``""``."""
        return ""

    def visible_devices(self) -> tuple[Device, ...]:
        """Its devices as `devices` will give them; opens no accelerator where it can tell without."""
        known = self.known_devices()
        return self.devices() if known is None else known

    def card_of(self, device: Device) -> tuple[str, str, int | None]:
        """Name, identity (UUID or PCI address) and bytes of a device; ``""`` and None where it cannot tell.

        Opens no accelerator.
        """
        return device.name, "", None

    def array_namespace(self) -> Any:
        """The module of the Python array API for its arrays.

        Raises:
            ArrayNotSupportedError: it has none.
        """
        raise ArrayNotSupportedError(
            f"{self.name} arrays have no array API namespace; convert them first, as in"
            ' convert_memory(x, "cupy") or convert_memory(x, "numpy")',
            source_type=self.name,
            reason=f"{self.name} has no array API",
        )

    def thread_settings(self) -> Callable[[], AbstractContextManager[Any]]:
        """What this thread has set for itself alone, as a context for another thread that works for it."""
        return nullcontext

    def take_stream(self, device: Device) -> None:
        """From now on this thread queues its work on ``device`` on a stream of its own.

        For threads that run a stage of a pipeline, and end.
        """

    def mark(self, device: Device) -> Mark | None:
        """The point that this thread's queue of work on ``device`` has reached; None without such queues."""
        return None

    def take_over(self, x: Any) -> Any:
        """``x``, which was made on another thread's stream, safe to be used and freed on that of this thread.

        This thread's stream has waited for the mark set after ``x`` was made.
        """
        return x

    def finish(self, x: Any) -> None:
        """Wait until ``x`` is computed, also where `settle` need not, for a measurement."""
        self.settle(x)

    def free_memory_of(self, device: Device) -> int:
        """Free bytes on the device, for ``gpu_id="auto"``; 0 where the framework cannot tell."""
        return 0

    def to_device(self, x: Any, device: Device) -> Any:
        """The array on another device of this framework; always a copy, complete on return."""
        return self.from_host(self.to_host(x), device)

    def adopt(self, x: Any, source: Framework, device: Device) -> Any:
        """An array that shares the accelerator memory of ``x``, an array of ``source`` on ``device``.

        Work queued on the source's stream is ordered before the consumer's.
        """
        raise NotImplementedError(f"{self.name} imports no accelerator memory")

    def settle(self, x: Any) -> None:
        """Wait until the work that computes ``x`` is done (its stream alone, not the device)."""

    # -- values -----------------------------------------------------------------------------------

    def copy(self, x: Any) -> Any:
        """A C-contiguous copy on the same device, complete on return or ordered on its stream."""
        return self.copy_from_host(self.host_view(x), self.device_of(x))

    def cast(self, x: Any, dtype: str) -> Any:
        """``x`` in another dtype, cast as this framework casts."""
        return self.copy_from_host(self.host_view(x).astype(hostmemory.np_dtype(dtype)), self.device_of(x))

    def supports(self, dtype: str, shape: tuple[int, ...]) -> None:
        """Refuse a dtype or a rank that this framework does not have.

        Raises:
            DtypeNotSupportedError: with the dtype to ask for.
            ArrayNotSupportedError: for a rank or size.
        """
        if self.dtypes is not None and dtype not in self.dtypes:
            raise DtypeNotSupportedError(
                f"{self.name} has no dtype {dtype}; nothing was converted, since any other dtype could lose"
                f" values. Pass dtype= one of {', '.join(sorted(self.dtypes))} to ask for a cast.",
                target_type=self.name,
                reason=f"{self.name} has no dtype {dtype}",
            )

    # -- memory -----------------------------------------------------------------------------------

    def is_oom(self, error: BaseException) -> bool:
        """Whether ``error`` itself, whatever caused it, is this framework's out-of-memory error."""
        return isinstance(error, MemoryError)

    def oom_error(self) -> Exception:
        """An error as this framework raises it when memory runs out, for rehearsals of that."""
        return MemoryError("Unable to allocate: a rehearsal")

    def late_errors(self, cls: type) -> Callable[[Any], object] | None:
        """What waits for an array of this class, where an allocation that failed shows only then; or None."""
        return None

    def part(self, x: Any, axis: int, start: int, stop: int) -> Any:
        """``x[start:stop]`` along ``axis`` (a view where the framework has views)."""
        return x[(slice(None),) * (axis % len(self.shape(x))) + (slice(start, stop),)]

    def concatenate(self, parts: list[Any], axis: int) -> Any:
        """The arrays, all on one device, joined along ``axis`` in a new one."""
        host = np.concatenate([self.to_host(part) for part in parts], axis)
        return self.from_host(host, self.device_of(parts[0]))

    def empty(self, shape: tuple[int, ...], dtype: str, device: Device) -> Any:
        """An array whose values nobody has set."""
        return self.from_host(hostmemory.packed(shape, hostmemory.np_dtype(dtype)), device)

    def is_started(self) -> bool:
        """Whether the framework has opened its accelerators; what follows asks only one that has."""
        return False

    def known_devices(self) -> tuple[Device, ...] | None:
        """Its devices, or None where asking would open them."""
        return self.devices()

    def free_cache(self, device: Device | None, compiled: bool = False) -> int:
        """Give cached memory on ``device`` (None: on all) back to the system; returns bytes given back.

        ``compiled``: compiled programs as well. Never opens an accelerator; 0 for one that it does not have.
        """
        return 0

    def usage(self) -> list[Usage]:
        """What the framework holds, one entry for each device that it has opened; opens none."""
        return []

    def card_memory(self, device: Device) -> tuple[int, int] | None:
        """Free and total bytes of a card that the framework has opened, or None."""
        return None

    def card_uuids(self) -> list[str]:
        """Identities of all its CUDA cards in its order, once it has opened one; nothing before."""
        return []

    def reset_peak(self, device: Device) -> bool:
        """Start the count of `Usage.peak` anew; False where that cannot be."""
        return False

    def selected(self, device: Device) -> AbstractContextManager[Any]:
        """A context in which ``device`` is this framework's current one, for this thread."""
        return nullcontext()

    def pinned_bytes(self, nbytes: int) -> np.ndarray | None:
        """Page-locked host memory, uint8 ``(nbytes,)``; None where there is no card to lock it for."""
        return None

    def is_pinned(self, memory: np.ndarray) -> bool:
        """Whether host memory (uint8, 1-D) is page-locked for its cards, whoever locked it."""
        return False

    def is_bare(self, x: Any) -> bool:
        """Whether ``x`` is nothing but its values: of no subclass, in no graph, and not lazy."""
        return False

    def own_bytes(self, x: Any) -> np.ndarray | None:
        """The bytes of an array of its own on the host, uint8 1-D, leaving no mark on ``x``.

        None where they are not packed, or cannot be had like that.
        """
        return None

    def enqueue_copy(self, host: np.ndarray, x: Any, offset: int, to_host: bool) -> Callable[[], None]:
        """Queue a copy between pinned bytes and the bytes of the packed array ``x`` from ``offset`` on.

        Returns a function that waits until the copy is done.
        """
        raise NotImplementedError(f"{self.name} has no queue for copies")

    def allocator(self) -> tuple[Callable[[int, int, int], int], Callable[[int], None]]:
        """Its pool: ``allocate(bytes, card, stream)``, which returns an address, and ``free(address)``."""
        raise NotImplementedError(f"{self.name} shares no pool")

    def use_allocator(self, allocate: Callable[[int, int, int], int], free: Callable[[int], None]) -> None:
        """Take memory from another framework's pool from now on.

        Raises:
            RuntimeError: it holds memory of its own already.
        """
        raise NotImplementedError(f"{self.name} takes memory from no other pool")

    # -- running functions ------------------------------------------------------------------------

    #: Makes the decorator of the framework of that name. functions/decorators.py, which stands layers above
    #: and so cannot be imported here, puts it in place when it is imported, which `import arraybridge` does.
    decorator_of: ClassVar[Callable[[str], Any]]

    #: Whether `stream` has anything to offer.
    has_streams: bool = False

    @property
    def decorator(self) -> Any:
        """The decorator for functions that are written in this framework, as ``arraybridge.torch`` is."""
        return Framework.decorator_of(self.name)

    def stream(self, device: Device) -> AbstractContextManager[Any] | None:
        """A context in which this thread queues its work on a stream of its own on ``device``.

        The stream waits for what the current one holds on entry, and the current one waits for it on exit.
        None where the device has no streams.
        """
        return None

    def untraced(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """``fn`` as this framework's compiler, where it has one, leaves it alone."""
        return fn

    def wide(self) -> AbstractContextManager[Any]:
        """A context in which arithmetic keeps 64-bit dtypes."""
        return nullcontext()

    def stack(self, planes: list[Any]) -> Any:
        """Arrays of one shape and dtype, all on one device, along a new first axis."""
        host, device = np.stack([self.to_host(plane) for plane in planes]), self.device_of(planes[0])
        return self.copy_from_host(host, device) if device.kind == "cpu" else self.from_host(host, device)

    def unstack(self, x: Any) -> list[Any]:
        """The arrays along the first axis (views where the framework has views)."""
        return [x[i] for i in range(self.shape(x)[0])]

    # -- fast paths, built once per pair of types -------------------------------------------------

    #: Exceptions that a fast path may meet for an array that needs the careful path.
    fast_errors: tuple[type[Exception], ...] = ()

    def exact_types(self) -> tuple[type, ...]:
        """Types for which the fast functions below hold; a subclass takes the careful path."""
        return ()

    def fast_view(self) -> Callable[[Any], np.ndarray] | None:
        """A function from a host array to its NumPy view, or None. It raises for what it cannot do."""
        return None

    def fast_from_view(self) -> Callable[[np.ndarray], Any] | None:
        """A function from the NumPy view of a NumPy array to an array, faster than DLPack, or None."""
        return None

    def fast_export(self, alignment: int) -> Callable[[Any], Any] | None:
        """A function from a host array, aligned to ``alignment`` bytes, to a DLPack capsule, or None."""
        return None

    def fast_import(self, immutable: bool) -> Callable[[Any], Any] | None:
        """A function from a DLPack capsule of host memory to an array, or None.

        ``immutable``: the producer's arrays are immutable, so that a 0-d array has to be copied
        by a mutable consumer (frameworks cache scalars).
        """
        return None

    # -- installing -------------------------------------------------------------------------------

    @classmethod
    def is_installed(cls) -> bool:
        return any(
            m in sys.modules or importlib.util.find_spec(m) is not None for m in cls.modules or (cls.name,)
        )


def c_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Strides in bytes of a C-contiguous array."""
    strides = []
    step = itemsize
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))


def is_c_contiguous(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    """Whether the elements lie one beside the other, in the order of the axes."""
    expected = c_strides(shape, itemsize)
    return all(a == b or n == 1 for a, b, n in zip(strides, expected, shape, strict=True))


def is_compact(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    """Whether the elements lie one beside the other, in whatever order of the axes."""
    expected = itemsize
    for stride, extent in sorted((s, n) for s, n in zip(strides, shape, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= extent
    return True


def refuse(framework: Framework, what: str, instead: str) -> ArrayNotSupportedError:
    """The error for an array of ``framework`` that has no dense, concrete values."""
    return ArrayNotSupportedError(
        f"{what} of {framework.name} cannot be converted: {instead}", source_type=framework.name, reason=what
    )


def refuse_dtype(framework: Framework, dtype: object, instead: str) -> DtypeNotSupportedError:
    """The error for elements of ``framework`` that no other framework can hold."""
    return DtypeNotSupportedError(
        f"{framework.name} arrays of dtype {dtype} cannot be converted: {instead}",
        source_type=framework.name,
        reason=f"no other framework holds {dtype}",
    )
