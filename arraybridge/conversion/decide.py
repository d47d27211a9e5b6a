"""The one place that chooses how a particular array travels: by its device, strides, dtype and flags."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from arraybridge.conversion.routes import Method, Route, RouteFunction, dlpack
from arraybridge.errors import (
    CopyRequiredError,
    DeviceNotFoundError,
    DtypeNotSupportedError,
    GradientError,
    MemoryConversionError,
    MissingGpuWarning,
    SourceMismatchError,
    nearest,
)
from arraybridge.frameworks import hostmemory, registry
from arraybridge.frameworks.base import CPU, Framework, refusals, refuse
from arraybridge.frameworks.foreign import foreign_framework
from arraybridge.frameworks.parts import Pool
from arraybridge.options import missing_gpu
from arraybridge.types import Device, DeviceLike, GpuId, check_gpu_id

__all__ = ["Request", "decide", "find_source"]

T = TypeVar("T")
#: Carries out what was decided.
Run = Callable[[], Any]


@dataclass(slots=True)
class Request:
    """The arguments of one conversion, as the user gave them."""

    data: Any
    target: str
    declared: str | None = None
    gpu_id: GpuId = None
    device: DeviceLike | None = None
    copy: bool | None = None
    dtype: Any = None
    grad: str = "error"


def decide(request: Request, intent: RouteFunction | None = None) -> tuple[Route, Run]:
    """Choose how this array travels, without converting it.

    Returns:
        the route, and a function that carries it out.

    Raises:
        MemoryConversionError: or a subclass, where it cannot be done exactly.
        ValueError: for options that make no sense.
    """
    source, data = find_source(request)
    target = registry.framework(request.target)
    try:
        return _decide(request, source, target, data, intent)
    except MemoryConversionError as error:
        error.source_type = error.source_type or source.name
        error.target_type = error.target_type or target.name
        raise


def find_source(request: Request) -> tuple[Framework, Any]:
    """The framework of the array, and the array to read (foreign CUDA arrays are imported first).

    Raises:
        UnknownArrayError: it is no array.
        SourceMismatchError: it is not of the declared source.
    """
    data = request.data
    source = registry.find_owner(data)
    if source is None:
        if not registry.is_foreign_array(data):
            raise registry.unknown_array(data)
        source, data = foreign_framework(data)
    if request.declared is not None and source.name != request.declared:
        raise SourceMismatchError(
            f"the source was declared as {request.declared}, but the array is of {source.name}"
            f" ({type(request.data).__qualname__}); leave the source out to have it detected",
            source_type=source.name,
            target_type=request.target,
            reason=f"declared {request.declared}, found {source.name}",
        )
    return source, data


def _decide(
    request: Request, source: Framework, target: Framework, data: Any, intent: RouteFunction | None
) -> tuple[Route, Run]:
    if request.grad not in ("error", "detach"):
        raise ValueError(
            f"grad={request.grad!r} must be 'error' or 'detach'"
            f"{nearest(str(request.grad), ('error', 'detach'))}"
        )
    if request.copy not in (None, True, False):
        raise ValueError(f"copy={request.copy!r} must be None, True or False")
    here = source.device_of(data)
    there = _resolve_device(request, source, target, here)
    native = source is target and source.owns(data)
    cast = None
    if request.dtype is not None:
        cast = dtype_name(request.dtype)
        if cast == source.dtype_name(data):
            cast = None
    journey = _Journey(request, source, target, data, here, there, cast, native)
    if native and here == there:
        return journey.in_place()
    return _translated(source, target, "", lambda: _depart(journey, intent))


def _depart(journey: _Journey, intent: RouteFunction | None) -> tuple[Route, Run]:
    """Refuse what cannot leave its framework exactly, and choose the route of the rest."""
    source, target, data, request = journey.source, journey.target, journey.data, journey.request
    source.check(data)
    rank = len(source.shape(data))
    if rank > hostmemory.MAX_RANK:
        instead = (
            f"arrays travel through NumPy, which has at most {hostmemory.MAX_RANK} axes; reshape it first"
        )
        raise refuse(source, f"an array of rank {rank}", instead)
    if not journey.native and source.requires_grad(data):
        if request.grad == "error":
            raise GradientError(
                f"the {source.name} tensor requires grad, and its graph would end on the way to"
                f" {target.name}; pass grad='detach' to convert its values alone",
                reason="it requires grad",
            )
        journey.data = source.detach(data)
    return journey.plan(intent)


def dtype_name(dtype: Any) -> str:
    """NumPy's name of a dtype that is given as a name or as any framework's dtype.

    Raises:
        DtypeNotSupportedError: no such dtype is known.
    """
    if isinstance(dtype, str):
        name = dtype.removeprefix("torch.")
    elif isinstance(dtype, (type, np.dtype)):
        try:
            name = np.dtype(dtype).name
        except TypeError:
            name = str(dtype)
    else:
        name = str(getattr(dtype, "name", dtype)).removeprefix("torch.")
    known = {
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
        *("bfloat16", "float8_e4m3fn", "float8_e5m2"),
    }
    if name in known or name.startswith(("float8", "int4", "uint4")):
        return name
    raise DtypeNotSupportedError(
        f"dtype={dtype!r} is no dtype that arrays are cast to{nearest(name, known)};"
        f" known are {', '.join(sorted(known))}",
        reason=f"unknown dtype {name}",
    )


# -- where to ----------------------------------------------------------------------------------------


def _resolve_device(request: Request, source: Framework, target: Framework, here: Device) -> Device:
    """Where the result is to live.

    Raises:
        DeviceNotFoundError: the target has no such device.
        ValueError: ``gpu_id`` is no number of a GPU, or stands beside ``device``.
    """
    gpu_id = check_gpu_id(request.gpu_id)
    if request.device is not None:
        if gpu_id is not None:
            raise ValueError(f"pass gpu_id={gpu_id!r} or device={request.device!r}, not both")
        wanted = Device.parse(request.device)
    elif gpu_id is None or target.name == "numpy":
        return _stay(source, target, here)
    else:
        wanted = target.accelerator(0 if gpu_id == "auto" else gpu_id)
    try:
        return _most_free(target, wanted) if gpu_id == "auto" else target.find_device(wanted)
    except DeviceNotFoundError as error:
        if wanted.kind == "cpu" or not target.has_host or missing_gpu() != "host":
            raise
        warnings.warn(
            f"{target.name}: {wanted} is missing, so the array is placed on the host. {error.reason}",
            MissingGpuWarning,
            stacklevel=_USER_FRAME,
        )
        return CPU


# convert_memory → _carefully → decide → _decide → _resolve_device
_USER_FRAME = 6


def _most_free(target: Framework, wanted: Device) -> Device:
    accelerators = [d for d in target.devices() if d.kind != "cpu"]
    if not accelerators:
        return target.find_device(wanted)  # raises, with the reason
    return max(accelerators, key=(target.pool or Pool()).free_memory_of)


def _stay(source: Framework, target: Framework, here: Device) -> Device:
    """Data stays where it is when the target has that device, else it goes to the host."""
    if source is target:
        return here
    if here == CPU:
        return CPU if target.has_host else target.default_device()
    if here.kind == "cpu":
        return here if here in target.devices() else target.default_device()
    if shares_cards(source, target) and here in target.devices():
        return here
    return CPU if target.has_host else target.default_device()


def shares_cards(source: Framework, target: Framework) -> bool:
    """Whether both can see each other's memory on an accelerator."""
    return source.dlpack_device is not None and source.dlpack_device == target.dlpack_device


# -- how ---------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Journey:
    """One array on its way from ``here`` to ``there``; `plan` chooses the route."""

    request: Request
    source: Framework
    target: Framework
    data: Any
    here: Device
    there: Device
    cast: str | None
    #: Source and target are one framework, and the array is its own.
    native: bool

    def in_place(self) -> tuple[Route, Run]:
        """The array is where it should be, in its own framework, whatever its layout or flags."""
        source, target, data, there = self.source, self.target, self.data, self.there
        method: Method = "host" if there.kind == "cpu" else "device"
        if self.cast is not None:
            target.supports(self.cast, source.shape(data))
            return self._end(method, 0, "", lambda: data)  # the cast makes the copy
        if self.request.copy:
            return self._end(method, 1, "copy=True was asked for", lambda: target.copy(data))
        return self._end("same", 0, "it is there already", lambda: data)

    def plan(self, intent: RouteFunction | None) -> tuple[Route, Run]:
        """Another framework or device: the array is known to be dense and concrete."""
        source, target, data, there = self.source, self.target, self.data, self.there
        dtype = source.dtype_name(data)
        target.supports(self.cast or dtype, source.shape(data))
        if self.cast is not None and target.dtypes is not None and dtype not in target.dtypes:
            return self._cast_on_the_way(self.cast)
        if self.native and (self.here.kind != "cpu" or there.kind != "cpu"):
            return self._to_other_device()
        if self.here.kind != "cpu" and there.kind != "cpu" and shares_cards(source, target):
            return self._card_to_card()
        fetch, copies, reason = self._host_memory()
        if there.kind != "cpu":
            method: Method = "device" if self.here.kind == "cpu" else "host"
            reason = reason or f"{there} has memory of its own"
            return self._end(method, copies + 1, reason, lambda: _send(target, fetch(), there))
        if copies:
            return self._end(
                "host", copies, reason, lambda: target.from_host(_viewable(target, fetch()), there)
            )
        return self._on_the_host(fetch(), intent)

    def _host_memory(self) -> tuple[Callable[[], np.ndarray], int, str]:
        """How the values get into host memory: a function, the copies that it makes, and why."""
        source, data = self.source, self.data
        if self.here.kind != "cpu":
            reason = (
                f"{self.source.name} on {self.here} and {self.target.name} on {self.there} share no memory"
            )
            return lambda: _fetch(source, source.resolve(data)), 1, reason
        if source.is_scattered(data):
            return lambda: source.to_host(data), 1, "several devices hold a part of it each"
        if source.is_lazy(data):
            return lambda: source.host_view(source.resolve(data)), 1, "its conj or neg bit is set"
        memory = source.host_view(data)
        return lambda: memory, 0, ""

    def _on_the_host(self, memory: np.ndarray, intent: RouteFunction | None) -> tuple[Route, Run]:
        """Both ends are on the host: share, or copy once."""
        target, there = self.target, self.there
        objection = self._objection(memory)
        # A cast leaves the original alone, so that only what the target cannot view at all must be copied.
        if not objection or (self.cast is not None and not target.cannot_view(memory)):
            method: Method = "dlpack" if intent is dlpack else "view"
            reason = "both see the same host memory"
            return self._end(method, 0, reason, lambda: target.from_host(memory, there))
        return self._end("host", 1, objection, lambda: target.from_host(hostmemory.fresh(memory), there))

    def _objection(self, memory: np.ndarray) -> str:
        """Why the target cannot, or should not, share this host memory; or ``""``."""
        if self.request.copy:
            return "copy=True was asked for"
        objection = self.target.cannot_view(memory)
        if objection or self.request.copy is False or not self.target.mutable or self.target.honours_readonly:
            return objection
        if not self.source.mutable and memory.ndim == 0:
            return self._scalar_objection()
        if self.source.mutable and not memory.flags.writeable:
            return f"it is read-only, and {self.target.name} could write to it"
        return ""

    def _scalar_objection(self) -> str:
        # tf.constant(2.0) is cached: a write through torch would change every later constant.
        return f"{self.source.name} may cache scalars, and {self.target.name} could write to it"

    def _to_other_device(self) -> tuple[Route, Run]:
        """To another device of the same framework, at least one of the two being an accelerator."""
        target, data, here, there = self.target, self.data, self.here, self.there
        method: Method = "host" if there.kind == "cpu" else "device"
        copies = 1
        if here.kind != "cpu" and there.kind != "cpu" and target.dlpack_device is None:
            method, copies = "host", 2  # OpenCL: out of one device, and into the other
        return self._end(
            method, copies, f"{there} is another device", lambda: _move(target, data, here, there)
        )

    def _card_to_card(self) -> tuple[Route, Run]:
        """Both frameworks reach the card where the array lives."""
        source, target, data, here, there = self.source, self.target, self.data, self.here, self.there
        objection = self._card_objection()

        def adopt() -> Any:
            packed = source.copy(source.resolve(data)) if objection else data
            return target.adopt(packed, source, here)

        if here != there:
            copies = 2 if objection else 1
            reason = f"{there} is another device"
            return self._end("device", copies, reason, lambda: target.to_device(adopt(), there))
        if objection:
            return self._end("device", 1, objection, adopt)
        return self._end("dlpack", 0, f"both see the memory of {there}", adopt)

    def _card_objection(self) -> str:
        """Why the target cannot, or should not, share this memory of a card; or ``""``."""
        source, target, data = self.source, self.target, self.data
        shape = source.shape(data)
        itemsize = source.nbytes(data) // max(1, math.prod(shape)) or 1
        if self.request.copy and self.here == self.there and self.cast is None:
            return "copy=True was asked for"
        if source.is_lazy(data):
            return "its conj or neg bit is set"
        if not shape and target.mutable and not source.mutable and self.request.copy is None:
            return self._scalar_objection()
        if source.address(data) % target.alignment:
            # XLA's and TensorFlow's kernels load several elements at once, and trust in the alignment.
            return f"its memory is not aligned to {target.alignment} bytes"
        return target.cannot_stride(shape, source.strides(data), itemsize)

    def _cast_on_the_way(self, dtype: str) -> tuple[Route, Run]:
        """The target lacks the source's dtype: cast in host memory, where the values still are whole."""
        target, there = self.target, self.there
        self.cast = None
        fetch, copies, _ = self._host_memory()

        def run() -> Any:
            values = registry.framework("numpy").cast(fetch(), dtype)
            if there.kind != "cpu":
                return _send(target, values, there)
            return target.from_host(_viewable(target, values), there)

        method: Method = "host" if there.kind == "cpu" else "device"
        return self._end(method, copies + 1 + (there.kind != "cpu"), f"a cast to {dtype} was asked for", run)

    def _end(self, method: Method, copies: int, reason: str, run: Run) -> tuple[Route, Run]:
        """The route and its function, with the cast that was asked for; ``copy=False`` is minded here."""
        convert = run
        if self.cast is not None:
            dtype, target = self.cast, self.target
            method = "host" if self.there.kind == "cpu" else "device"
            copies, reason = copies + 1, f"a cast to {dtype} was asked for"

            def convert() -> Any:
                return target.cast(run(), dtype)

        if copies and self.request.copy is False:
            raise CopyRequiredError(
                f"copy=False was asked for, but {self.source.name} → {self.target.name} on {self.there} must"
                f" copy this array, because {reason}; pass copy=None to allow it",
                method=method,
                reason=reason,
            )
        nbytes = self.source.nbytes(self.data)
        route = Route(
            self.source.name, self.target.name, method, self.there, copies == 0, copies, nbytes, reason
        )
        return route, lambda: _translated(self.source, self.target, method, convert)


def _translated(source: Framework, target: Framework, method: str, call: Callable[[], T]) -> T:
    """What ``call`` returns; what a framework raises gets a name of ours and keeps its own as the cause."""
    try:
        return call()
    except MemoryConversionError:
        raise
    except refusals(source, target) as error:
        if source.is_oom(error) or target.is_oom(error):
            raise
        reason = f"{type(error).__name__}: {error}"
        how = f" by the route {method!r}" if method else ""
        raise MemoryConversionError(
            f"{source.name} → {target.name} failed{how} ({reason});"
            " convert to numpy first to see which side refuses",
            source_type=source.name,
            target_type=target.name,
            method=method,
            reason=reason,
        ) from error


# Only what goes to a card that memory can be pinned for, or comes from one, loads the staging.


def _send(target: Framework, memory: np.ndarray, there: Device) -> Any:
    """Host memory as an array on a card."""
    if target.pinning is None:
        return target.from_host(memory, there)
    from arraybridge.conversion import staging

    return staging.send(target, memory, there)


def _fetch(source: Framework, x: Any) -> np.ndarray:
    """The values of an array on a card, in host memory."""
    if source.pinning is None:
        return source.to_host(x)
    from arraybridge.conversion import staging

    return staging.fetch(source, x)


def _move(owner: Framework, x: Any, here: Device, there: Device) -> Any:
    """An array on another device of its framework, one of the two being an accelerator at least."""
    if owner.pinning is None or (here.kind != "cpu" and there != CPU):
        return owner.to_device(x, there)
    from arraybridge.conversion import staging

    return staging.send_own(owner, x, there) if here.kind == "cpu" else staging.fetch_own(owner, x)


def _viewable(target: Framework, memory: np.ndarray) -> np.ndarray:
    """Memory that nobody else refers to, in a form that the target can view."""
    return hostmemory.fresh(memory) if target.cannot_view(memory) else memory
