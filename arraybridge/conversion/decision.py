"""Choose the route of a conversion from the device, strides, dtype and flags of the array."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from arraybridge.advice import Cast
from arraybridge.carriers.sources import advise_about, source_of
from arraybridge.conversion.conversion_errors import (
    conversion_error,
    copy_required_error,
    graph_required_error,
    is_oom,
)
from arraybridge.conversion.device_resolution import shares_gpus, target_device
from arraybridge.conversion.request import Decision, Request, check_options, dtype_name
from arraybridge.conversion.table import cell, dlpack
from arraybridge.device import Device
from arraybridge.errors import (
    DtypeNotSupportedError,
    MemoryConversionError,
    SourceMismatchError,
    UnknownArrayError,
)
from arraybridge.frameworks import host_memory, read_only_memory, registry
from arraybridge.frameworks.base import Framework, conversion_errors
from arraybridge.frameworks.streams import identity
from arraybridge.frameworks.third_party_arrays import check_readable_without_copy
from arraybridge.reasons import DEPENDS_ON_LAYOUT, Cause, Reason, as_cause
from arraybridge.route import Method, Route
from arraybridge.tracing import events
from arraybridge.types import FrameworkLike

__all__ = ["find_source"]


# Reasons without details.
SAME_OBJECT = Cause(Reason.SAME_OBJECT)
SHARED_HOST_MEMORY = Cause(Reason.SHARED_HOST_MEMORY)
COPY_REQUESTED = Cause(Reason.COPY_REQUESTED)


def decide(data: Any, request: Request) -> Decision:
    """Return the decision on how to convert ``data``, without converting it.

    Raises:
        MemoryConversionError: If an exact conversion is impossible; one of its subclasses.
        TypeError: If a framework is not a string.
        ValueError: If an option is invalid.
    """
    request = check_options(request)
    if not isinstance(request.target, str) and issubclass(type(data), str):
        raise TypeError(
            f"Expected a framework name, got {type(request.target).__name__}. Did you swap the arguments?"
            f" Use convert_memory(data, {data!r})."
        )
    target = registry.framework(request.target)
    owner = registry.find_owner(data)
    if owner is not None and request.declared is None:  # true for most calls
        source = owner
        array = data
    else:
        if owner is None and request.copy is False:
            check_readable_without_copy(data, target.name)
        source, array = _find_requested_source(data, request, target)
    try:
        return _decide_for(source, array, target, request)
    except MemoryConversionError as error:
        if array is not data and error.expressions:
            advise_about(error, data)
        error.source_type = error.source_type or source.name
        error.target_type = error.target_type or target.name
        raise


def _find_requested_source(data: Any, request: Request, target: Framework) -> tuple[Framework, Any]:
    """Return the result of `find_source`, but report an invalid dtype before an unknown array."""
    try:
        return find_source(data, request.declared, target.name)
    except UnknownArrayError:
        if request.dtype is not None:
            dtype_name(request.dtype)
        raise


def _decide_for(source: Framework, array: Any, target: Framework, request: Request) -> Decision:
    """Return the decision for an array of a known framework.

    Exceptions of the frameworks, except out-of-memory errors, are raised again as errors of this package.
    """
    source_device = source.devices.device_of(array)
    device = target_device(source, target, source_device, request.gpu_id, request.device)
    cast = None if request.dtype is None else _required_cast(request.dtype, source, array)
    # `is` is true for most calls, and is faster than `==`.
    stays = source is target and (source_device is device or source_device == device)
    if stays and (request.device is not None or request.gpu_id is not None):
        stays = not source.devices.is_scattered(array)
    if source.sparse.layout(array):
        from arraybridge.conversion.sparse import SparseConversion  # takes 1 ms; few programs need it

        conversion = SparseConversion(source, target, _request_for_parts(request, device), decide)
        return conversion.decision(array, device, stays=stays, cast=cast)
    choice = _Choice(request, source, target, array, source_device, device, cast)
    try:
        return choice.in_place() if stays else choice.elsewhere()
    except MemoryConversionError:
        raise
    except conversion_errors(source, target) as error:
        if is_oom(error, source, target):
            raise
        raise conversion_error(source, target, "", error) from error


def _required_cast(dtype: Any, source: Framework, array: Any) -> str | None:
    """Return the name of the requested dtype; None if the array already has it."""
    name = dtype_name(dtype)
    return None if name == source.dtype_name(array) else name


def _request_for_parts(request: Request, device: Device) -> Request:
    """Return the request for the parts of a sparse array, all on one device even for ``gpu_id="auto"``."""
    place = request.device if request.gpu_id is None else device
    dtype = None if request.dtype is None else dtype_name(request.dtype)
    return replace(request, device=place, gpu_id=None, dtype=dtype)


def find_source(data: Any, declared: FrameworkLike | None = None, target: str = "") -> tuple[Framework, Any]:
    """Return the framework and the array of ``data``, which may be a carrier or an array of another library.

    Raises:
        UnknownArrayError: If ``data`` is not an array.
        SourceMismatchError: If the array is not from the declared source.
    """
    source, array = source_of(data)
    if declared is not None and source.name != declared:
        declared = registry.framework_name(declared)
        raise SourceMismatchError(
            f"the source was declared as {declared}, but the array is from {source.name}"
            f" ({type(data).__qualname__}).",
            source_type=source.name,
            target_type=target,
            reason=f"declared {declared}, found {source.name}",
            code=Reason.OTHER_SOURCE,
            advice="Omit the source to detect it automatically.",
        )
    return source, array


# Prefixes of the names of numeric dtypes, including dtypes that only one framework has.
_NUMBERS = ("bool", "int", "uint", "float", "complex", "bfloat", "qint", "quint", "bits")


# -- the choice of a route ---------------------------------------------------------------------------


class _Choice:
    """One conversion, and the methods that choose its route: `in_place` or `elsewhere`.

    The functions in a `Decision` must convert their argument and must not refer to ``array``, because plans
    call them with other arrays.

    Attributes:
        cast: The dtype to cast to, or None.
        original: The array that was passed, if ``array`` differs: a tensor without its graph, or one replica.
        prepare: The function that computes ``array`` from ``original``.
        is_replica: Whether ``array`` is one of several replicas, which must remain equal.
        copy_reason: The reason why the values cannot be read without a copy, or None.
    """

    __slots__ = (
        *("request", "source", "target", "array", "source_device", "device", "cast"),
        *("original", "prepare", "is_replica", "nbytes", "copy_reason"),
    )

    def __init__(
        self,
        request: Request,
        source: Framework,
        target: Framework,
        array: Any,
        source_device: Device,
        device: Device,
        cast: str | None,
    ) -> None:
        self.request = request
        self.source = source
        self.target = target
        self.array = array
        self.source_device = source_device
        self.device = device
        self.cast = cast
        self.original: Any = None
        self.prepare: Callable[[Any], Any] = identity
        self.is_replica = False
        self.nbytes = 0
        self.copy_reason: Cause | None = None

    def in_place(self) -> Decision:
        """Return the decision for an array that is already in the target framework and on its device."""
        source = self.source
        array = self.array
        self.nbytes = source.nbytes(array)
        if self.cast is not None:
            if not source.dtype_name(array).startswith(_NUMBERS):
                source.check(array)
            source.interchange.check_castable(array)
            self._check_support(source.dtype_name(array), source.shape(array))
            # `_decision` adds the cast, which is a copy, and replaces the method and the reason.
            return self._decision(self._copy_method, 0, SAME_OBJECT, identity)
        if self.request.copy:
            source.interchange.check_copy(array)
            return self._decision(self._copy_method, 1, COPY_REQUESTED, source.copy)
        return self._decision("same", 0, SAME_OBJECT, identity)

    def elsewhere(self) -> Decision:
        """Return the decision for another framework or device; raise if the conversion cannot be exact."""
        source = self.source
        target = self.target
        if source is target:
            source.devices.check_move(self.array, self.device)
        source.check(self.array)
        self._choose_replica()
        shape = source.shape(self.array)
        self.nbytes = source.nbytes(self.array)
        copy_reason = source.interchange.copy_reason(self.array)
        if copy_reason:
            self.copy_reason = as_cause(copy_reason)
        if source is not target and source.autodiff.requires_grad(self.array):
            self._detach()
        dtype = source.dtype_name(self.array)
        self._check_support(dtype, shape)
        if self.cast is not None and self._casts_on_host(dtype):
            return self._cast_on_host(self.cast)
        if self.source_device.kind == "cpu" and self.device.kind == "cpu":
            return self._on_host()
        return self._between_devices(shape)

    def _check_support(self, dtype: str, shape: tuple[int, ...]) -> None:
        """Raise if the target does not support the dtype or the rank; suggest only casts that exist."""
        try:
            self.target.supports(self.cast or dtype, shape)
        except DtypeNotSupportedError as error:
            if error.cast is not None:
                error.advise_cast(self._existing(error.cast, dtype))
            raise

    def _existing(self, cast: Cast, dtype: str) -> Cast | None:
        """Return the suggested casts that exist for arrays of this dtype, or None if there are none."""
        names = [name for name in (cast.dtype, *cast.others) if self._has_cast(dtype, name)]
        if not names:
            return None
        # If a dtype was requested, `keeps_values` is about that dtype, and not about the dtype of the array.
        keeps_values = cast.keeps_values and self.cast is None and names[0] == cast.dtype
        return Cast(names[0], tuple(names[1:]), keeps_values=keeps_values)

    def _has_cast(self, old: str, new: str) -> bool:
        """Return whether the framework that would cast from dtype ``old`` to dtype ``new`` supports it."""
        framework = registry.framework("numpy") if self._casts_on_host(old) else self.target
        try:
            framework.interchange.check_cast(old, new)
        except DtypeNotSupportedError:
            return False
        return True

    def _casts_on_host(self, dtype: str) -> bool:
        """Return whether NumPy casts before the transfer, because the target lacks the dtype of the array."""
        return self.target.dtypes is not None and dtype not in self.target.dtypes

    def _between_devices(self, shape: tuple[int, ...]) -> Decision:
        """Return the decision for a conversion from, to or between accelerators."""
        if self.source is self.target:
            if self.source_device == self.device:
                return self._share_replica()
            return self._to_other_device()
        between_gpus = self.source_device.kind != "cpu" and self.device.kind != "cpu"
        if between_gpus and shares_gpus(self.source, self.target):
            return self._gpu_to_gpu(shape)
        return self._through_host()

    def _choose_replica(self) -> None:
        """Select one replica of a replicated array, if possible the one on the device of the result."""
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

    def _share_replica(self) -> Decision:
        """Return the decision that shares a replica on an accelerator as an array of the same framework."""
        if self.request.copy:
            return self._decision(self._copy_method, 1, COPY_REQUESTED, self.source.copy)
        cause = Cause(Reason.REPLICA_ON_DEVICE, device=str(self.device))
        return self._decision("view", 0, cause, identity)

    def _detach(self) -> None:
        """Detach a tensor that requires grad, or raise an error if ``grad`` is ``"error"``."""
        source = self.source
        target = self.target
        if self.request.grad == "error":
            raise graph_required_error(source, target)
        self.original = self.array
        self.prepare = source.autodiff.detach
        self.array = source.autodiff.detach(self.array)

    @property
    def _copy_method(self) -> Method:
        """The method of a copy to the target device."""
        return "host" if self.device.kind == "cpu" else "device"

    def _on_host(self) -> Decision:
        """Return the decision for a conversion between host arrays, which shares memory or copies once."""
        source = self.source
        target = self.target
        device = self.device
        if self.copy_reason:
            return self._through_host()
        view: Callable[[Any], np.ndarray] = source.host_view
        memory = view(self.array)
        objection = self._objection(memory)
        # A cast does not write to the original, so only memory that the target cannot view must be copied.
        if objection and (self.cast is None or target.cannot_view(memory)):
            if not target.alignment:  # the target's `from_host` copies
                return self._decision("host", 1, objection, lambda x: target.from_host(view(x), device))
            copy = host_memory.aligned_copy if target.alignment > 1 else host_memory.contiguous_copy
            return self._decision("host", 1, objection, lambda x: target.from_host(copy(view(x)), device))
        # `from_host` shares the memory in both cases; the method is only the name in the route.
        method: Method = "dlpack" if cell(source.name, target.name) is dlpack else "view"
        if (source.mutable or self.is_replica) and not target.mutable:
            view = _compose(view, read_only_memory.export_read_only)  # records that the memory is read-only
        return self._decision(method, 0, SHARED_HOST_MEMORY, lambda x: target.from_host(view(x), device))

    def _objection(self, memory: np.ndarray) -> Cause | None:
        """Return why the target cannot or should not share this host memory, or None if it can share it."""
        if self.request.copy:
            return COPY_REQUESTED
        obstacle = self.target.cannot_view(memory)
        return as_cause(obstacle) if obstacle else self._write_objection(memory)

    def _write_objection(self, memory: np.ndarray) -> Cause | None:
        """Return why the target, which could write to this memory, should not share it, or None if it may."""
        source = self.source
        target = self.target
        if not target.mutable or target.respects_read_only:
            return None
        if self.is_replica:
            return self._replica_objection()
        if self.request.copy is False:
            return None  # copy=False also shares memory that must not be written to
        if not source.mutable and memory.ndim == 0:
            return self._scalar_objection()
        is_read_only = not memory.flags.writeable
        if not source.mutable:  # NumPy's view of an immutable array is always read-only
            is_read_only = read_only_memory.is_shared_read_only(host_memory.address(memory))
        if is_read_only:
            # The target has no read-only arrays, and a write to a read-only page crashes the process.
            code = Reason.READ_ONLY_FILE_MAP if read_only_memory.is_file_map(memory) else Reason.READ_ONLY
            return Cause(code, framework=target.name)
        return None

    def _replica_objection(self) -> Cause | None:
        """Return why the target must not share one of several replicas, or None if it can share it."""
        if not self.is_replica or not self.target.mutable or self.target.respects_read_only:
            return None
        return Cause(Reason.REPLICATED, framework=self.target.name)

    def _scalar_objection(self) -> Cause:
        # tf.constant(2.0) is cached: a write through PyTorch would change every later constant.
        return Cause(Reason.CACHED_SCALAR, source=self.source.name, framework=self.target.name)

    def _through_host(self) -> Decision:
        """Return the decision for a conversion through host memory."""
        fetch, copies, cause = self._to_host()
        put, more = self._from_host()
        to_gpu = self.source_device.kind == "cpu" and self.device.kind != "cpu"
        method: Method = "device" if to_gpu else "host"
        cause = cause or Cause(Reason.SEPARATE_MEMORY, device=str(self.device))
        return self._decision(method, copies + more, cause, _compose(fetch, put))

    def _to_host(self) -> tuple[Callable[[Any], np.ndarray], int, Cause | None]:
        """Return a function that reads the values into host memory, the number of copies, and their cause."""
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

    def _from_host(self) -> tuple[Callable[[np.ndarray], Any], int]:
        """Return a function that turns unshared host memory into the result, and the number of copies."""
        target = self.target
        device = self.device
        if device.kind != "cpu":
            return lambda memory: target.from_host(memory, device), 1
        return lambda memory: target.from_host(_viewable(target, memory), device), int(not target.alignment)

    def _to_other_device(self) -> Decision:
        """Return the decision for another device of the same framework; one of the two is an accelerator."""
        target = self.target
        device = self.device
        between_gpus = self.source_device.kind != "cpu" and device.kind != "cpu"
        cause = Cause(Reason.OTHER_DEVICE, device=str(device))
        # OpenCL copies from one device to the host, and from there to the other device.
        if between_gpus and target.interchange.dlpack_device is None:
            return self._decision("host", 2, cause, lambda x: target.devices.to_device(x, device))
        return self._decision(self._copy_method, 1, cause, lambda x: target.devices.to_device(x, device))

    def _gpu_to_gpu(self, shape: tuple[int, ...]) -> Decision:
        """Return the decision for a GPU array if both frameworks can access that GPU."""
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
        """Return why the target cannot or should not share the array's GPU memory, or None if it can."""
        source = self.source
        target = self.target
        # If there is also a cast or a move to another device, that is the reason for the copy.
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
        """Return why the target cannot share GPU memory with this layout, or None if it can."""
        target = self.target
        interchange = self.source.interchange
        if target.alignment and interchange.address(self.array) % target.alignment:
            # XLA and TensorFlow kernels load several elements at once, and require this alignment.
            return Cause(Reason.MISALIGNED, framework=target.name, alignment=target.alignment)
        itemsize = self.nbytes // max(1, math.prod(shape)) or 1
        return as_cause(target.interchange.cannot_stride(shape, interchange.strides(self.array), itemsize))

    def _cast_on_host(self, dtype: str) -> Decision:
        """Return the decision for a target without the source's dtype: cast in host memory first."""
        self.cast = None  # so that `_decision` does not add another cast
        fetch, copies, _ = self._to_host()
        put, _ = self._from_host()
        numpy = registry.framework("numpy")
        numpy.interchange.check_cast(self.source.dtype_name(self.array), dtype)
        cast = numpy.cast
        copies += 1 + (self.device.kind != "cpu")  # the cast and the transfer
        cause = Cause(Reason.CAST_REQUESTED, dtype=dtype)
        return self._decision(self._copy_method, copies, cause, lambda x: put(cast(fetch(x), dtype)))

    def _decision(self, method: Method, copies: int, cause: Cause, convert: Callable[[Any], Any]) -> Decision:
        """Return the decision, with the requested cast; raise if ``copy=False`` and the route copies."""
        source = self.source
        target = self.target
        run = convert
        if self.cast is not None:
            dtype = self.cast
            target.interchange.check_cast(source.dtype_name(self.array), dtype)
            method = self._copy_method
            copies += 1
            cause = Cause(Reason.CAST_REQUESTED, dtype=dtype)
            run = _compose(run, lambda x: target.cast(x, dtype))
        if copies and self.request.copy is False:
            raise copy_required_error(source, target, self.device, method, cause)
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
        return Decision(route, source, target, self.original, _compose(self.prepare, run))


def _compose(first: Callable[[Any], Any], second: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return the composition of two functions: ``second(first(x))``."""
    return lambda x: second(first(x))


def _viewable(target: Framework, memory: np.ndarray) -> np.ndarray:
    """Return unshared host memory with a layout that the target can view."""
    return (
        memory if not target.alignment or not target.cannot_view(memory) else host_memory.aligned_copy(memory)
    )
