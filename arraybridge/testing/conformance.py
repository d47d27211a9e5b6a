"""Conformance tests for authors of framework plug-ins.

For each guarantee of the library, a function checks one case, and raises an error if the guarantee is broken.
The decorator of the function lists the cases. Expected values come from NumPy.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from arraybridge.conversion.convert import convert_memory, explain
from arraybridge.device import Device
from arraybridge.errors import CopyRequiredError, DtypeNotSupportedError, MemoryConversionError, first_line
from arraybridge.formatting import Contents, Table
from arraybridge.host import buffers, dtype_names
from arraybridge.interface import registry
from arraybridge.interface.framework import Framework
from arraybridge.interface.streams import identity
from arraybridge.memory.oom_recovery import split_and_retry
from arraybridge.route import Route
from arraybridge.testing.simulated_oom import inject_oom
from arraybridge.tracing.trace_log import trace
from arraybridge.types import FrameworkLike


class FrameworkCheckError(AssertionError):
    """A framework breaks a promise of the library. The message describes one failure, or is the report."""


class Verdict(NamedTuple):
    """The result of checking one promise; see `check_framework`.

    Attributes:
        promise: The name of the promise, which ``only=`` accepts.
        cases: The number of cases that were checked.
        failures: The description of each failed case.
    """

    promise: str
    cases: int
    failures: list[str]


@dataclass(frozen=True)
class Report(Table):
    """The result of `check_framework`. It prints as a table, and is true if every promise is kept.

    Attributes:
        framework: The name of the framework.
        verdicts: One `Verdict` per promise.
    """

    framework: str
    verdicts: list[Verdict]

    @property
    def broken(self) -> list[str]:
        """The names of the broken promises."""
        return [verdict.promise for verdict in self.verdicts if verdict.failures]

    @property
    def ok(self) -> bool:
        """Whether every promise is kept."""
        return not self.broken

    def __bool__(self) -> bool:
        return self.ok

    def raise_if_broken(self) -> None:
        """Raise an error if a promise is broken, for use in a test.

        Raises:
            FrameworkCheckError: If a promise is broken. Its message is the report as a table.

        Example:
            >>> check_framework("numpy", only="dtypes").raise_if_broken()
        """
        if not self.ok:
            raise FrameworkCheckError(f"\n{self}")

    def _table(self) -> Contents:
        head = ("promise", "cases", "failed", "first failure")
        rows = [
            (v.promise, str(v.cases), str(len(v.failures)), "".join(v.failures[:1])) for v in self.verdicts
        ]
        cases = sum(verdict.cases for verdict in self.verdicts)
        kept = len(self.verdicts) - len(self.broken)
        line = f"{self.framework}: {kept} of {len(self.verdicts)} promises kept, {cases} cases"
        return head, rows, head[1:3], line


def check_framework(
    framework: FrameworkLike | Framework,
    make: Callable[[np.ndarray], Any] | None = None,
    *,
    only: str | Iterable[str] | None = None,
) -> Report:
    """Check every promise of the library for one framework, and describe each failure.

    A promise is a guarantee about conversions, such as exact values, complete copies or shared memory as
    `explain` predicts it. The suite queries the dtypes, ranks, devices and alignment that the framework
    claims to support, and checks these claims.

    Args:
        framework: The name of the framework, or an instance. An instance is registered while the suite runs.
        make: A function that creates an array of the framework from a C-contiguous NumPy array, with the
            framework's own calls. Defaults to the framework's ``from_host``.
        only: The name or names of the promises to check. Defaults to None: all promises.

    Returns:
        A `Report`. In a test, call ``check_framework("mine").raise_if_broken()``.

    Raises:
        FrameworkNotInstalledError: If the framework is not installed.
        ValueError: If ``only`` contains an unknown name.
        TypeError: If ``framework`` or ``only`` is of the wrong type.

    Example:
        >>> check_framework("numpy", only="dtypes").ok
        True
    """
    names = _choose_promises(only)
    if not isinstance(framework, (str, Framework)):
        raise TypeError(
            f"check_framework() expected the name of a framework or an instance, got {framework!r}. Pass a"
            " string such as 'numpy', or an instance, as in check_framework(MyFramework())."
        )
    one = registry.framework(framework) if isinstance(framework, str) else framework
    before = registry.instances().get(one.name)
    if before is not one:
        registry.register(one, replace=True)
    try:
        subject = Subject(one, make)
        verdicts = [_judge(name, subject) for name in names]
    finally:
        if before is None:
            registry.unregister(one.name)
        elif before is not one:
            registry.register(before, replace=True)
    return Report(one.name, verdicts)


def _choose_promises(only: str | Iterable[str] | None) -> list[str]:
    if only is None:
        return list(PROMISES)
    if not isinstance(only, Iterable):
        raise TypeError(
            f"only={only!r} must be the name of a promise or a list of names, such as only='dtypes'."
        )
    names = [only] if isinstance(only, str) else list(only)
    if unknown := [name for name in names if name not in PROMISES]:
        raise ValueError(
            f"only={only!r} contains {', '.join(map(repr, unknown))}, which is not a promise. Pass any of"
            f" {', '.join(map(repr, PROMISES))}."
        )
    return names


def _judge(name: str, subject: Subject) -> Verdict:
    check, each = PROMISES[name]
    failures: list[str] = []
    values: list[Any] = [value(subject) if callable(value) else value for value in each.values()]
    cases = [dict(zip(each, case, strict=True)) for case in product(*values)]
    for case in cases:
        try:
            check(subject, **case)
        except Exception as error:  # noqa: BLE001  # a plug-in may raise any error, and each is a failure
            failure = first_line(str(error))
            if not isinstance(error, FrameworkCheckError):
                failure = f"it raises {type(error).__name__}: {failure}"
            text = ", ".join(f"{key}={' '.join(str(value).split())}" for key, value in case.items())
            failures.append(f"{text}: {failure}" if text else failure)
    return Verdict(name, len(cases), failures)


# -- sample arrays ------------------------------------------------------------------------------------

#: The names of the dtypes that conversions support.
DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
    *("bfloat16", "float8_e4m3fn", "float8_e5m2"),
)
LAYOUTS = (
    *("aligned", "offset", "unaligned", "fortran", "strided", "negative", "broadcast"),
    *("read-only", "big-endian"),
)


def sample(dtype: str = "float32", layout: str = "aligned", shape: tuple[int, ...] = (4, 6)) -> np.ndarray:
    """Return a NumPy array that contains the extreme values of its dtype, the same on each call.

    Args:
        dtype: One of `DTYPES`.
        layout: ``"aligned"``: C-contiguous, at a multiple of 64 bytes; ``"offset"``: one element after such
            an address; ``"unaligned"``: one byte after it; ``"fortran"``; ``"strided"``: every second
            element; ``"negative"``: the last axis reversed; ``"broadcast"``: a repeated row;
            ``"read-only"``; ``"big-endian"``.
        shape: The shape.

    >>> sample("uint8", shape=(3,)).tolist()
    [0, 255, 1]
    """
    values = np.resize(_values(dtype_names.np_dtype(dtype)), shape)
    match layout:
        case "aligned" | "offset" | "unaligned" | "read-only":
            values = copy_at_offset(values, {"offset": values.itemsize, "unaligned": 1}.get(layout, 0))
            values.flags.writeable = layout != "read-only"
        case "fortran":
            values = np.asfortranarray(values)
        case "strided":
            values = np.repeat(values, 2, axis=-1)[..., ::2]
        case "negative":
            values = np.ascontiguousarray(values[..., ::-1])[..., ::-1]
        case "broadcast":
            values = np.broadcast_to(values[:1], shape)
        case "big-endian" if values.itemsize > 1:
            values = values.astype(values.dtype.newbyteorder(">"))
    return values


def _values(dtype: np.dtype[Any]) -> np.ndarray:
    if dtype.kind == "b":
        return np.array([True, False, True])
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return np.array([limits.min, limits.max, 1, 0, 7, 100], dtype)
    numbers = [0.0, -0.0, 1.5, -2.0, np.inf, -np.inf, np.nan, 6e-5, 0.1]
    if dtype.name == "float8_e4m3fn":  # this dtype has no infinity
        numbers = [0.0, -0.0, 1.5, -2.0, 448.0, 0.0625, np.nan]
    if dtype.kind == "c":
        return np.array([complex(a, b) for a, b in zip(numbers, reversed(numbers), strict=True)], dtype)
    with np.errstate(all="ignore"):
        real = np.array(numbers, np.float64).astype(dtype)
    if dtype.name in ("float32", "float64"):
        real[-1] = np.finfo(dtype).tiny
        real[-2] = np.finfo(dtype).max
    return real


def copy_at_offset(values: np.ndarray, offset: int) -> np.ndarray:
    """Return a C-contiguous copy at an address ``offset`` bytes after a multiple of 64."""
    memory = buffers.allocate_aligned((values.nbytes + 64,), np.dtype(np.uint8))
    result = memory[offset : offset + values.nbytes].view(values.dtype).reshape(values.shape)
    result[...] = values
    return result


class Subject:
    """The framework under test, with functions that create and read its arrays."""

    def __init__(self, framework: Framework, make: Callable[[np.ndarray], Any] | None) -> None:
        self.framework = framework
        self.name = framework.name
        self._make = make
        claimed = [name for name in DTYPES if framework.dtypes is None or name in framework.dtypes]
        self.dtypes = [name for name in claimed if _is_available(name)]
        self.devices = framework.devices.available()
        #: The dtype of checks that are not about dtypes.
        self.dtype = next((d for d in ("float32", "int32", "uint8") if d in self.dtypes), self.dtypes[0])

    def shape(self, *preferred: int) -> tuple[int, ...]:
        """Return the preferred shape, or one of the same size that the framework supports."""
        size = int(np.prod(preferred))
        for shape in (preferred, (size,), (1, size)):
            try:
                self.framework.supports(self.dtype, shape)
            except MemoryConversionError:
                continue
            return shape
        return preferred

    def sample(self, **case: Any) -> np.ndarray:
        """Return a test array. Keyword arguments may set its dtype, layout and shape."""
        return sample(**{"dtype": self.dtype, "shape": self.shape(4, 6), **case})

    def make(self, values: np.ndarray) -> Any:
        """Return an array of the framework with these values, created without a conversion."""
        if self._make is not None:
            return self._make(values)
        return self.framework.from_host(buffers.copy_aligned(values), self.framework.devices.default_device())

    def to(self, values: Any, **options: Any) -> Any:
        """Convert an array to the framework."""
        return convert_memory(values, self.name, **options)

    def read(self, x: Any) -> np.ndarray:
        """Return the values of an array, in memory that no other array uses."""
        values: np.ndarray = convert_memory(x, "numpy", copy=True, grad="detach")
        return values.copy()  # a broken framework may share the memory of its copies

    def view(self, x: Any) -> np.ndarray | None:
        """Return the host memory of an array; None if the framework does not expose it."""
        if self.framework.devices.device_of(x).kind != "cpu":
            return None
        try:
            return self.framework.host_view(x)
        except NotImplementedError:
            return None

    def shares(self, x: Any, other: Any) -> bool:
        """Return whether a write to one array is known to change the other."""
        memory = self.view(x)
        others = self.view(other)
        if memory is None or others is None:
            return self.framework.interchange.address(x) == self.framework.interchange.address(other) != 0
        if np.shares_memory(memory, others):
            return True
        if not memory.size or not memory.flags.writeable:
            return False
        before = self.read(other)
        original = memory.copy()
        memory.reshape(-1).view(np.uint8)[...] ^= 1
        changed = _bits(self.read(other)) != _bits(before)
        memory[...] = original
        return changed


# -- helpers of the checks ----------------------------------------------------------------------------

#: Name of a promise → the check, and the values of each argument of the check.
PROMISES: dict[str, tuple[Callable[..., None], dict[str, Any]]] = {}


def _promise(**each: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that registers a check as a promise, with the values of each of its arguments."""

    def register_check(check: Callable[..., None]) -> Callable[..., None]:
        PROMISES[check.__name__] = check, each
        return check

    return register_check


def _is_available(dtype: str) -> bool:
    try:
        dtype_names.np_dtype(dtype)
    except DtypeNotSupportedError:  # ml_dtypes is missing
        return False
    return True


def _check(condition: object, otherwise: str) -> None:
    # This is not an `assert` statement, because `python -O` removes those.
    if not condition:
        raise FrameworkCheckError(otherwise)


def _bits(x: np.ndarray) -> bytes:
    return x.astype(x.dtype.newbyteorder("="), copy=False).tobytes()


def _same(result: np.ndarray, expected: np.ndarray) -> None:
    dtype = result.dtype.name
    original = expected.dtype.name
    _check(dtype == original, f"the dtype is {dtype} instead of {original}")
    _check(result.shape == expected.shape, f"the shape is {result.shape} instead of {expected.shape}")
    actual = result.reshape(-1)[:4]
    correct = expected.reshape(-1)[:4]
    _check(
        _bits(result) == _bits(expected), f"the values differ; the first are {actual} instead of {correct}"
    )


def _arrives(s: Subject, **case: Any) -> None:
    values = s.sample(**case)
    expected = np.array(values)
    _same(s.read(s.to(values)), expected)


def _check_rejected(s: Subject, values: Any, **options: Any) -> None:
    try:
        s.to(values, **options)
    except MemoryConversionError as error:
        _names_a_fix(error)
        return
    raise FrameworkCheckError("the conversion succeeds, but the framework cannot represent the array")


def _names_a_fix(error: MemoryConversionError) -> None:
    _check(len(str(error)) >= 20, f"the error message is too short: {error}")


def _overwrite_freed_memory(s: Subject, like: np.ndarray) -> None:
    gc.collect()
    zeros = [np.zeros_like(like) for _ in range(28)]
    zeros[:8] = [s.make(x) for x in zeros[:8]]


# -- the promises --------------------------------------------------------------------------------------


@_promise(dtype=attrgetter("dtypes"))
def dtypes(s: Subject, dtype: str) -> None:
    """Check that every claimed dtype is converted to the framework and back, bit for bit."""
    _arrives(s, dtype=dtype)


@_promise(dtype=attrgetter("dtypes"))
def names(s: Subject, dtype: str) -> None:
    """Check that the dtype name equals NumPy's, and that the shape and the number of bytes are correct."""
    x = s.make(s.sample(dtype=dtype))
    values = s.framework.to_host(x)
    name = s.framework.dtype_name(x)
    memory_dtype = values.dtype.name
    _check(name == memory_dtype, f"dtype_name() returns {name}, but its memory holds {memory_dtype}")
    _check(s.framework.shape(x) == values.shape, "shape() is not the shape of the values")
    _check(s.framework.nbytes(x) == values.nbytes, "nbytes() is not the size of the values")


@_promise(layout=LAYOUTS, dtype=attrgetter("dtypes"))
def layouts(s: Subject, layout: str, dtype: str) -> None:
    """Check that arrays of every layout are converted with the correct values."""
    _arrives(s, layout=layout, dtype=dtype)


_RANKS = [(1,) * rank for rank in (1, 2, 3, 4, 5, 8, 9, 10, 32, 33, 64) if rank <= buffers.MAX_RANK]


@_promise(shape=[(), (0,), (0, 3), (3, 0, 2), (1, 5), (2, 3, 4), *_RANKS])
def shapes(s: Subject, shape: tuple[int, ...]) -> None:
    """Check that empty arrays and arrays of every rank are converted, or raise a typed error."""
    try:
        _arrives(s, shape=shape)
    except MemoryConversionError as error:
        _names_a_fix(error)


@_promise()
def read_only(s: Subject) -> None:
    """Check that read-only and immutable memory is never shared as writable."""
    own = s.framework
    if own.has_host and not own.mutable:
        x = s.make(s.sample())
        writable = explain(x, "numpy").shares_memory and convert_memory(x, "numpy").flags.writeable
        _check(not writable, "the NumPy view of an immutable array is writable")
    if own.mutable and not own.respects_read_only:
        shared = explain(s.sample(layout="read-only"), s.name).shares_memory
        _check(not shared, "read-only memory is shared with a writable array")


@_promise(size=[16, 1 << 18])
def lifetime(s: Subject, size: int) -> None:
    """Check that a result keeps its values after its source is deleted."""
    expected = s.sample(shape=s.shape(size))
    source = expected.copy()
    x = s.to(source)
    del source
    _overwrite_freed_memory(s, expected)
    _same(s.read(x), expected)
    x = s.make(expected.copy())
    values = convert_memory(x, "numpy")
    del x
    _overwrite_freed_memory(s, expected)
    _same(values, expected)


@_promise(layout=["aligned", "fortran", "strided", "offset", "negative"])
def copies(s: Subject, layout: str) -> None:
    """Check that ``copy=True`` copies completely, and ``copy=False`` shares memory or raises an error."""
    source = s.sample(layout=layout)
    expected = s.sample(layout=layout)
    route = None
    x = s.to(source, copy=True)
    source[...] = 0
    _same(s.read(x), expected)
    _check(s.to(x) is x, "a conversion within the framework returns another object")
    other = s.to(x, copy=True)
    _check(other is not x, "copy=True returns its argument")
    _same(s.read(other), expected)
    _own_copies(s, x)
    try:
        route = explain(source, s.name, copy=False)
        s.to(source, copy=False)
    except CopyRequiredError as error:
        _check(route is None, "explain() predicts that copy=False shares memory, but the conversion raises")
        _names_a_fix(error)
        return
    _check(route.shares_memory, "copy=False succeeds, but explain() predicts that no memory is shared")


def _own_copies(s: Subject, x: Any) -> None:
    """Check that the copying functions of the framework return separate memory."""
    own = s.framework
    expected = s.read(x)
    _check(not s.shares(x, own.copy(x)), "copy() shares memory with its argument")
    first = own.to_host(x)
    second = own.to_host(x)
    memory = s.view(x)
    shown = memory is not None and np.shares_memory(first, memory)
    _check(not shown, "to_host() shares memory with its argument")
    _check(not np.shares_memory(first, second), "to_host() returns the same memory twice")
    if first.flags.writeable:
        first[...] = 0
        _check(_bits(s.read(x)) == _bits(expected), "a write to the result of to_host() changes its argument")
        _same(second, expected)
    empties = [own.batching.empty(own.shape(x), s.dtype, own.devices.device_of(x)) for _ in range(2)]
    _check(not s.shares(*empties), "empty() returns the same memory twice")


@_promise(layout=LAYOUTS)
def sharing(s: Subject, layout: str) -> None:
    """Check that memory is shared as `explain` predicts, and that `trace` records the same route."""

    def compare(route: Route, values: np.ndarray, x: Any) -> None:
        """Check that a write to ``values`` changes ``x`` as predicted."""
        if values.flags.writeable:
            before = s.read(x)
            values[...] = 0
            changed = _bits(s.read(x)) != _bits(before)
            effect = "changes" if changed else "does not change"
            failure = f"explain() predicts {route}, but a write to one array {effect} the other"
            _check(changed == route.shares_memory, failure)

    source = s.sample(layout=layout)
    route = explain(source, s.name)
    with trace() as log:
        x = s.to(source)
    _check(log.records == [route], f"explain() predicts {route}, but trace() records {log.records}")
    compare(route, source, x)
    x = s.make(s.sample())
    compare(explain(x, "numpy"), convert_memory(x, "numpy"), x)


def _real_dtypes(s: Subject) -> list[str]:
    return [dtype for dtype in s.dtypes if not dtype.startswith("complex")]


@_promise(dtype=_real_dtypes)
def casts(s: Subject, dtype: str) -> None:
    """Check that ``dtype=`` casts as NumPy does, and that the result has separate memory."""
    values = np.array([0, 1, 2, 3], "float64").reshape(s.shape(4))
    _same(s.read(s.to(values, dtype=dtype)), values.astype(dtype_names.np_dtype(dtype)))
    if dtype != s.dtype:
        x = s.make(values.astype(dtype_names.np_dtype(s.dtype)))
        cast = s.to(x, dtype=dtype)
        _same(s.read(cast), values.astype(dtype_names.np_dtype(dtype)))
        _check(not s.shares(x, cast), "cast() shares memory with its argument")


#: Objects that no framework except NumPy can represent.
_UNUSUAL_VALUES: list[Any] = [
    np.array([object()]),
    np.array(["a"]),
    np.array(["2020"], "M8[Y]"),
    np.ma.masked_array([1, 2], [True, False]),
    np.zeros(2, [("a", "i4")]),
    [1, 2],
]


def _list_unsupported(s: Subject) -> list[Any]:
    dtypes = [dtype for dtype in DTYPES if dtype not in s.dtypes and _is_available(dtype)]
    unusual = [] if s.framework.owns(_UNUSUAL_VALUES[0]) else _UNUSUAL_VALUES
    return [s.sample(dtype=dtype) for dtype in dtypes] + unusual


@_promise(value=_list_unsupported)
def refusals(s: Subject, value: Any) -> None:
    """Check that unsupported arrays raise a typed error with advice."""
    _check_rejected(s, value)


@_promise(device=attrgetter("devices"))
def devices(s: Subject, device: Device) -> None:
    """Check that results are on the requested device, and that a missing device raises a typed error."""
    own = s.framework.devices.device_of(s.make(s.sample()))
    _check(own in s.devices, f"an array is on {own}, which available() does not list")
    source = s.sample()
    x = s.to(source, device=str(device))
    if device.kind != "cpu":
        source[...] = 0  # a copy is complete when from_host() returns
    _same(s.read(x), s.sample())
    actual = s.framework.devices.device_of(x)
    _check(actual == device, f"the result is on {actual} instead of {device}")
    on_hosts = own.kind == device.kind == "cpu"  # conversions do not use to_device() between CPUs
    if own != device and not on_hosts:
        first = s.make(s.sample())
        moved = s.framework.devices.to_device(first, device)
        _same(s.read(moved), s.sample())
        _check(not s.shares(first, moved), "to_device() shares memory with its argument")
    if not s.framework.devices.has_only_host:
        _check_rejected(s, s.sample(), gpu_id=99)


@_promise(axis=[0, 1])
def splitting(s: Subject, axis: int) -> None:
    """Check that a batch of every dtype is split and joined, bit for bit, when memory runs out."""
    expected = [s.sample(dtype=dtype) for dtype in s.dtypes]
    shape = expected[0].shape
    if axis < len(shape) and shape[axis] > 2:
        arrays = [s.make(values) for values in expected]
        with inject_oom(s.name, above_rows=2):
            joined = split_and_retry(identity, arrays, axis=axis)
        for result, values in zip(joined, expected, strict=True):
            _same(s.read(result), values)
        if s.framework.mutable:
            joined = s.framework.batching.concatenate(arrays[:1], axis)
            _check(not s.shares(arrays[0], joined), "concatenate() returns its argument")
