"""Write the values of an array to an existing array, the argument ``out``.

The values are copied in one of these ways:

- NumPy copies values between contiguous arrays in host memory, and those that the target cannot view.
- If the target can read the source's memory, it copies the values (`Framework.write`), and casts them by its
  rules.
- If the values cannot be read in place, such as those on a GPU or in a file, the source writes to the host
  memory of ``out`` (`Interchange.read_into`, `Interchange.fill`).
- Otherwise, the values are copied to host memory, and from there to ``out``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from contextlib import suppress
from functools import partial
from typing import Any

from arraybridge.caches import remember
from arraybridge.carriers.registry import carrier_of
from arraybridge.carriers.sources import source_of
from arraybridge.conversion.decision import SAME_OBJECT, Choice, find_requested_source
from arraybridge.conversion.device_resolution import resolve_device, shares_gpus
from arraybridge.conversion.plan_cache import MOST_PLAN_KEYS, add_plan, plans_by_signature, run
from arraybridge.conversion.request import Decision, Request, check_options, dtype_name
from arraybridge.errors import ArrayNotSupportedError, GradientError, MemoryConversionError
from arraybridge.host import buffers
from arraybridge.interface import registry
from arraybridge.interface.framework import Framework, NoPlanError, native_errors
from arraybridge.interface.interchange import is_c_contiguous
from arraybridge.interface.streams import identity
from arraybridge.reasons import Cause, Reason
from arraybridge.route import Method, Route

__all__ = ["decide_output", "framework_of_output", "memory_range", "store_output_plan"]

#: A function that writes an array to ``out``.
Write = Callable[[Any, Any], None]
_INTO_OUTPUT = Cause(Reason.INTO_OUTPUT)


# -- the array ``out`` -------------------------------------------------------------------------------


def framework_of_output(out: Any) -> Framework:
    """Return the framework of ``out``.

    Raises:
        TypeError: If ``out`` is not an array of a framework with mutable arrays.
    """
    target = registry.find_owner(out)
    if target is None:
        raise TypeError(f"out is a {type(out).__qualname__}, not an array. {_advice_for_output(out)}")
    if not target.mutable:
        raise TypeError(
            f"out is an array of {target.name}, which cannot be modified in place. Omit out, and use the"
            " result. To set a variable, pass a copy to its assign method:"
            f' variable.assign(convert_memory(x, "{target.name}", copy=True)).'
        )
    return target


def _advice_for_output(out: Any) -> str:
    """Return what to pass instead of an object that is not an array of a framework."""
    carrier = carrier_of(out)
    if carrier is None:
        return "Pass a NumPy, PyTorch, CuPy or pyclesperanto array."
    if carrier.expression and not carrier.expression.endswith("[...]"):  # which reads a file into new memory
        return (
            f"Pass the array that it wraps if that array is writable: {carrier.expression.format(x='out')}."
        )
    return 'Assign the values instead: out[...] = convert_memory(x, "numpy").'


def _check_output(target: Framework, out: Any) -> None:
    """Raise if ``out`` cannot be written to.

    Raises:
        TypeError: If ``out`` is not a dense array of numbers.
        ValueError: If ``out`` is read-only or has repeated elements.
        GradientError: If ``out`` requires grad while gradients are recorded.
    """
    try:
        target.check(out)
    except MemoryConversionError as error:
        raise TypeError(
            f"Values cannot be written to out, because {error.reason}. Pass a dense array of numbers."
        ) from error
    if target.autodiff.is_tracked(out):
        raise GradientError(
            "out requires grad, and writing to it would change its graph.",
            target_type=target.name,
            reason="out requires grad",
            advice="Pass out.detach(), which shares its memory, or call inside torch.no_grad().",
        )
    if target.respects_read_only and not target.host_view(out).flags.writeable:
        raise ValueError("out is read-only. Pass a writable array.")
    strides = target.interchange.strides(out)
    if buffers.has_repeated_elements(target.shape(out), strides, _itemsize(target, out)):
        raise ValueError("out has elements that share memory, such as a broadcast array. Pass a copy.")


def _itemsize(framework: Framework, x: Any) -> int:
    """Return the size of an element in bytes; 1 for an array without elements."""
    size = math.prod(framework.shape(x))
    return framework.nbytes(x) // size if size else 1


def _is_contiguous(framework: Framework, x: Any) -> bool:
    """Return whether an array is C-contiguous."""
    return is_c_contiguous(framework.shape(x), framework.interchange.strides(x), _itemsize(framework, x))


def _check_named_options(target: Framework, request: Request) -> None:
    """Raise `ValueError` if an option contradicts ``out``."""
    out = request.out
    owner = framework_of_output(out)
    if owner is not target:
        raise ValueError(
            f"out is an array of {owner.name}, but the target is {target.name}. Omit the target."
        )
    if request.copy is False:
        raise ValueError("copy=False contradicts out=, which copies. Omit copy.")
    named = resolve_device(target, request.gpu_id, request.device)
    device = target.devices.device_of(out)
    if named is not None and named != device:
        raise ValueError(f"out is on {device}, but the call names {named}. Omit the device.")
    if request.dtype is not None and dtype_name(request.dtype) != target.dtype_name(out):
        raise ValueError(
            f"out has dtype {target.dtype_name(out)}, but dtype={request.dtype!r} was passed. Omit dtype, or"
            f" pass dtype={target.dtype_name(out)!r} to cast the values."
        )


# -- the decision ------------------------------------------------------------------------------------


def decide_output(data: Any, request: Request) -> Decision:
    """Return the decision on how to write ``data`` to ``request.out``.

    Raises:
        MemoryConversionError: If the values cannot be written exactly; one of its subclasses.
        TypeError: If ``out`` is not an array of a framework with mutable arrays.
        ValueError: If ``out`` is read-only, or an option contradicts it.
    """
    request = check_options(request)
    target = registry.framework(request.target)
    _check_named_options(target, request)
    _check_output(target, request.out)
    source, array = find_requested_source(data, request, target)
    try:
        if source.sparse.layout(array):
            raise _mismatch_error(f"a sparse {source.name} array", "not sparse")
        source_device = source.devices.device_of(array)
        device = target.devices.device_of(request.out)
        return _Writing(request, source, target, array, source_device, device, cast=None).decide()
    except MemoryConversionError as error:
        error.source_type = error.source_type or source.name
        error.target_type = error.target_type or target.name
        raise


class _Writing(Choice):
    """One array that is written to ``out``, and the methods that choose how."""

    __slots__ = ()

    @property
    def out(self) -> Any:
        """The array to which the values are written."""
        return self.request.out

    def decide(self) -> Decision:
        """Return the decision."""
        data = self.array
        self.inspect()
        with self.source.runtime.isolate(), self.target.runtime.isolate():
            return self._decide_for(data)

    def _decide_for(self, data: Any) -> Decision:
        """Return the decision. ``data`` is the array before `Choice.inspect`, which may replace it."""
        if self.source.autodiff.requires_grad(self.array):
            self.detach()
        self._compare()
        out = self.out
        write, copies = (_skip, 0) if data is out else self._choose()
        method: Method = "host" if self.device.kind == "cpu" else "device"
        route = Route(
            self.source.name,
            self.target.name,
            method if copies else "same",
            self.device,
            shares_memory=not copies,
            copies=copies,
            nbytes=self.nbytes,
            cause=_INTO_OUTPUT if copies else SAME_OBJECT,
        )
        if self.prepare is not identity:
            write = _prepare_first(self.prepare, write)

        def run(x: Any) -> Any:
            # Even within one framework, no mode or transform applies, because ``out`` outlives them.
            with self.source.runtime.isolate(), self.target.runtime.isolate():
                write(x, out)
            return out

        return Decision(route, self.source, self.target, data, run, write=write)

    def _compare(self) -> None:
        """Raise if the shape of the array, or its dtype without a cast, differs from that of ``out``."""
        source = self.source
        target = self.target
        array = self.array
        shape = source.shape(array)
        expected = target.shape(self.out)
        if shape != expected:
            raise _mismatch_error(f"an array of shape {shape}", f"an array of shape {expected}")
        dtype = source.dtype_name(array)
        new = target.dtype_name(self.out)
        if dtype == new:
            return
        if self.request.dtype is None:
            advice = f"Pass dtype={new!r} to cast the values."
            raise _mismatch_error(f"a {dtype} array", f"of dtype {new}", advice)
        if not self._casts_on_host(dtype):
            target.interchange.check_cast(dtype, new)
        self.cast = new

    def _choose(self) -> tuple[Write, int]:
        """Return the function that writes the values, and how often it copies them."""
        target = self.target
        if self.cast is not None and self._casts_on_host(self.source.dtype_name(self.array)):
            return self._make_cast_by_numpy(self.cast)
        if self._prefers_numpy():
            return self._make_copy_by_numpy()
        if self.source is target:
            return self._write_result(identity), self._count_device_copies()
        if self._is_readable():
            return self._from_host_memory()
        if self.device.kind == "cpu":
            return self._into_host_memory()
        if self.source_device == self.device and shares_gpus(self.source, target):
            return self._between_frameworks()
        return self._write_through_host()

    def _prefers_numpy(self) -> bool:
        """Return whether NumPy copies the values, because the target would not be faster or cannot view them.

        PyTorch copies strided memory faster. It does not copy contiguous memory faster, and waits for all
        OpenMP threads (2.13), which other work may delay.
        """
        target = self.target
        if self.cast is not None or self.device.kind != "cpu" or not self._is_readable():
            return False
        if target.interchange.copy_reason(self.out):
            return False
        memory = self.source.host_view(self.array)
        return bool(memory.flags.c_contiguous or target.cannot_view(memory))

    def _make_copy_by_numpy(self) -> tuple[Write, int]:
        """Return the function that writes values that NumPy copies from host memory to host memory."""
        view = self.source.host_view
        fill = self.target.interchange.fill

        def write(x: Any, out: Any) -> None:
            fill(out, partial(buffers.copy_into, view=view(x)))

        return write, 1

    def _count_device_copies(self) -> int:
        """Return the number of copies within one framework.

        It is 1 on one device. Between devices it is 1 for contiguous arrays of one dtype, if one is on the
        CPU or the devices can copy to each other, and otherwise 2.
        """
        if self.source_device == self.device:
            return 1
        is_plain = self.cast is None and _is_contiguous(self.target, self.out)
        is_plain = is_plain and _is_contiguous(self.source, self.array)
        is_peer = self.source.interchange.dlpack_device is not None or "cpu" in (
            self.source_device.kind,
            self.device.kind,
        )
        return 1 if is_plain and is_peer else 2

    def _is_readable(self) -> bool:
        """Return whether the values can be read in place from host memory."""
        return self.source_device.kind == "cpu" and not self.copy_reason

    def _make_cast_by_numpy(self, dtype: str) -> tuple[Write, int]:
        """Return the function that writes values that NumPy casts first."""
        registry.framework("numpy").interchange.check_cast(self.source.dtype_name(self.array), dtype)
        read = self.source.host_view if self._is_readable() else self.source.to_host
        copies = 2 if self._is_readable() else 3

        def read_and_cast(x: Any) -> Any:
            return buffers.cast(read(x), dtype)

        return self._write_result(read_and_cast), copies

    def _from_host_memory(self) -> tuple[Write, int]:
        """Return the function that writes values from host memory, which the target reads."""
        target = self.target
        view = self.source.host_view
        memory = view(self.array)
        is_direct = target.devices.has_only_host or not target.cannot_view(memory)
        if self.device.kind != "cpu":
            # Transfers need contiguous memory on both sides.
            is_direct = self.cast is None and memory.flags.c_contiguous and _is_contiguous(target, self.out)
        return self._write_result(view), 1 if is_direct else 2

    def _into_host_memory(self) -> tuple[Write, int]:
        """Return the function by which the source writes to host memory, and the number of copies."""
        target = self.target
        interchange = self.source.interchange
        is_plain = self.cast is None and not target.interchange.copy_reason(self.out)
        array = self.array
        if not is_plain or not interchange.can_read_into(array, target.host_view(self.out)):
            return self._write_through_host()

        def write(x: Any, out: Any) -> None:
            target.interchange.fill(out, partial(interchange.read_into, x))

        return write, 1

    def _between_frameworks(self) -> tuple[Write, int]:
        """Return the function that writes an array on the same GPU, whose memory the target imports."""
        source = self.source
        target = self.target
        device = self.source_device
        array = self.array
        strides = source.interchange.strides(array)
        cannot = target.interchange.cannot_stride(source.shape(array), strides, _itemsize(source, array))
        if self.copy_reason or cannot:
            return self._write_through_host()

        def import_array(x: Any) -> Any:
            return target.interchange.import_from(x, source, device)

        return self._write_result(import_array), 1

    def _write_through_host(self) -> tuple[Write, int]:
        """Return the function that writes values through a copy in host memory."""
        return self._write_result(self.source.to_host), 2

    def _write_result(self, read: Callable[[Any], Any]) -> Write:
        """Return a function that writes what ``read`` returns for an array."""
        target = self.target

        def write(x: Any, out: Any) -> None:
            target.write(out, read(x))

        return write


def _prepare_first(prepare: Callable[[Any], Any], write: Write) -> Write:
    """Return a function that prepares an array, such as by detaching it, and then writes it."""

    def prepare_and_write(x: Any, out: Any) -> None:
        write(prepare(x), out)

    return prepare_and_write


def _skip(x: Any, out: Any) -> None:
    """Do nothing, because the array is ``out`` itself."""


def _mismatch_error(array: str, expected: str, advice: str = "") -> ArrayNotSupportedError:
    """Return the error for an array that differs from ``out`` in layout, shape or dtype."""
    return ArrayNotSupportedError(
        f"Cannot write {array} to out, which is {expected}.",
        reason=f"out is {expected}",
        advice=advice or "Pass an array like out, or omit out.",
    )


def memory_range(x: Any) -> tuple[int, int]:
    """Return the address of the first byte of an array, and the address after its last byte.

    Both are 0 for an array without elements or without memory, such as a file.
    """
    framework, array = source_of(x)
    shape = framework.shape(array)
    start = framework.interchange.address(array)
    if 0 in shape or (not start and framework.interchange.copy_reason(array)):
        return 0, 0
    strides = framework.interchange.strides(array)
    if not start:
        view = framework.host_view(array)
        start = buffers.address(view)
        strides = view.strides
    steps = [stride * (extent - 1) for stride, extent in zip(strides, shape, strict=True)]
    first = start + sum(step for step in steps if step < 0)
    return first, start + sum(step for step in steps if step > 0) + _itemsize(framework, array)


# -- plans -------------------------------------------------------------------------------------------


class OutputPlan:
    """Functions that write host arrays to host arrays, for one call signature and one class of arrays.

    Plan keys include dtype, strides (or the rank of contiguous arrays), writability and whether an array
    requires grad. The classes are part of the call signature and of the table.

    Attributes:
        key: Returns the plan key of an array, see `FastPath.plan_key`.
        key_of_output: Returns the plan key of ``out``.
        alignment: The alignment that the target requires, for `key`.
        errors: The exceptions that the two frameworks raise for arrays that they do not support.
        copy_plain: Copies most arrays without computing their plan keys; None for casts, and for frameworks
            without a fast view.
        shape: Returns the shape of an array.
        writes: The functions that write, by both plan keys.
    """

    __slots__ = ("alignment", "copy_plain", "errors", "key", "key_of_output", "shape", "writes")

    def __init__(self, source: Framework, target: Framework, *, casts: bool) -> None:
        self.copy_plain = None if casts else _copy_plain(source, target)
        self.key = source.fast_path.plan_key
        self.key_of_output = target.fast_path.plan_key
        self.alignment = target.alignment
        self.errors = native_errors(source, target)
        self.shape = source.shape
        self.writes: dict[Hashable, Write] = {}

    def __call__(self, x: Any, out: Any) -> Any:
        """Write an array to ``out`` and return ``out``; raise `NoPlanError` if anything must be decided."""
        if self.copy_plain is not None:
            try:
                return self.copy_plain(x, out)
            except NoPlanError:
                pass
        write = self.writes.get((self.key(x, self.alignment), self.key_of_output(out, 1)))
        if write is None or self.shape(x) != out.shape or x is out:
            raise NoPlanError
        run(write, self.errors, x, out)
        return out

    def add(self, x: Any, out: Any, write: Write) -> None:
        """Add the function that writes arrays like ``x`` to arrays like ``out``."""
        keys = self.key(x, self.alignment), self.key_of_output(out, 1)
        remember(self.writes, keys, write, MOST_PLAN_KEYS)


def _copy_plain(source: Framework, target: Framework) -> Callable[[Any, Any], Any] | None:
    """Return a function that copies host arrays to C-contiguous arrays of the same shape and dtype, or None.

    It views both arrays by NumPy, which takes less time than to determine their plan keys.
    """
    view: Any = source.fast_path.fast_view
    view_output: Any = target.fast_path.fast_view
    if view is None or view_output is None:
        return None
    record_write = target.interchange.record_write

    def copy(x: Any, out: Any) -> Any:
        values = view(x)
        memory = view_output(out)
        is_plain = memory.flags.carray and x is not out  # C-contiguous, aligned and writable
        dtype = values.dtype
        if not is_plain or dtype != memory.dtype or values.shape != memory.shape or dtype.kind not in "fiubc":
            raise NoPlanError
        buffers.copy_into(memory, values)
        record_write(out)
        return out

    return copy


def store_output_plan(signature: Hashable, data: Any, request: Request, decision: Decision) -> None:
    """Cache how arrays like ``data`` are written to arrays like ``request.out``, if both have plan keys."""
    out = request.out
    source = decision.source
    target = decision.target
    if decision.write is None or data is not decision.data or data is out or request.device is not None:
        return
    if source.fast_path.plan_key is None or target.fast_path.plan_key is None:
        return
    if type(data) not in source.fast_path.fast_types() or type(out) not in target.fast_path.fast_types():
        return
    if target.autodiff.requires_grad(out):  # whether it may be written to depends on the current grad mode
        return
    plan: Any = plans_by_signature.get(signature, {}).get(type(data))
    plan = plan or OutputPlan(source, target, casts=request.dtype is not None)
    with suppress(NoPlanError):  # an array that is not in host memory has no plan key
        plan.add(data, out, decision.write)
        add_plan(signature, type(data), plan)
