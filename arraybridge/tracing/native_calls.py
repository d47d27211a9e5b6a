"""Conversions by the frameworks' own calls: how a call is examined, and its record."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np

from arraybridge.caches import new_cache, remember
from arraybridge.device import Device
from arraybridge.errors import MemoryConversionError
from arraybridge.host import file_maps
from arraybridge.interface import registry
from arraybridge.interface.framework import Framework
from arraybridge.interface.interchange import is_c_contiguous
from arraybridge.interface.runtime import Runtime
from arraybridge.reasons import Cause, Reason, as_cause
from arraybridge.tracing import events
from arraybridge.tracing.events import Event, Steps
from arraybridge.tracing.records import Record
from arraybridge.tracing.user_lines import Site

__all__ = ["CAPSULE", "Conversion", "NativeCallRecord", "Observer", "observer_of", "pause_of"]

#: The class of DLPack capsules.
CAPSULE: type = type(np.empty(0).__dlpack__())
_WIDE_DTYPES = ("float64", "int64", "uint64", "complex128")
_RESHARDED = Cause(Reason.RESHARDED)
_READ_ONLY = Cause(Reason.READ_ONLY)
_READ_ONLY_FILE_MAP = Cause(Reason.READ_ONLY_FILE_MAP)


class Conversion(NamedTuple):
    """A conversion by a framework's own call.

    Attributes:
        call: The name of the function, such as ``"jnp.asarray"``.
        source: The framework of the array; None for a DLPack capsule.
        target: The framework of the result.
        source_dtype: The dtype of the array, as an object of its framework.
        target_dtype: The dtype of the result, as an object of its framework.
        source_device: The device of the array.
        device: The device of the result.
        nbytes: The number of bytes of the result.
        shares: Whether the array and the result share memory.
        steps: The shape, strides and itemsize of a copied array, for `Event.layout`.
        array: The identifying number of a copied array, for `Event.array`.
        unavoidable: The reason why no function could have shared the memory; None if one could, or if
            `cause` returns another device or a cast as the reason.
        requested_dtype: The name of the dtype that the program passed to JAX; ``""`` if it passed none.
    """

    call: str
    source: Framework | None
    target: Framework
    source_dtype: Any
    target_dtype: Any
    source_device: Device
    device: Device
    nbytes: int
    shares: bool
    steps: Steps | None
    array: int | None
    unavoidable: Cause | None
    requested_dtype: str

    def cause(self) -> Cause:
        """Return the reason for copying or sharing."""
        if self.shares:
            return Cause(Reason.SHARED_MEMORY)
        if self.source_device != self.device:
            return Cause(Reason.OTHER_DEVICE, device=str(self.device), source_device=str(self.source_device))
        cast = self._cause_of_cast()
        if cast is not None:
            return cast
        steps = None if self.target.runtime.has_strides else self.steps
        if steps is not None and not is_c_contiguous(*steps):
            return Cause(Reason.NOT_C_CONTIGUOUS)
        return self.unavoidable or Cause(Reason.NATIVE_COPY, call=self.call)

    def _cause_of_cast(self) -> Cause | None:
        """Return the reason for a change of dtype; None if the dtypes are equal."""
        was = _name_of_dtype(self.source_dtype)
        now = _name_of_dtype(self.target_dtype)
        if was == now:
            return None
        is_narrowed = self.requested_dtype in ("", was) and was in _WIDE_DTYPES and now not in _WIDE_DTYPES
        if is_narrowed and self.target.runtime.narrows_64_bit:
            return Cause(Reason.NARROWED, source_dtype=was, dtype=now)
        return Cause(Reason.NATIVE_CAST, dtype=now)


def _name_of_dtype(dtype: Any) -> str:
    """Return the NumPy name of a framework's dtype."""
    # PyTorch dtypes do not have a ``name``.
    return str(getattr(dtype, "name", dtype)).removeprefix("torch.")


class NativeCallRecord(Record):
    """The record of a conversion by a framework's own call.

    Attributes:
        fields: The fields of the `Conversion`, which is created when the log is read.
    """

    __slots__ = ("fields",)

    def __init__(
        self,
        began: float,
        seconds: float,
        thread: str,
        thread_id: int,
        site: Site,
        fields: tuple[Any, ...],
    ) -> None:
        self.began = began
        self.seconds = seconds
        self.thread = thread
        self.thread_id = thread_id
        self.site = site
        self.fields = fields

    def event(self, opened: float, line: int) -> Event:
        """Return the event of the call; see `Record.event`."""
        conversion = Conversion(*self.fields)
        cause = conversion.cause()
        file, _, _, library = self.site
        return Event(
            kind="foreign",
            name=conversion.call,
            start=self.began - opened,
            seconds=self.seconds,
            thread=self.thread,
            device=str(conversion.device),
            file=file,
            line=line,
            nbytes=0 if conversion.shares else conversion.nbytes,
            reason=cause.text,
            library=library,
            thread_id=self.thread_id,
            layout="" if conversion.steps is None else events.stride_pattern(*conversion.steps),
            array=conversion.array,
            source="capsule" if conversion.source is None else conversion.source.name,
            target=conversion.target.name,
            code=cause.code,
        )


class Observer:
    """An examiner of calls that convert arrays of one framework to another.

    There is one per pair of frameworks, so that a call looks up as few attributes as possible.

    Args:
        source: The framework of the array; None for a DLPack capsule.
        target: The framework of the result.

    Attributes:
        own_callers: The packages whose calls are not conversions by the user. For example, PyTorch casts
            tensors to print them.
    """

    __slots__ = (
        "_examine",
        "_has_strides",
        "_pause",
        "_read",
        "_read_source",
        "_source",
        "_target",
        "own_callers",
    )

    def __init__(self, source: Framework | None, target: Framework) -> None:
        self._source = source
        self._target = target
        self._read = target.runtime.observe
        if source is None:
            frameworks = [target]
            self._examine = self._of_capsule
        else:
            frameworks = [source, target]
            self._examine = self._of_array
            self._read_source = source.runtime.observe
            self._has_strides = source.runtime.has_strides
        # Only PyTorch has one.
        self._pause = next((pause for pause in map(pause_of, frameworks) if pause is not None), None)
        self.own_callers: set[str] = set()
        for one in frameworks:
            # Calls by NumPy are conversions if another framework owns the array: NumPy reads it for the user.
            if one is source or not one.devices.has_only_host:
                self.own_callers.update(registry.metadata_of(one.name).packages)

    def examine(
        self, call: str, x: Any, y: Any, capsule_memory: int | None, wanted: Any
    ) -> tuple[Any, ...] | None:
        """Return the fields of the `Conversion` that a call made, or None if it was not a conversion.

        Args:
            call: The name of the function.
            x: The array or capsule.
            y: The result.
            capsule_memory: The memory address in a DLPack capsule; None if ``x`` is not a capsule.
            wanted: The dtype argument of a JAX function; None if there is none.
        """
        try:
            if self._pause is None:
                return self._examine(call, x, y, capsule_memory, wanted)
            with self._pause():
                return self._examine(call, x, y, capsule_memory, wanted)
        except (MemoryConversionError, RuntimeError, TypeError, ValueError, AttributeError):
            return None  # a traced or unsupported array: a trace must not break the call

    def _of_capsule(
        self, call: str, x: Any, y: Any, capsule_memory: int | None, wanted: Any
    ) -> tuple[Any, ...] | None:
        target = self._target
        dtype, nbytes, address, device = self._read(y)
        shares = capsule_memory == address
        return call, None, target, dtype, dtype, device, device, nbytes, shares, None, None, None, ""

    def _of_array(
        self, call: str, x: Any, y: Any, capsule_memory: int | None, wanted: Any
    ) -> tuple[Any, ...] | None:
        source: Any = self._source
        target = self._target
        dtype, nbytes, address, device = self._read(y)
        source_dtype, _, source_address, source_device = self._read_source(x)
        together = source_device is device or source_device == device
        # An array on several devices has no address.
        spread = self._redistributes(x, y) if source_address is None else address is None
        if source is target and together and source_dtype == dtype and not spread:
            return None
        shares = bool((source_address and source_address == address) or (together and not nbytes))
        steps = array = unavoidable = None
        requested_dtype = ""
        if not shares:
            if wanted is not None:
                requested_dtype = np.dtype(wanted).name
            steps = self._steps_of(x)
            array = events.same_array(x)
            unavoidable = self._unavoidable_cause(x, source_address, together, spread)
        return (
            call,
            source,
            target,
            source_dtype,
            dtype,
            source_device,
            device,
            nbytes,
            shares,
            steps,
            array,
            unavoidable,
            requested_dtype,
        )

    def _steps_of(self, x: Any) -> Steps | None:
        """Return the shape, strides and itemsize of an array; None if the framework has no strides."""
        source: Any = self._source
        return events.steps(source, x) if self._has_strides else None

    def _redistributes(self, x: Any, y: Any) -> bool:
        """Return whether a JAX function distributed an array over other devices."""
        return self._source is self._target and not x.sharding.is_equivalent_to(y.sharding, y.ndim)

    def _unavoidable_cause(self, x: Any, address: int | None, together: bool, spread: bool) -> Cause | None:
        """Return the reason why no function could have shared the memory of ``x``, or None if one could.

        It is not used, and may be None, if `Conversion.cause` returns another device or a cast.
        """
        if spread:
            return _RESHARDED
        source: Any = self._source
        target = self._target
        if source is target or not together:
            return None
        cause = source.interchange.copy_reason(x)
        if cause:
            return as_cause(cause)
        if (address or 0) % (target.alignment or 1):
            return file_maps.misalignment(x, target.name, target.alignment)
        could_write = target.mutable and not target.respects_read_only
        return _cause_of_read_only(x) if could_write and source.devices.has_only_host else None


def _cause_of_read_only(x: np.ndarray) -> Cause | None:
    """Return the reason for copying a read-only array; None if the array is writable."""
    if x.flags.writeable:
        return None
    return _READ_ONLY_FILE_MAP if file_maps.is_read_only_map(x) else _READ_ONLY


def pause_of(framework: Framework) -> Callable[[], AbstractContextManager[Any]] | None:
    """Return the method `pause_observation` of a framework; None if it is the default, which does nothing."""
    runtime = framework.runtime
    return None if type(runtime).pause_observation is Runtime.pause_observation else runtime.pause_observation


# The observer of each pair of the classes of an array and a result.
_observers: dict[tuple[type, type], Observer] = new_cache()


def observer_of(x: Any, y: Any) -> Observer | None:
    """Return the observer of calls with the argument ``x`` and the result ``y``.

    It is None if ``x`` is neither an array nor a capsule, or ``y`` is not an array.
    """
    classes = type(x), type(y)
    try:
        return _observers[classes]
    except (KeyError, TypeError):  # the classes are new, or unhashable
        pass
    source = registry.find_owner(x)
    target = registry.find_owner(y)
    if target is None or (source is None and type(x) is not CAPSULE):
        return None
    return remember(_observers, classes, Observer(source, target))
