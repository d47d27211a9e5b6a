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
from typing import Any, ClassVar

import numpy as np

from arraybridge.errors import ArrayNotSupportedError, DeviceNotFoundError, DtypeNotSupportedError
from arraybridge.frameworks import hostmemory
from arraybridge.types import Device

__all__ = ["CPU", "Fallback", "Framework"]

CPU = Device("cpu", 0)


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
    dlpack_device: int | None = None

    def __repr__(self) -> str:
        return f"<arraybridge framework {self.name!r}>"

    # -- which arrays, and what they hold ---------------------------------------------------------

    @abstractmethod
    def owns(self, x: Any) -> bool:
        """Whether ``x`` is an array of this framework, subclasses included."""

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

    def strides(self, x: Any) -> tuple[int, ...]:
        """Bytes to step along each axis, for an array on an accelerator."""
        return c_strides(self.shape(x), hostmemory.np_dtype(self.dtype_name(x)).itemsize)

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

    def is_oom(self, error: BaseException) -> bool:
        """Whether ``error`` is this framework's out-of-memory error."""
        return isinstance(error, MemoryError)

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
