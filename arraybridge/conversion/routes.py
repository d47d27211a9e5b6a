"""The few ways in which an array travels, and the one place that chooses among them.

``same``    the very object comes back
``view``    the target looks at the source's host memory, through NumPy
``dlpack``  the target shares the source's memory, on the host or on a card, through DLPack
``device``  the bytes are copied straight into the memory of a device
``host``    the bytes are copied into host memory, or by way of it
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

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
from arraybridge.frameworks import registry
from arraybridge.frameworks.base import CPU, Framework
from arraybridge.frameworks.foreign import foreign_framework
from arraybridge.options import missing_gpu
from arraybridge.types import Device, DeviceLike, GpuId, check_gpu_id

__all__ = ["Method", "Request", "Route", "decide", "device", "dlpack", "host", "same", "view"]

Method = Literal["same", "view", "dlpack", "device", "host"]
FastFunction = Callable[[Any], Any]
#: Builds the fast converter of a pair for arrays that need no care, or None where each needs it.
RouteFunction = Callable[[Framework, Framework], "FastFunction | None"]


# -- route functions: the cells of the table ---------------------------------------------------------


def same(source: Framework, target: Framework) -> FastFunction | None:
    """The very object comes back."""
    return _identity


def view(source: Framework, target: Framework) -> FastFunction | None:
    """The target looks at the source's host memory through NumPy."""
    look = source.fast_view()
    if look is None or target.name == "numpy":
        return look
    take = target.fast_from_view()
    if take is None:
        return None

    def convert(x: Any) -> Any:
        return take(look(x))

    return convert


def dlpack(source: Framework, target: Framework) -> FastFunction | None:
    """The target shares the source's memory through a DLPack capsule."""
    export = source.fast_export(target.alignment)
    adopt = target.fast_import(immutable=not source.mutable)
    if export is None or adopt is None:
        return None

    def convert(x: Any) -> Any:
        return adopt(export(x))

    return convert


def device(source: Framework, target: Framework) -> FastFunction | None:
    """The bytes are copied straight into the memory of a device; every array is looked at."""
    return None


def host(source: Framework, target: Framework) -> FastFunction | None:
    """The bytes are copied into host memory, or by way of it; every array is looked at."""
    return None


def _identity(x: Any) -> Any:
    return x


# -- what was asked, and what will happen ------------------------------------------------------------


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


@dataclass(frozen=True, slots=True)
class Route:
    """What a conversion does, or will do; prints as one plain sentence.

    Attributes:
        source, target: names of the frameworks.
        method: ``"same"``, ``"view"``, ``"dlpack"``, ``"device"`` or ``"host"``.
        device: where the result lives.
        shares_memory: whether source and result see the same bytes.
        copies: how many times the bytes are copied.
        nbytes: bytes that the elements occupy.
        reason: why it is done so, in words.
        seconds: how long it took; None where nothing was measured. Not part of a comparison.
    """

    source: str
    target: str
    method: Method
    device: Device
    shares_memory: bool
    copies: int
    nbytes: int
    reason: str
    seconds: float | None = field(default=None, compare=False)

    def __str__(self) -> str:
        how = {
            "same": "the same object",
            "view": "shared through a view",
            "dlpack": "shared through DLPack",
            "device": "copied to the device",
            "host": "copied through host memory",
        }[self.method]
        if self.copies > 1:
            how += f", {self.copies} copies"
        took = "" if self.seconds is None else f", in {format_seconds(self.seconds)}"
        return (
            f"{self.source} → {self.target} on {self.device}: {how} ({format_bytes(self.nbytes)}{took}),"
            f" because {self.reason}."
        )


def format_bytes(count: int) -> str:
    """``"4.0 MiB"``, in binary units."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def format_seconds(seconds: float) -> str:
    """``"12.3 µs"``, ``"4.56 ms"`` or ``"1.23 s"``."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.1f} µs"
    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"


Run = Callable[[], Any]


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
            f"grad={request.grad!r} must be 'error' or 'detach'{nearest(str(request.grad), ('error', 'detach'))}"
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
    if native and here == there and cast is None and not request.copy:
        return _route(source, target, "same", there, 0, source.nbytes(data), "it is there already"), lambda: data

    source.check(data)
    if not native and source.requires_grad(data):
        if request.grad == "error":
            raise GradientError(
                f"the {source.name} tensor requires grad, and its graph would end on the way to {target.name};"
                " pass grad='detach' to convert its values alone",
                reason="it requires grad",
            )
        data = source.detach(data)
    journey = _Journey(request, source, target, data, here, there, cast, native)
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


def _route(
    source: Framework, target: Framework, method: Method, where: Device, copies: int, nbytes: int, reason: str
) -> Route:
    return Route(source.name, target.name, method, where, copies == 0, copies, nbytes, reason)


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
    return max(accelerators, key=target.free_memory_of)


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
    native: bool

    def plan(self, intent: RouteFunction | None) -> tuple[Route, Run]:
        source, target = self.source, self.target
        dtype, shape = source.dtype_name(self.data), source.shape(self.data)
        target.supports(self.cast or dtype, shape)
        cast_first = self.cast is not None and target.dtypes is not None and dtype not in target.dtypes
        if cast_first:
            return self._cast_on_host()
        if self.here.kind == "cpu" and self.there.kind == "cpu":
            return self._host_to_host(intent)
        if self.here.kind == "cpu":
            return self._host_to_device()
        if self.there.kind != "cpu" and (self.native or shares_cards(source, target)):
            return self._card_to_card()
        return self._through_host()

    def finish(self, method: Method, copies: int, reason: str, run: Run) -> tuple[Route, Run]:
        """The route and its function, with the cast that was asked for, and ``copy=False`` minded."""
        if self.cast is not None:
            dtype, convert, target = self.cast, run, self.target
            method = "host" if self.there.kind == "cpu" else "device"
            copies, reason = copies + 1, f"a cast to {dtype} was asked for"
            run = lambda: target.cast(convert(), dtype)  # noqa: E731
        if copies and self.request.copy is False:
            raise CopyRequiredError(
                f"copy=False was asked for, but {self.source.name} → {self.target.name} on {self.there} must"
                f" copy this array, because {reason}; pass copy=None to allow it",
                method=method,
                reason=reason,
            )
        nbytes = self.source.nbytes(self.data)
        route = _route(self.source, self.target, method, self.there, copies, nbytes, reason)
        return route, lambda: self._carry_out(run, method)

    def _carry_out(self, run: Run, method: str) -> Any:
        """Run; an error that a framework raises gets a name of ours and keeps its own as the cause."""
        try:
            return run()
        except MemoryConversionError:
            raise
        except _framework_errors(self.source, self.target) as error:
            if self.source.is_oom(error) or self.target.is_oom(error):
                raise
            reason = f"{type(error).__name__}: {error}"
            raise MemoryConversionError(
                f"{self.source.name} → {self.target.name} failed by the route {method!r} ({reason});"
                " convert to numpy first to see which side refuses",
                source_type=self.source.name,
                target_type=self.target.name,
                method=method,
                reason=reason,
            ) from error

    def _cast_on_host(self) -> tuple[Route, Run]:
        """The target lacks the source's dtype: cast on the way, where the values still are whole."""
        assert self.cast is not None
        dtype, self.cast = self.cast, None
        source, target, data, there = self.source, self.target, self.data, self.there

        def run() -> Any:
            numpy = registry.framework("numpy")
            values = source.resolve(data)
            memory = source.host_view(values) if self.here.kind == "cpu" else source.to_host(values)
            return target.from_host(_packed(target, numpy.cast(memory, dtype)), there)

        method: Method = "host" if there.kind == "cpu" else "device"
        copies = 1 + (self.here.kind != "cpu") + (there.kind != "cpu")
        return self.finish(method, copies, f"a cast to {dtype} was asked for", run)

    def _host_to_host(self, intent: RouteFunction | None) -> tuple[Route, Run]:
        source, target, data, there = self.source, self.target, self.data, self.there
        if source.is_lazy(data) or source.is_scattered(data):
            # Resolving makes memory of its own, which is then shared.
            what = "several devices hold it" if source.is_scattered(data) else "its conj or neg bit is set"
            gather = source.to_host if source.is_scattered(data) else (lambda x: source.host_view(source.resolve(x)))
            return self.finish("host", 1, what, lambda: target.from_host(_packed(target, gather(data)), there))
        memory = source.host_view(data)
        objection = "copy=True was asked for" if self.request.copy and self.cast is None else self._objection(memory)
        if not objection:
            method: Method = "dlpack" if intent is dlpack else "view"
            reason = "both see the same host memory"
            return self.finish(method, 0, reason, lambda: target.from_host(memory, there))
        if self.cast is not None and memory.dtype.isnative and not target.cannot_view(memory):
            return self.finish("host", 0, objection, lambda: target.from_host(memory, there))
        if self.native:
            return self.finish("host", 1, objection, lambda: _placed(target, target.copy(data), self.here, there))
        return self.finish("host", 1, objection, lambda: target.copy_from_host(memory, there))

    def _objection(self, memory: np.ndarray) -> str:
        """Why the target cannot, or should not, share this host memory; or ``""``."""
        objection = self.target.cannot_view(memory)
        if objection or self.request.copy is False or not self.target.mutable or self.target.honours_readonly:
            return objection
        if not self.source.mutable and memory.ndim == 0:
            # tf.constant(2.0) is cached: a write through torch would change every later constant.
            return f"{self.source.name} may cache scalars, and {self.target.name} could write to it"
        if self.source.mutable and not memory.flags.writeable:
            return f"it is read-only, and {self.target.name} could write to it"
        return ""

    def _host_to_device(self) -> tuple[Route, Run]:
        source, target, data, there = self.source, self.target, self.data, self.there
        reason = f"{there} has memory of its own"
        if self.native and not source.is_scattered(data):
            return self.finish("device", 1, reason, lambda: target.to_device(data, there))
        if source.is_lazy(data):
            return self.finish("device", 2, reason, lambda: target.from_host(source.host_view(source.resolve(data)), there))
        if source.is_scattered(data):
            return self.finish("device", 2, reason, lambda: target.from_host(source.to_host(data), there))
        memory = source.host_view(data)
        return self.finish("device", 1, reason, lambda: target.from_host(memory, there))

    def _card_to_card(self) -> tuple[Route, Run]:
        source, target, data, here, there = self.source, self.target, self.data, self.here, self.there
        if self.native:
            if here == there:
                reason = "copy=True was asked for"
                if self.cast is not None and not self.request.copy:
                    return self.finish("device", 0, reason, lambda: data)
                return self.finish("device", 1, reason, lambda: target.copy(data))
            return self.finish("device", 1, f"{there} is another device", lambda: target.to_device(data, there))
        dtype = np.dtype(f"V{max(1, source.nbytes(data) // max(1, _count(source.shape(data))))}")
        objection = target.cannot_stride(source.shape(data), source.strides(data), dtype.itemsize)
        if source.is_lazy(data):
            objection = "its conj or neg bit is set"
        if not objection and target.mutable and not source.mutable and not source.shape(data):
            objection = f"{source.name} may cache scalars, and {target.name} could write to it"
        if here != there:
            reason = f"{there} is another device"
            if objection:
                copied = lambda: target.to_device(target.adopt(source.copy(source.resolve(data)), source, here), there)  # noqa: E731
                return self.finish("device", 2, f"{reason}, and {objection}", copied)
            return self.finish(
                "device", 1, reason, lambda: target.to_device(target.adopt(data, source, here), there)
            )
        if self.request.copy:
            objection = objection or "copy=True was asked for"
        if objection:
            return self.finish(
                "device", 1, objection, lambda: target.adopt(source.copy(source.resolve(data)), source, here)
            )
        return self.finish("dlpack", 0, f"both see the memory of {there}", lambda: target.adopt(data, source, here))

    def _through_host(self) -> tuple[Route, Run]:
        source, target, data, here, there = self.source, self.target, self.data, self.here, self.there
        if self.native:
            copies = 1 if there.kind == "cpu" else 2
            return self.finish("host", copies, f"{there} is another device", lambda: target.to_device(data, there))
        if there.kind == "cpu":
            reason = f"{target.name} sees no memory of {here}"
            run = lambda: target.from_host(_packed(target, source.to_host(source.resolve(data))), there)  # noqa: E731
            return self.finish("host", 1, reason, run)
        reason = f"{source.name} on {here} and {target.name} on {there} share no memory"
        return self.finish(
            "host", 2, reason, lambda: target.from_host(source.to_host(source.resolve(data)), there)
        )


def _packed(target: Framework, memory: np.ndarray) -> np.ndarray:
    """Fresh host memory in a form that the target can view; it is copied once more only where it must be."""
    from arraybridge.frameworks import hostmemory

    return hostmemory.fresh(memory) if target.cannot_view(memory) else memory


def _placed(target: Framework, array: Any, here: Device, there: Device) -> Any:
    return array if here == there else target.to_device(array, there)


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for extent in shape:
        count *= extent
    return count


def _framework_errors(*frameworks: Framework) -> tuple[type[Exception], ...]:
    """What frameworks raise when they refuse an array."""
    named = (e for framework in frameworks for e in framework.fast_errors)
    return (TypeError, ValueError, RuntimeError, BufferError, NotImplementedError, *named)
