"""The one place that chooses how a particular array travels: by its device, strides, dtype and flags."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from arraybridge.carriers.sources import advise_about, source_of
from arraybridge.conversion.decision import Decision, Request, copy_required, graph_required, refused
from arraybridge.conversion.placement import check_placement, shares_gpus, target_device
from arraybridge.conversion.sparse import SparseConversion
from arraybridge.conversion.table import cell, dlpack
from arraybridge.errors import (
    DtypeNotSupportedError,
    MemoryConversionError,
    SourceMismatchError,
    UnknownArrayError,
    nearest,
)
from arraybridge.frameworks import dtype_names, host_memory, read_only, registry
from arraybridge.frameworks.accelerators import identity
from arraybridge.frameworks.base import Framework, conversion_errors
from arraybridge.frameworks.protocol_producers import check_readable_without_copy
from arraybridge.reasons import DEPENDS_ON_LAYOUT, Cause, Reason, as_cause
from arraybridge.tracing import events
from arraybridge.tracing.route import Method, Route
from arraybridge.types import Device, FrameworkLike

__all__ = ["dtype_name", "find_source"]


# Reasons without details.
SAME_OBJECT = Cause(Reason.SAME_OBJECT)
SHARED_HOST_MEMORY = Cause(Reason.SHARED_HOST_MEMORY)
COPY_REQUESTED = Cause(Reason.COPY_REQUESTED)


def decide(data: Any, request: Request) -> Decision:
    """Choose how this array travels, without converting it.

    Raises:
        MemoryConversionError: or a subclass, where it cannot be done exactly.
        ValueError: for options that make no sense.
    """
    request = check_options(request)
    target = registry.framework(request.target)
    if request.copy is False and registry.find_owner(data) is None:
        check_readable_without_copy(data, target.name)
    try:
        source, array = find_source(data, request.declared, target.name)
    except UnknownArrayError:
        if request.dtype is not None:
            dtype_name(request.dtype)  # an invalid option comes first
        raise
    try:
        return _decide_for(source, array, target, request)
    except MemoryConversionError as error:
        if array is not data and error.expressions:
            advise_about(error, data)
        error.source_type = error.source_type or source.name
        error.target_type = error.target_type or target.name
        raise


def _decide_for(source: Framework, array: Any, target: Framework, request: Request) -> Decision:
    """Choose how an array of a known framework travels."""
    source_device = source.devices.device_of(array)
    device = target_device(source, target, source_device, request.gpu_id, request.device)
    cast = None if request.dtype is None else dtype_name(request.dtype)
    if cast is not None and cast == source.dtype_name(array):
        cast = None
    # `is` holds in most calls.
    stays = source is target and (source_device is device or source_device == device)
    if stays and (request.device is not None or request.gpu_id is not None):
        stays = not source.devices.is_scattered(array)
    if source.sparse.layout(array):
        conversion = SparseConversion(source, target, _request_for_parts(request, device), decide)
        return conversion.decision(array, device, stays=stays, cast=cast)
    choice = _Choice(request, source, target, array, source_device, device, cast)
    return choice.in_place() if stays else choice.elsewhere()


def _request_for_parts(request: Request, device: Device) -> Request:
    """Return the request for the parts of a sparse array, all on one device even for ``gpu_id="auto"``."""
    place = request.device if request.gpu_id is None else device
    dtype = None if request.dtype is None else dtype_name(request.dtype)
    return replace(request, device=place, gpu_id=None, dtype=dtype)


def check_options(request: Request) -> Request:
    """Return the request with plain options, whether or not there is an array.

    Raises:
        ValueError: If an option has no meaning, or there is no framework of the declared name.
        TypeError: If the declared source is not a name.
    """
    copy = request.copy
    if request.declared is not None:
        registry.framework_name(request.declared)
    if isinstance(request.grad, str) and request.grad == "flow":
        raise ValueError(
            "a conversion has no gradient: grad='flow' is an option of the decorators @torch, @jax and"
            " @tensorflow, where there is a function to differentiate; pass grad='detach' to drop the graph"
        )
    if not isinstance(request.grad, str) or request.grad not in ("error", "detach"):
        raise ValueError(
            f"grad={request.grad!r} must be 'error' or 'detach'"
            f"{nearest(str(request.grad), ('error', 'detach'))}"
        )
    if copy is not None and not isinstance(copy, (bool, np.bool_)):
        raise ValueError(f"copy={copy!r} must be None, True or False")
    if request.gpu_id is not None or request.device is not None:
        check_placement(request.gpu_id, request.device)
    return replace(request, copy=bool(copy)) if isinstance(copy, np.bool_) else request


def find_source(data: Any, declared: FrameworkLike | None = None, target: str = "") -> tuple[Framework, Any]:
    """The framework of the array, and the array to read (that of another library is opened first).

    Raises:
        UnknownArrayError: it is no array.
        SourceMismatchError: it is not of the declared source.
    """
    source, array = source_of(data)
    if declared is not None and source.name != declared:
        declared = registry.framework_name(declared)
        raise SourceMismatchError(
            f"the source was declared as {declared}, but the array is of {source.name}"
            f" ({type(data).__qualname__}).",
            source_type=source.name,
            target_type=target,
            reason=f"declared {declared}, found {source.name}",
            code=Reason.OTHER_SOURCE,
            advice="Leave the source out to have it detected.",
        )
    return source, array


_DTYPES = dtype_names.PLAIN | {"bfloat16", "float8_e4m3fn", "float8_e5m2"}
# How the names of dtypes begin whose elements are numbers, those of one framework alone among them.
_NUMBERS = ("bool", "int", "uint", "float", "complex", "bfloat", "qint", "quint", "bits")


def dtype_name(dtype: Any) -> str:
    """NumPy's name of a dtype that is given as a name or as any framework's dtype.

    Raises:
        DtypeNotSupportedError: no such dtype is known.
    """
    name = dtype_names.name_of_any(dtype)
    if name in _DTYPES or name.startswith(("float8", "int4", "uint4")):
        return name
    raise DtypeNotSupportedError(
        f"dtype={dtype!r} is no dtype that arrays are cast to{nearest(name, _DTYPES)};"
        f" known are {', '.join(sorted(_DTYPES))}.",
        reason=f"unknown dtype {name}",
    )


def is_dtype(word: Any) -> bool:
    """Whether this is a dtype, by name or of any framework."""
    return dtype_names.name_of_any(word) in _DTYPES


# -- how ---------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False, repr=False)
class _Choice:
    """One array on its way from one device to another: `in_place` or `elsewhere` chooses the route.

    The functions that end up in a `Decision` take the array, and refer to no particular one: plans keep them.
    """

    request: Request
    source: Framework
    target: Framework
    array: Any
    source_device: Device
    device: Device
    #: The dtype to cast to, or None.
    cast: str | None
    #: The array as it was passed, if ``array`` is a part of it: the tensor without its graph, or one replica.
    original: Any = None
    #: The function that makes ``array`` of ``original``.
    prepare: Callable[[Any], Any] = identity
    #: Whether ``array`` is one of several replicas, which have to stay equal.
    is_replica: bool = False
    nbytes: int = 0
    #: Why its values cannot be read where they are, or None.
    copy_reason: Cause | None = None

    def in_place(self) -> Decision:
        """The array is where it should be, in its own framework, whatever its layout or flags."""
        source = self.source
        array = self.array
        self.nbytes = source.nbytes(array)
        if self.cast is not None:
            if not source.dtype_name(array).startswith(_NUMBERS):
                source.check(array)
            source.supports(self.cast, source.shape(array))
            return self._decision(self._copying, 0, SAME_OBJECT, identity)  # the cast makes the copy
        if self.request.copy:
            source.interchange.check_copy(array)
            return self._decision(self._copying, 1, COPY_REQUESTED, source.copy)
        return self._decision("same", 0, SAME_OBJECT, identity)

    def elsewhere(self) -> Decision:
        """Another framework or device: refuse what cannot go there exactly; else choose the route."""
        source = self.source
        target = self.target
        try:
            if source is target:
                source.devices.check_move(self.array, self.device)
            source.check(self.array)
            self._choose_replica()
            shape = source.shape(self.array)
            self.nbytes = source.nbytes(self.array)
            self.copy_reason = as_cause(source.interchange.copy_reason(self.array))
            if source is not target and source.autodiff.requires_grad(self.array):
                self._leave_the_graph()
            dtype = source.dtype_name(self.array)
            target.supports(self.cast or dtype, shape)
            if self.cast is not None and target.dtypes is not None and dtype not in target.dtypes:
                return self._cast_on_host(self.cast)
            return self._between_devices(shape)
        except MemoryConversionError:
            raise
        except conversion_errors(source, target) as error:
            if source.memory.is_oom(error) or target.memory.is_oom(error):
                raise
            raise refused(source, target, "", error) from error

    def _between_devices(self, shape: tuple[int, ...]) -> Decision:
        """Choose the route by the two devices, and by whether the framework stays the same."""
        from_host = self.source_device.kind == "cpu"
        to_host = self.device.kind == "cpu"
        if from_host and to_host:
            return self._on_the_host()
        if self.source is self.target:
            if self.source_device == self.device:
                return self._replica_on_its_device()
            return self._to_other_device()
        if not from_host and not to_host and shares_gpus(self.source, self.target):
            return self._gpu_to_gpu(shape)
        return self._through_the_host()

    def _choose_replica(self) -> None:
        """Convert one replica of a replicated array, if possible the one on the device of the result."""
        source = self.source
        device = self.device
        replica = source.devices.replica(self.array, device)
        if replica is None:
            return
        self.is_replica = True
        self.original = self.array
        self.array = replica
        self.source_device = source.devices.device_of(replica)
        self.prepare = lambda x: source.devices.replica(x, device)

    def _replica_on_its_device(self) -> Decision:
        """One replica as an array of its own framework, on an accelerator that has it."""
        if self.request.copy:
            return self._decision(self._copying, 1, COPY_REQUESTED, self.source.copy)
        cause = Cause(Reason.REPLICA_ON_DEVICE, device=str(self.device))
        return self._decision("view", 0, cause, identity)

    def _leave_the_graph(self) -> None:
        source = self.source
        target = self.target
        if self.request.grad == "error":
            raise graph_required(source, target)
        self.original = self.array
        self.prepare = source.autodiff.detach
        self.array = source.autodiff.detach(self.array)

    @property
    def _copying(self) -> Method:
        """How a copy travels that arrives on this device."""
        return "host" if self.device.kind == "cpu" else "device"

    def _on_the_host(self) -> Decision:
        """Both ends are on the host: share, or copy once."""
        source = self.source
        target = self.target
        device = self.device
        if self.copy_reason:
            return self._through_the_host()
        view: Callable[[Any], np.ndarray] = source.host_view
        memory = view(self.array)
        objection = self._objection(memory)
        # A cast leaves the original alone, so that only what the target cannot view at all must be copied.
        if objection and (self.cast is None or target.cannot_view(memory)):
            if not target.alignment:  # it copies by itself
                return self._decision("host", 1, objection, lambda x: target.from_host(view(x), device))
            copy = host_memory.aligned_copy if target.alignment > 1 else host_memory.contiguous_copy
            return self._decision("host", 1, objection, lambda x: target.from_host(copy(view(x)), device))
        method: Method = "dlpack" if cell(source.name, target.name) is dlpack else "view"
        if (source.mutable or self.is_replica) and not target.mutable:
            view = _then(view, read_only.export_read_only)  # which remembers what is read-only
        return self._decision(method, 0, SHARED_HOST_MEMORY, lambda x: target.from_host(view(x), device))

    def _objection(self, memory: np.ndarray) -> Cause | None:
        """Return why the target cannot, or should not, share this host memory; or None."""
        if self.request.copy:
            return COPY_REQUESTED
        source = self.source
        target = self.target
        objection = as_cause(target.cannot_view(memory)) or self._replica_objection()
        if objection or self.request.copy is False or not target.mutable or target.respects_read_only:
            return objection
        if not source.mutable and memory.ndim == 0:
            return self._scalar_objection()
        guarded = not memory.flags.writeable
        if not source.mutable:  # to NumPy, all that it shows is read-only
            guarded = read_only.is_shared_read_only(host_memory.address(memory))
        if guarded:
            # The target cannot mark its view as read-only, and a write to a read-only page ends the process.
            code = Reason.READ_ONLY_FILE_MAP if read_only.is_file_map(memory) else Reason.READ_ONLY
            return Cause(code, framework=target.name)
        return None

    def _replica_objection(self) -> Cause | None:
        """Return why the target must not share one of several replicas, or None."""
        if not self.is_replica or not self.target.mutable or self.target.respects_read_only:
            return None
        return Cause(Reason.REPLICATED, framework=self.target.name)

    def _scalar_objection(self) -> Cause:
        # tf.constant(2.0) is cached: a write through torch would change every later constant.
        return Cause(Reason.CACHED_SCALAR, source=self.source.name, framework=self.target.name)

    def _through_the_host(self) -> Decision:
        """The values are copied into host memory, or lie there, and from there to where they should be."""
        fetch, copies, cause = self._host_memory()
        put, more = self._put()
        to_gpu = self.source_device.kind == "cpu" and self.device.kind != "cpu"
        method: Method = "device" if to_gpu else "host"
        cause = cause or Cause(Reason.SEPARATE_MEMORY, device=str(self.device))
        return self._decision(method, copies + more, cause, _then(fetch, put))

    def _host_memory(self) -> tuple[Callable[[Any], np.ndarray], int, Cause | None]:
        """How the values get into host memory: a function, the copies that it makes, and why."""
        source = self.source
        if self.source_device.kind != "cpu":
            cause = Cause(
                Reason.NO_SHARED_MEMORY,
                source=source.name,
                source_device=str(self.source_device),
                framework=self.target.name,
                device=str(self.device),
            )
            return source.to_host, 1, cause
        if self.copy_reason:
            return source.to_host, 1, self.copy_reason
        return source.host_view, 0, None

    def _put(self) -> tuple[Callable[[np.ndarray], Any], int]:
        """How memory of the host, which nobody else has, becomes the array: a function, and its copies."""
        target = self.target
        device = self.device
        if device.kind != "cpu":
            return lambda memory: target.from_host(memory, device), 1
        return lambda memory: target.from_host(_viewable(target, memory), device), int(not target.alignment)

    def _to_other_device(self) -> Decision:
        """To another device of the same framework, at least one of the two being an accelerator."""
        target = self.target
        device = self.device
        between_gpus = self.source_device.kind != "cpu" and device.kind != "cpu"
        cause = Cause(Reason.OTHER_DEVICE, device=str(device))
        # OpenCL: out of one device, and into the other.
        if between_gpus and target.interchange.dlpack_device is None:
            return self._decision("host", 2, cause, lambda x: target.devices.to_device(x, device))
        return self._decision(self._copying, 1, cause, lambda x: target.devices.to_device(x, device))

    def _gpu_to_gpu(self, shape: tuple[int, ...]) -> Decision:
        """Both frameworks reach the card where the array lives."""
        source = self.source
        target = self.target
        source_device = self.source_device
        device = self.device
        objection = self._gpu_copy_reason(shape)

        def import_from(x: Any) -> Any:
            packed = source.copy(x) if objection else x
            return target.interchange.import_from(packed, source, source_device)

        if source_device != device:
            cause = Cause(Reason.OTHER_DEVICE, device=str(device))
            copies = 2 if objection else 1
            move = target.devices.to_device
            return self._decision("device", copies, cause, lambda x: move(import_from(x), device))
        if objection:
            return self._decision("device", 1, objection, import_from)
        cause = Cause(Reason.SHARED_DEVICE_MEMORY, device=str(device))
        return self._decision("dlpack", 0, cause, import_from)

    def _gpu_copy_reason(self, shape: tuple[int, ...]) -> Cause | None:
        """Return why the target cannot, or should not, share this memory of a GPU; or None."""
        source = self.source
        target = self.target
        if self.request.copy and self.source_device == self.device and self.cast is None:
            return COPY_REQUESTED
        if self.copy_reason:
            return self.copy_reason
        if objection := self._replica_objection():
            return objection
        if not shape and target.mutable and not source.mutable and self.request.copy is None:
            return self._scalar_objection()
        return self._layout_objection(shape)

    def _layout_objection(self, shape: tuple[int, ...]) -> Cause | None:
        """Return why the target cannot share memory of a GPU with such alignment or strides; or None."""
        target = self.target
        interchange = self.source.interchange
        if target.alignment and interchange.address(self.array) % target.alignment:
            # XLA's and TensorFlow's kernels load several elements at once, and trust in the alignment.
            return Cause(Reason.MISALIGNED, framework=target.name, alignment=target.alignment)
        itemsize = self.nbytes // max(1, math.prod(shape)) or 1
        return as_cause(target.interchange.cannot_stride(shape, interchange.strides(self.array), itemsize))

    def _cast_on_host(self, dtype: str) -> Decision:
        """The target lacks the source's dtype: cast in host memory, where the values still are whole."""
        self.cast = None
        fetch, copies, _ = self._host_memory()
        put, _ = self._put()
        numpy = registry.framework("numpy")
        numpy.interchange.check_cast(self.source.dtype_name(self.array), dtype)
        cast = numpy.cast
        copies += 1 + (self.device.kind != "cpu")
        cause = Cause(Reason.CAST_REQUESTED, dtype=dtype)
        return self._decision(self._copying, copies, cause, lambda x: put(cast(fetch(x), dtype)))

    def _decision(self, method: Method, copies: int, cause: Cause, convert: Callable[[Any], Any]) -> Decision:
        """The route and its function, with the cast that was asked for; ``copy=False`` is minded here."""
        source = self.source
        target = self.target
        run = convert
        if self.cast is not None:
            dtype = self.cast
            target.interchange.check_cast(source.dtype_name(self.array), dtype)
            method = self._copying
            copies += 1
            cause = Cause(Reason.CAST_REQUESTED, dtype=dtype)
            run = _then(run, lambda x: target.cast(x, dtype))
        if copies and self.request.copy is False:
            raise copy_required(source, target, self.device, method, cause)
        steps = None
        if copies and cause.code in DEPENDS_ON_LAYOUT:
            steps = events.steps(source, self.array)
        route = Route(
            source.name,
            target.name,
            method,
            self.device,
            shares_memory=copies == 0,
            copies=copies,
            nbytes=self.nbytes,
            cause=cause,
            steps=steps,
        )
        if self.original is None:
            return Decision(route, source, target, self.array, run)
        return Decision(route, source, target, self.original, _then(self.prepare, run))


def _then(first: Callable[[Any], Any], second: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """One after the other."""
    return lambda x: second(first(x))


def _viewable(target: Framework, memory: np.ndarray) -> np.ndarray:
    """Memory that nobody else refers to, in a form that the target can view."""
    return (
        memory if not target.alignment or not target.cannot_view(memory) else host_memory.aligned_copy(memory)
    )
