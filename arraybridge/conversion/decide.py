"""The one place that chooses how a particular array travels: by its device, strides, dtype and flags."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from arraybridge.conversion.routes import Method, Route, dlpack
from arraybridge.conversion.table import cell, fast_converter
from arraybridge.conversion.where import resolve_device, shares_cards
from arraybridge.errors import (
    CopyRequiredError,
    DtypeNotSupportedError,
    GradientError,
    MemoryConversionError,
    SourceMismatchError,
    nearest,
    told,
)
from arraybridge.frameworks import hostmemory, registry
from arraybridge.frameworks.base import CPU, Framework, refusals, refuse
from arraybridge.frameworks.parts import Fallback, itself
from arraybridge.trees import source_of
from arraybridge.types import Device, DeviceLike, FrameworkLike, GpuId

__all__ = ["Request", "Run", "decide", "find_source"]


@dataclass(slots=True, eq=False, repr=False)  # equality would compare arrays
class Request:
    """The arguments of one conversion, as the user gave them."""

    data: Any
    target: FrameworkLike
    declared: FrameworkLike | None = None
    gpu_id: GpuId = None
    device: DeviceLike | None = None
    copy: bool | None = None
    dtype: Any = None
    grad: str = "error"


@dataclass(slots=True, eq=False, repr=False)
class Run:
    """Carries out what was decided.

    ``convert`` may be called with any array of which `decide` would be told the same; `plans` does so.
    """

    source: Framework
    target: Framework
    method: Method
    data: Any
    convert: Callable[[Any], Any]
    #: Does the same for arrays that need no care, and raises for any other.
    fast: Callable[[Any], Any] | None = None

    def __call__(self) -> Any:
        try:
            return self.convert(self.data)
        except MemoryConversionError:
            raise
        except refusals(self.source, self.target) as error:
            if self.source.is_oom(error) or self.target.is_oom(error):
                raise
            raise _refused(self.source, self.target, self.method, error) from error


def decide(request: Request) -> tuple[Route, Run]:
    """Choose how this array travels, without converting it.

    Returns:
        the route, and what carries it out when it is called.

    Raises:
        MemoryConversionError: or a subclass, where it cannot be done exactly.
        ValueError: for options that make no sense.
    """
    copy = request.copy
    if not (copy is None or copy is True or copy is False):
        if not isinstance(copy, np.bool_):
            raise ValueError(f"copy={copy!r} must be None, True or False")
        request = replace(request, copy=bool(copy))
    if request.grad == "flow":
        raise ValueError(
            "a conversion has no gradient: grad='flow' is an option of the decorators @torch, @jax and"
            " @tensorflow, where there is a function to differentiate; pass grad='detach' to drop the graph"
        )
    if request.grad not in ("error", "detach"):
        raise ValueError(
            f"grad={request.grad!r} must be 'error' or 'detach'"
            f"{nearest(str(request.grad), ('error', 'detach'))}"
        )
    target = registry.framework(request.target)
    source, data = find_source(request.data, request.declared, target.name)
    try:
        here = source.device_of(data)
        there = resolve_device(source, target, here, request.gpu_id, request.device)
        native = source is target and source.owns(data)
        cast = None
        if request.dtype is not None:
            cast = dtype_name(request.dtype)
            if cast == source.dtype_name(data):
                cast = None
        journey = _Journey(request, source, target, data, here, there, cast, native)
        if native and here == there:
            asked = request.device is not None or request.gpu_id is not None
            if not (asked and source.pool.is_scattered(data)):
                return journey.in_place()
        return journey.depart()
    except MemoryConversionError as error:
        error.source_type = error.source_type or source.name
        error.target_type = error.target_type or target.name
        raise


def find_source(data: Any, declared: FrameworkLike | None = None, target: str = "") -> tuple[Framework, Any]:
    """The framework of the array, and the array to read (that of another library is opened first).

    Raises:
        UnknownArrayError: it is no array.
        SourceMismatchError: it is not of the declared source.
    """
    source, opened = source_of(data)
    if declared is not None and source.name != declared:
        declared = registry.framework_name(declared)
        raise SourceMismatchError(
            f"the source was declared as {declared}, but the array is of {source.name}"
            f" ({type(data).__qualname__}); leave the source out to have it detected",
            source_type=source.name,
            target_type=target,
            reason=f"declared {declared}, found {source.name}",
        )
    return source, opened


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


# -- how ---------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False, repr=False)
class _Journey:
    """One array on its way from ``here`` to ``there``; `depart` chooses the route."""

    request: Request
    source: Framework
    target: Framework
    data: Any
    here: Device
    there: Device
    cast: str | None
    #: Source and target are one framework, and the array is its own.
    native: bool
    #: The array as it was handed over, where ``data`` is what is left of it without its graph.
    whole: Any = None

    def in_place(self) -> tuple[Route, Run]:
        """The array is where it should be, in its own framework, whatever its layout or flags."""
        target, there = self.target, self.there
        method: Method = "host" if there.kind == "cpu" else "device"
        if self.cast is not None:
            target.supports(self.cast, target.shape(self.data))
            return self._end(method, 0, "", itself)  # the cast makes the copy
        if self.request.copy:
            target.check_copy(self.data)
            return self._end(method, 1, "copy=True was asked for", target.copy)
        return self._end("same", 0, "it is there already", itself)

    def depart(self) -> tuple[Route, Run]:
        """Another framework or device: refuse what cannot go there exactly; else choose the route."""
        source, target = self.source, self.target
        try:
            source.check(self.data)
            shape = source.shape(self.data)
            if len(shape) > hostmemory.MAX_RANK:
                instead = f"arrays travel through NumPy, which has at most {hostmemory.MAX_RANK} axes"
                raise refuse(source, f"an array of rank {len(shape)}", f"{instead}; reshape it first")
            if not self.native and source.requires_grad(self.data):
                self._leave_the_graph()
            dtype = source.dtype_name(self.data)
            target.supports(self.cast or dtype, shape)
            if self.cast is not None and target.dtypes is not None and dtype not in target.dtypes:
                return self._cast_on_the_way(self.cast)
            if self.here.kind == "cpu" and self.there.kind == "cpu":
                return self._on_the_host()
            if self.native:
                return self._to_other_device()
            if self.here.kind != "cpu" and self.there.kind != "cpu" and shares_cards(source, target):
                return self._card_to_card(shape)
            return self._through_the_host()
        except MemoryConversionError:
            raise
        except refusals(source, target) as error:
            if source.is_oom(error) or target.is_oom(error):
                raise
            raise _refused(source, target, "", error) from error

    def _leave_the_graph(self) -> None:
        source, target = self.source, self.target
        if self.request.grad == "error":
            raise GradientError(
                f"the {source.name} tensor requires grad, and its graph would end on the way to"
                f" {target.name}; pass grad='detach' to convert its values alone",
                reason="it requires grad",
            )
        self.whole, self.data = self.data, source.detach(self.data)

    # The functions that follow are kept in plans: they take the array, and refer to no particular one.

    def _view(self) -> Callable[[Any], np.ndarray]:
        """A function from the array to its host memory."""
        return self._from_values(self.source.host_view)

    def _from_values(self, call: Callable[[Any], Any]) -> Callable[[Any], Any]:
        if self.whole is None:
            return call
        detach = self.source.detach
        return lambda x: call(detach(x))

    def _on_the_host(self) -> tuple[Route, Run]:
        """Both ends are on the host: share, or copy once."""
        source, target, there = self.source, self.target, self.there
        reason = source.must_copy(self.data)
        if reason:
            fetch = self._from_values(source.to_host)
            return self._end(
                "host",
                1 + (not target.alignment),
                reason,
                lambda x: target.from_host(_viewable(target, fetch(x)), there),
            )
        memory = source.host_view(self.data)
        view = self._view()
        objection = self._objection(memory)
        # A cast leaves the original alone, so that only what the target cannot view at all must be copied.
        if objection and (self.cast is None or target.cannot_view(memory)):
            fetch = self._view() if not target.alignment else self._from_values(source.to_host)
            return self._end("host", 1, objection, lambda x: target.from_host(fetch(x), there))

        lend = hostmemory.lend if source.mutable and not target.mutable else itself

        def share(x: Any) -> Any:
            return target.from_host(lend(view(x)), there)

        method: Method = "dlpack" if cell(source.name, target.name) is dlpack else "view"
        reason = "both see the same host memory"
        fast = self._fast(memory)
        if fast is None:
            return self._end(method, 0, reason, share)
        declined: tuple[type[Exception], ...] = (Fallback, *refusals(source, target))

        def at_best(x: Any) -> Any:
            try:
                return fast(x)
            except declined:
                return share(x)

        return self._end(method, 0, reason, at_best, fast)

    def _fast(self, memory: np.ndarray) -> Callable[[Any], Any] | None:
        """The fast converter of the pair, where it does what was decided; or None."""
        source = self.source
        if self.here != CPU or self.there != CPU:
            return None
        if memory.ndim == 0 and not source.mutable:  # it copies the scalars of immutable frameworks
            return None
        fast = fast_converter(source, self.target, type(self.data))
        if fast is None or (source.mutable and not memory.flags.writeable):
            return None
        return self._from_values(fast)

    def _objection(self, memory: np.ndarray) -> str:
        """Why the target cannot, or should not, share this host memory; or ``""``."""
        if self.request.copy:
            return "copy=True was asked for"
        objection = self.target.cannot_view(memory)
        if objection or self.request.copy is False or not self.target.mutable or self.target.honours_readonly:
            return objection
        if not self.source.mutable and memory.ndim == 0:
            return self._scalar_objection()
        read_only = (
            not memory.flags.writeable
            if self.source.mutable
            else hostmemory.is_lent(hostmemory.address(memory))
        )
        if read_only:
            # The target cannot mark its view as read-only, and a write to a read-only page ends the process.
            return f"it is read-only, and {self.target.name} could write to it"
        return ""

    def _scalar_objection(self) -> str:
        # tf.constant(2.0) is cached: a write through torch would change every later constant.
        return f"{self.source.name} may cache scalars, and {self.target.name} could write to it"

    def _through_the_host(self) -> tuple[Route, Run]:
        """One of the two lives on an accelerator that the other does not reach."""
        target, there = self.target, self.there
        fetch, copies, reason = self._host_memory()
        if there.kind != "cpu":
            method: Method = "device" if self.here.kind == "cpu" else "host"
            reason = reason or f"{there} has memory of its own"
            return self._end(method, copies + 1, reason, lambda x: target.from_host(fetch(x), there))
        return self._end(
            "host",
            copies + (not target.alignment),
            reason,
            lambda x: target.from_host(_viewable(target, fetch(x)), there),
        )

    def _host_memory(self) -> tuple[Callable[[Any], np.ndarray], int, str]:
        """How the values get into host memory: a function, the copies that it makes, and why."""
        source = self.source
        if self.here.kind != "cpu":
            reason = f"{source.name} on {self.here} and {self.target.name} on {self.there} share no memory"
            return self._from_values(lambda x: source.to_host(source.resolve(x))), 1, reason
        reason = source.must_copy(self.data)
        if reason:
            return self._from_values(source.to_host), 1, reason
        return self._view(), 0, ""

    def _to_other_device(self) -> tuple[Route, Run]:
        """To another device of the same framework, at least one of the two being an accelerator."""
        target, here, there = self.target, self.here, self.there
        method: Method = "host" if there.kind == "cpu" else "device"
        copies = 1
        if here.kind != "cpu" and there.kind != "cpu" and target.dlpack_device is None:
            method, copies = "host", 2  # OpenCL: out of one device, and into the other
        return self._end(method, copies, f"{there} is another device", lambda x: target.to_device(x, there))

    def _card_to_card(self, shape: tuple[int, ...]) -> tuple[Route, Run]:
        """Both frameworks reach the card where the array lives."""
        source, target, here, there = self.source, self.target, self.here, self.there
        objection = self._card_objection(shape)

        def adopt(x: Any) -> Any:
            packed = source.copy(source.resolve(x)) if objection else x
            return target.adopt(packed, source, here)

        bring = self._from_values(adopt)
        if here != there:
            copies = 2 if objection else 1
            reason = f"{there} is another device"
            return self._end("device", copies, reason, lambda x: target.to_device(bring(x), there))
        if objection:
            return self._end("device", 1, objection, bring)
        return self._end("dlpack", 0, f"both see the memory of {there}", bring)

    def _card_objection(self, shape: tuple[int, ...]) -> str:
        """Why the target cannot, or should not, share this memory of a card; or ``""``."""
        source, target, data = self.source, self.target, self.data
        itemsize = source.nbytes(data) // max(1, math.prod(shape)) or 1
        if self.request.copy and self.here == self.there and self.cast is None:
            return "copy=True was asked for"
        reason = source.must_copy(data)
        if reason:
            return reason
        if not shape and target.mutable and not source.mutable and self.request.copy is None:
            return self._scalar_objection()
        if target.alignment and source.address(data) % target.alignment:
            # XLA's and TensorFlow's kernels load several elements at once, and trust in the alignment.
            return f"its memory is not aligned to {target.alignment} bytes"
        return target.cannot_stride(shape, source.strides(data), itemsize)

    def _cast_on_the_way(self, dtype: str) -> tuple[Route, Run]:
        """The target lacks the source's dtype: cast in host memory, where the values still are whole."""
        target, there = self.target, self.there
        self.cast = None
        fetch, copies, _ = self._host_memory()
        numpy = registry.framework("numpy")

        def run(x: Any) -> Any:
            values = numpy.cast(fetch(x), dtype)
            if there.kind != "cpu":
                return target.from_host(values, there)
            return target.from_host(_viewable(target, values), there)

        method: Method = "host" if there.kind == "cpu" else "device"
        return self._end(method, copies + 1 + (there.kind != "cpu"), f"a cast to {dtype} was asked for", run)

    def _end(
        self,
        method: Method,
        copies: int,
        reason: str,
        convert: Callable[[Any], Any],
        fast: Callable[[Any], Any] | None = None,
    ) -> tuple[Route, Run]:
        """The route and its function, with the cast that was asked for; ``copy=False`` is minded here."""
        source, target = self.source, self.target
        run = convert
        if self.cast is not None:
            dtype = self.cast
            method = "host" if self.there.kind == "cpu" else "device"
            copies, reason = copies + 1, f"a cast to {dtype} was asked for"

            def with_cast(x: Any) -> Any:
                return target.cast(convert(x), dtype)

            run = with_cast
        if copies and self.request.copy is False:
            raise CopyRequiredError(
                f"copy=False was asked for, but {source.name} → {target.name} on {self.there} must"
                f" copy this array, because {reason}; pass copy=None to allow it",
                method=method,
                reason=reason,
            )
        nbytes = source.nbytes(self.data)
        route = Route(source.name, target.name, method, self.there, copies == 0, copies, nbytes, reason)
        # What it does not look at itself is the dtype, and, with copy=False, whether there is an axis.
        if self.request.dtype is not None or (self.request.copy is False and not source.mutable):
            fast = None
        return route, Run(source, target, method, self.data if self.whole is None else self.whole, run, fast)


def _refused(source: Framework, target: Framework, method: str, error: Exception) -> MemoryConversionError:
    """What a framework raised, under a name of ours."""
    reason = told(error)
    how = f" by the route {method!r}" if method else ""
    advice = "convert to numpy first to see which side refuses"
    if "numpy" in (source.name, target.name):
        asked = source.name if target.name == "numpy" else target.name
        advice = f"it is {asked} that refuses; pass a plain, dense copy of the array"
    return MemoryConversionError(
        f"{source.name} → {target.name} failed{how} ({reason}); {advice}",
        source_type=source.name,
        target_type=target.name,
        method=method,
        reason=reason,
    )


def _viewable(target: Framework, memory: np.ndarray) -> np.ndarray:
    """Memory that nobody else refers to, in a form that the target can view."""
    return memory if not target.alignment or not target.cannot_view(memory) else hostmemory.fresh(memory)
