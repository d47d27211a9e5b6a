"""Choose the route of a conversion from the device, strides, dtype and flags of the array."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from arraybridge.advice import Advice, Cast
from arraybridge.carriers.registry import carrier_of
from arraybridge.carriers.sources import advise_about, is_array, source_of
from arraybridge.carriers.third_party_arrays import check_readable_without_copy, view_for
from arraybridge.conversion.device_resolution import shares_gpus, target_device
from arraybridge.conversion.fitting_advice import advise_parts, advise_reshape, fit_expressions, is_limited
from arraybridge.conversion.request import Decision, Request, check_options, dtype_name
from arraybridge.conversion.table import cell, dlpack
from arraybridge.conversion.typed_errors import (
    copy_required_error,
    graph_required_error,
    raise_conversion_error,
)
from arraybridge.device import Device
from arraybridge.errors import (
    ArrayNotSupportedError,
    DtypeNotSupportedError,
    MemoryConversionError,
    SourceMismatchError,
    UnknownArrayError,
)
from arraybridge.host import buffers, file_maps, read_only_memory
from arraybridge.interface import registry
from arraybridge.interface.framework import Framework, isolate, native_errors
from arraybridge.interface.streams import identity
from arraybridge.reasons import DEPENDS_ON_LAYOUT, Cause, Reason, as_cause
from arraybridge.route import Method, Route, copy_method
from arraybridge.tracing import events
from arraybridge.types import FrameworkLike

__all__ = ["Choice", "compose", "decide", "find_requested_source", "find_source"]


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
    try:
        request = check_options(request)
    except DtypeNotSupportedError as error:
        error.source_type = getattr(registry.find_owner(data), "name", "")
        error.target_type = str(request.target)
        raise
    target = registry.framework(request.target)
    owner = registry.find_owner(data)
    if owner is not None and request.declared is None:  # true for most calls
        source = owner
        array = data
    else:
        if owner is None and request.copy is False:
            check_readable_without_copy(data, target.name)
        source, array = find_requested_source(data, request, target)
    try:
        return _decide_for(source, array, target, request, is_import=_is_import(data, array))
    except MemoryConversionError as error:
        if error.expressions:
            if array is not data:
                advise_about(error, data)
            if not error.target_type:  # the error does not consider the target
                _fit_expressions(error, source, array, target)
        error.source_type = error.source_type or source.name
        error.target_type = error.target_type or target.name
        raise


def _is_import(data: Any, array: Any) -> bool:
    """Return whether an array was imported from another library, and is not the array of a carrier."""
    return array is not data and carrier_of(data) is None


def find_requested_source(data: Any, request: Request, target: Framework) -> tuple[Framework, Any]:
    """Return the result of `find_source`. The expressions in its errors fit ``target``.

    The array of another library is in the form in which ``target`` may import it.
    """
    try:
        source, array = find_source(data, request.declared, target.name)
        return source, view_for(target, source, array)
    except UnknownArrayError as error:
        unfit = error.templates
        if is_limited(target):
            from arraybridge.carriers.non_array_advice import advice_for_object  # only errors need it

            error.advise(advice_for_object(data, partial(_check_convertible, target.name)))
        if error.templates == unfit:  # the expressions do not depend on the target
            fit_expressions(error, target)
        raise
    except MemoryConversionError as error:
        fit_expressions(error, target)
        raise


def _check_convertible(target: str, x: Any) -> None:
    """Raise the error of a conversion to ``target``, without converting ``x``."""
    if not is_array(x):
        raise NotImplementedError
    decide(x, Request(target))


def _fit_expressions(error: MemoryConversionError, source: Framework, array: Any, target: Framework) -> None:
    """Extend the expressions of an error about an array, so that the target supports their values.

    The values of the expressions have the shape of the array, and its dtype if it is a dtype of numbers and
    the error is not about the dtype.
    """
    dtype = source.dtype_name(array)
    values = array if isinstance(array, np.ndarray) else None
    if dtype.startswith("complex") or (values is not None and _has_complex(values.dtype)):
        if advise_parts(error, target):
            return
        dtype = "complex128"  # the target has all complex dtypes
    elif not isinstance(error, ArrayNotSupportedError) or not dtype.startswith(_NUMBERS):
        dtype = ""
    fit_expressions(error, target, dtype, values)


def _has_complex(dtype: np.dtype[Any]) -> bool:
    """Return whether elements of this dtype, or some of their fields, are complex numbers."""
    base = dtype.base
    return base.kind == "c" or any(_has_complex(field[0]) for field in (base.fields or {}).values())


def _decide_for(
    source: Framework, array: Any, target: Framework, request: Request, *, is_import: bool
) -> Decision:
    """Return the decision for an array of a known framework, into which it may have been imported.

    Exceptions of the frameworks, except out-of-memory errors, are raised again as errors of this package.
    """
    source_device = source.devices.device_of(array)
    device = target_device(source, target, source_device, request.gpu_id, request.device)
    cast = None if request.dtype is None else dtype_name(request.dtype)
    if cast is not None and cast == source.dtype_name(array):
        cast = None
    # `is` is true for most calls, and is faster than `==`.
    stays = source is target and (source_device is device or source_device == device)
    if stays and (request.device is not None or request.gpu_id is not None):
        stays = not source.devices.is_scattered(array)
    if source.sparse.layout(array):
        from arraybridge.conversion.sparse import SparseConversion  # takes 1 ms; few programs need it

        conversion = SparseConversion(source, target, _request_for_parts(request, device), decide)
        with isolate(source, target):
            return conversion.decision(array, device, stays=stays, cast=cast)
    choice = Choice(request, source, target, array, source_device, device, cast)
    try:
        return choice.in_place(is_import=is_import) if stays else choice.elsewhere()
    except native_errors(source, target) as error:
        raise_conversion_error(source, target, "", error)


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
    try:
        source, array = source_of(data)
    except UnknownArrayError as error:
        from arraybridge.trees import arrays_of  # only errors need it

        with suppress(ValueError):  # a container that contains itself
            if not error.expressions and arrays_of(data):
                error.advise(Advice("Convert the arrays inside it with convert_tree(x, target)."))
        raise
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


@dataclass(slots=True, eq=False, repr=False)
class Choice:
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

    request: Request
    source: Framework
    target: Framework
    array: Any
    source_device: Device
    device: Device
    cast: str | None
    original: Any = None
    prepare: Callable[[Any], Any] = identity
    is_replica: bool = False
    nbytes: int = 0
    copy_reason: Cause | None = None

    def in_place(self, *, is_import: bool) -> Decision:
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
            return self._decision(copy_method(self.device), 0, SAME_OBJECT, identity)
        if self.request.copy:
            source.interchange.check_copy(array)
            return self._decision(copy_method(self.device), 1, COPY_REQUESTED, source.copy)
        return self._share_import() if is_import else self._decision("same", 0, SAME_OBJECT, identity)

    def _share_import(self) -> Decision:
        """Return the decision for the accelerator memory of another library, which is already imported."""
        cause = self._write_cause(len(self.source.shape(self.array)), None)
        if cause:
            return self._decision(copy_method(self.device), 1, cause, self.source.copy)
        cause = Cause(Reason.SHARED_DEVICE_MEMORY, device=str(self.device))
        return self._decision("dlpack", 0, cause, identity)

    def elsewhere(self) -> Decision:
        """Return the decision for another framework or device; raise if the conversion cannot be exact."""
        source = self.source
        target = self.target
        if source is target:
            source.devices.check_move(self.array, self.device)
        self.inspect()
        with isolate(source, target):
            return self._read_elsewhere()

    def _read_elsewhere(self) -> Decision:
        """Return the decision for an array whose values can be read."""
        source = self.source
        target = self.target
        if source is not target and source.autodiff.requires_grad(self.array):
            self.detach()
        shape = source.shape(self.array)
        dtype = source.dtype_name(self.array)
        self._check_support(dtype, shape)
        if self.cast is not None and self._casts_on_host(dtype):
            return self._cast_on_host(self.cast)
        if self.source_device.kind == "cpu" and self.device.kind == "cpu":
            return self._on_host()
        return self._between_devices(shape)

    def inspect(self) -> None:
        """Check that the values of the array can be read, and set the attributes that state how."""
        source = self.source
        source.check(self.array)
        self._choose_replica()
        self.nbytes = source.nbytes(self.array)
        copy_reason = source.interchange.copy_reason(self.array)
        if copy_reason:
            self.copy_reason = as_cause(copy_reason)

    def _check_support(self, dtype: str, shape: tuple[int, ...]) -> None:
        """Raise if the target does not support the dtype or the rank; suggest only casts that exist."""
        try:
            self.target.supports(self.cast or dtype, shape)
        except DtypeNotSupportedError as error:
            if error.cast is not None:
                error.advise_cast(self._filter_casts(error.cast, dtype))
            raise
        except ArrayNotSupportedError as error:
            advise_reshape(error, self.source, self.target, self.cast or dtype, shape)
            raise

    def _filter_casts(self, cast: Cast, dtype: str) -> Cast | None:
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
            return self._decision(copy_method(self.device), 1, COPY_REQUESTED, self.source.copy)
        cause = Cause(Reason.REPLICA_ON_DEVICE, device=str(self.device))
        return self._decision("view", 0, cause, identity)

    def detach(self) -> None:
        """Detach a tensor that requires grad, or raise an error if ``grad`` is ``"error"``."""
        source = self.source
        target = self.target
        if self.request.grad == "error":
            raise graph_required_error(source, target)
        self.original = self.array
        self.prepare = source.autodiff.detach
        self.array = source.autodiff.detach(self.array)

    def _on_host(self) -> Decision:
        """Return the decision for a conversion between host arrays, which shares memory or copies once."""
        source = self.source
        target = self.target
        device = self.device
        if self.copy_reason:
            return self._through_host()
        view: Callable[[Any], np.ndarray] = source.host_view
        memory = view(self.array)
        cause = self._cause(memory)
        # A cast does not write to the original, so only memory that the target cannot view must be copied.
        if cause and (self.cast is None or target.cannot_view(memory)):
            if not target.alignment:  # the target's `from_host` copies
                return self._decision("host", 1, cause, lambda x: target.from_host(view(x), device))
            copy = buffers.copy_normalized if target.alignment > 1 else buffers.contiguous_copy
            return self._decision("host", 1, cause, lambda x: target.from_host(copy(view(x)), device))
        # `from_host` shares the memory in both cases; the method is only the name in the route.
        method: Method = "dlpack" if cell(source.name, target.name) is dlpack else "view"
        if (source.mutable or self.is_replica) and not target.mutable:
            view = compose(view, read_only_memory.export_read_only)  # records that the memory is read-only
        return self._decision(method, 0, SHARED_HOST_MEMORY, lambda x: target.from_host(view(x), device))

    def _cause(self, memory: np.ndarray) -> Cause | None:
        """Return why the target cannot or should not share this host memory, or None if it can share it."""
        if self.request.copy:
            return COPY_REQUESTED
        cause = self.target.cannot_view(memory)
        return as_cause(cause) if cause else self._write_cause(memory.ndim, memory)

    def _write_cause(self, rank: int, memory: np.ndarray | None) -> Cause | None:
        """Return why the target, which could write to this memory, should not share it, or None if it may.

        ``memory`` is a view of memory on the host; None on an accelerator.
        """
        source = self.source
        target = self.target
        if not target.mutable or target.respects_read_only:
            return None
        if self.is_replica:
            return Cause(Reason.REPLICATED, framework=target.name)
        if self.request.copy is not None:
            return None  # copy=False also shares memory that must not be written to
        if rank == 0 and not source.mutable:
            # tf.constant(2.0) is cached (tensorflow/tensorflow#109357): a write through PyTorch would change
            # every later constant.
            return Cause(Reason.CACHED_SCALAR, source=source.name, framework=target.name)
        if not self._is_read_only(memory):
            return None
        # The target has no read-only arrays, and a write to a read-only page crashes the process.
        is_file_map = memory is not None and file_maps.is_read_only_map(memory)
        return Cause(Reason.READ_ONLY_FILE_MAP if is_file_map else Reason.READ_ONLY, framework=target.name)

    def _is_read_only(self, memory: np.ndarray | None) -> bool:
        """Return whether the memory of the array is read-only; ``memory`` is as for `_write_cause`."""
        source = self.source
        if memory is None and not read_only_memory.exported_ranges:
            return False
        if memory is None:
            return read_only_memory.is_shared_read_only(source.interchange.address(self.array))
        if source.mutable:
            return not memory.flags.writeable
        # NumPy's view of an immutable array is always read-only.
        return read_only_memory.is_shared_read_only(buffers.address(memory))

    def _through_host(self) -> Decision:
        """Return the decision for a conversion through host memory."""
        fetch, copies, cause = self._to_host()
        put, more = self._from_host()
        to_gpu = self.source_device.kind == "cpu" and self.device.kind != "cpu"
        method: Method = "device" if to_gpu else "host"
        cause = cause or Cause(Reason.SEPARATE_MEMORY, device=str(self.device))
        return self._decision(method, copies + more, cause, compose(fetch, put))

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
        if device.kind != "cpu" or not target.alignment:
            return lambda memory: target.from_host(memory, device), 1
        if target.name == "numpy":  # `from_host` does the same, but with three more calls
            return target.host_view, 0
        return lambda memory: target.from_host(_make_viewable(target, memory), device), 0

    def _to_other_device(self) -> Decision:
        """Return the decision for another device of the same framework; one of the two is an accelerator."""
        target = self.target
        device = self.device
        between_gpus = self.source_device.kind != "cpu" and device.kind != "cpu"
        cause = Cause(Reason.OTHER_DEVICE, device=str(device))
        # OpenCL copies from one device to the host, and from there to the other device.
        if between_gpus and target.interchange.dlpack_device is None:
            return self._decision("host", 2, cause, lambda x: target.devices.to_device(x, device))
        return self._decision(copy_method(device), 1, cause, lambda x: target.devices.to_device(x, device))

    def _gpu_to_gpu(self, shape: tuple[int, ...]) -> Decision:
        """Return the decision for a GPU array if both frameworks can access that GPU."""
        source = self.source
        target = self.target
        source_device = self.source_device
        device = self.device
        copy_cause = self._gpu_copy_reason(shape)

        def import_from(x: Any) -> Any:
            packed = source.copy(x) if copy_cause and copy_cause.code is not Reason.BOOL_BYTES else x
            if target.alignment > 1:
                packed = source.interchange.normalize_bools(packed)
            return target.interchange.import_from(packed, source, source_device)

        if source_device != device:
            cause = Cause(Reason.OTHER_DEVICE, device=str(device))
            copies = 2 if copy_cause else 1
            move = target.devices.to_device
            return self._decision("device", copies, cause, lambda x: move(import_from(x), device))
        if copy_cause:
            return self._decision("device", 1, copy_cause, import_from)
        cause = Cause(Reason.SHARED_DEVICE_MEMORY, device=str(device))
        return self._decision("dlpack", 0, cause, import_from)

    def _gpu_copy_reason(self, shape: tuple[int, ...]) -> Cause | None:
        """Return why the target cannot or should not share the array's GPU memory, or None if it can."""
        # If there is also a cast or a move to another device, that is the reason for the copy.
        if self.request.copy and self.source_device == self.device and self.cast is None:
            return COPY_REQUESTED
        if self.copy_reason:
            return self.copy_reason
        return self._write_cause(len(shape), None) or self._stride_cause(shape)

    def _stride_cause(self, shape: tuple[int, ...]) -> Cause | None:
        """Return why the target cannot share GPU memory with this layout, or None if it can."""
        target = self.target
        interchange = self.source.interchange
        if target.alignment and interchange.address(self.array) % target.alignment:
            # XLA and TensorFlow kernels load several elements at once, and require this alignment.
            return Cause(Reason.MISALIGNED, framework=target.name, alignment=target.alignment)
        if target.alignment > 1 and interchange.normalize_bools(self.array) is not self.array:
            return Cause(Reason.BOOL_BYTES, framework=target.name)
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
        return self._decision(copy_method(self.device), copies, cause, lambda x: put(cast(fetch(x), dtype)))

    def _decision(self, method: Method, copies: int, cause: Cause, convert: Callable[[Any], Any]) -> Decision:
        """Return the decision, with the requested cast; raise if ``copy=False`` and the route copies."""
        source = self.source
        target = self.target
        run = convert
        if self.cast is not None:
            dtype = self.cast
            target.interchange.check_cast(source.dtype_name(self.array), dtype)
            method = copy_method(self.device)
            copies += 1
            cause = Cause(Reason.CAST_REQUESTED, dtype=dtype)
            run = compose(run, lambda x: target.cast(x, dtype))
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
        return Decision(route, source, target, self.original, compose(self.prepare, run))


def compose(first: Callable[[Any], Any], second: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return the composition of two functions: ``second(first(x))``."""
    return lambda x: second(first(x))


def _make_viewable(target: Framework, memory: np.ndarray) -> np.ndarray:
    """Return unshared host memory with a layout that the target can view."""
    return buffers.copy_normalized(memory) if target.cannot_view(memory) else memory
