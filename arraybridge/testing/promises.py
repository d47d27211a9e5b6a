"""The promises of the library, one function each: a check of one case, which raises where it is broken.

The cases stand above each. Expected values come from NumPy. What an array holds is read by a copy that
nothing else refers to.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from arraybridge.conversion.convert import convert_memory, explain
from arraybridge.conversion.explanation import Route
from arraybridge.conversion.trace import trace
from arraybridge.errors import (
    CopyRequiredError,
    DtypeNotSupportedError,
    MemoryConversionError,
)
from arraybridge.frameworks import hostmemory
from arraybridge.frameworks.base import Framework
from arraybridge.memory.recovery import is_oom_error, split_and_retry
from arraybridge.testing.oom import inject_oom
from arraybridge.testing.samples import DTYPES, LAYOUTS, sample


class BrokenPromiseError(AssertionError):
    """A promise is not kept; the message says how."""


class Subject:
    """The framework under trial, and how to make and read its arrays."""

    def __init__(self, framework: Framework, make: Callable[[np.ndarray], Any] | None) -> None:
        self.framework = framework
        self.name = framework.name
        self._make = make
        claimed = [name for name in DTYPES if framework.dtypes is None or name in framework.dtypes]
        self.dtypes = [name for name in claimed if _is_there(name)]
        #: A dtype for everything that is not about dtypes.
        self.dtype = next((d for d in ("float32", "int32", "uint8") if d in self.dtypes), self.dtypes[0])

    def shape(self, *wish: int) -> tuple[int, ...]:
        """That shape, or one of the same size that the framework takes."""
        size = int(np.prod(wish))
        for shape in (wish, (size,), (1, size)):
            try:
                self.framework.supports(self.dtype, shape)
            except MemoryConversionError:
                continue
            return shape
        return wish

    def sample(self, **case: Any) -> np.ndarray:
        """The array of a case, which may name its dtype, layout and shape."""
        values: np.ndarray = sample(**{"dtype": self.dtype, "shape": self.shape(4, 6), **case})
        return values

    def make(self, values: np.ndarray) -> Any:
        if self._make is not None:
            return self._make(values)
        return self.framework.from_host(hostmemory.fresh(values), self.framework.default_device())

    def to(self, values: Any, **options: Any) -> Any:
        return convert_memory(values, self.name, **options)

    def read(self, x: Any) -> np.ndarray:
        values: np.ndarray = convert_memory(x, "numpy", copy=True, grad="detach")
        return values


class Promise(NamedTuple):
    """A promise: its check, and what each argument of the check may be."""

    check: Callable[..., None]
    each: dict[str, Any]

    def cases(self, subject: Subject) -> Iterator[dict[str, Any]]:
        values: list[Any] = [value(subject) if callable(value) else value for value in self.each.values()]
        return (dict(zip(self.each, case, strict=True)) for case in product(*values))


#: Name → promise.
PROMISES: dict[str, Promise] = {}


def _promise(**each: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def keep(check: Callable[..., None]) -> Callable[..., None]:
        PROMISES[check.__name__] = Promise(check, each)
        return check

    return keep


# -- what the checks are made of -----------------------------------------------------------------------


def _is_there(dtype: str) -> bool:
    try:
        hostmemory.np_dtype(dtype)
    except DtypeNotSupportedError:  # ml_dtypes is missing
        return False
    return True


def _dtypes(s: Subject) -> list[str]:
    return s.dtypes


def _hold(condition: object, otherwise: str) -> None:
    # No `assert`, which `python -O` would leave out.
    if not condition:
        raise BrokenPromiseError(otherwise)


def _bits(x: np.ndarray) -> bytes:
    return x.astype(x.dtype.newbyteorder("="), copy=False).tobytes()


def _same(result: np.ndarray, expected: np.ndarray) -> None:
    dtype, was = result.dtype.name, expected.dtype.name
    _hold(dtype == was, f"the dtype is {dtype}, and was {was}")
    _hold(result.shape == expected.shape, f"the shape is {result.shape}, and was {expected.shape}")
    first, before = result.reshape(-1)[:4], expected.reshape(-1)[:4]
    _hold(_bits(result) == _bits(expected), f"the values differ: {first} and {before}")


def _arrives(s: Subject, **case: Any) -> None:
    values = s.sample(**case)
    expected = np.array(values)
    _same(s.read(s.to(values)), expected)


def _refused(s: Subject, values: Any, **options: Any) -> None:
    try:
        s.to(values, **options)
    except MemoryConversionError as error:
        _says_what_to_do(error)
        return
    raise BrokenPromiseError("it is taken, and nobody can hold it")


def _says_what_to_do(error: MemoryConversionError) -> None:
    _hold(len(str(error).split()) >= 5, f"the error says too little: {error}")


def _fill_what_was_freed(s: Subject, like: np.ndarray) -> None:
    gc.collect()
    zeros = [s.make(np.zeros_like(like)) for _ in range(8)]
    zeros += [np.zeros_like(like) for _ in range(20)]


# -- the promises --------------------------------------------------------------------------------------


@_promise(dtype=_dtypes)
def dtypes(s: Subject, dtype: str) -> None:
    """Every dtype that it claims arrives there and back, bit for bit."""
    _arrives(s, dtype=dtype)


@_promise(dtype=_dtypes)
def names(s: Subject, dtype: str) -> None:
    """It calls the dtype of an array as NumPy does, and knows its shape and its bytes."""
    x = s.make(s.sample(dtype=dtype))
    values, name = s.framework.to_host(x), s.framework.dtype_name(x)
    _hold(name == values.dtype.name, f"dtype_name() says {name}, and its memory holds {values.dtype.name}")
    _hold(s.framework.shape(x) == values.shape, "shape() is not that of its values")
    _hold(s.framework.nbytes(x) == values.nbytes, "nbytes() is not that of its values")


@_promise(layout=LAYOUTS, dtype=_dtypes)
def layouts(s: Subject, layout: str, dtype: str) -> None:
    """Arrays of every layout arrive with the right values."""
    _arrives(s, layout=layout, dtype=dtype)


_RANKS = [(1,) * rank for rank in (1, 2, 3, 4, 5, 8, 9, 10, 32, 33, 64) if rank <= hostmemory.MAX_RANK]


@_promise(shape=[(), (0,), (0, 3), (3, 0, 2), (1, 5), (2, 3, 4), *_RANKS])
def shapes(s: Subject, shape: tuple[int, ...]) -> None:
    """Empty arrays, 0-d arrays and every rank arrive as they are, or are refused with a typed error."""
    try:
        _arrives(s, shape=shape)
    except MemoryConversionError as error:
        _says_what_to_do(error)


@_promise()
def read_only(s: Subject) -> None:
    """Nobody gets to write what may not be written."""
    own = s.framework
    if own.has_host and not own.mutable:
        x = s.make(s.sample())
        writable = explain(x, "numpy").shares_memory and convert_memory(x, "numpy").flags.writeable
        _hold(not writable, "NumPy's view of an immutable array is writable")
    if own.mutable and not own.honours_readonly:
        lent = explain(s.sample(layout="read-only"), s.name).shares_memory
        _hold(not lent, "read-only memory is lent to arrays that can be written to")


@_promise(shape=lambda s: [s.shape(size) for size in (16, 1 << 18)])
def lifetime(s: Subject, shape: tuple[int, ...]) -> None:
    """Memory outlives its source: delete it, and the result still holds."""
    expected = s.sample(shape=shape)
    source = expected.copy()
    x = s.to(source)
    del source
    _fill_what_was_freed(s, expected)
    _same(s.read(x), expected)
    x = s.make(expected.copy())
    values = convert_memory(x, "numpy")
    del x
    _fill_what_was_freed(s, expected)
    _same(values, expected)


@_promise(layout=["aligned", "fortran", "strided", "offset", "negative"])
def copies(s: Subject, layout: str) -> None:
    """``copy=True`` never shares, ``copy=False`` shares or refuses, and a copy is complete on return."""
    source, expected, route = s.sample(layout=layout), s.sample(layout=layout), None
    x = s.to(source, copy=True)
    source[...] = 0
    _same(s.read(x), expected)
    _hold(s.to(x) is x, "within the framework, the very object has to come back")
    other = s.to(x, copy=True)
    _hold(other is not x, "copy=True gives the very object back")
    _same(s.read(other), expected)
    try:
        route = explain(source, s.name, copy=False)
        s.to(source, copy=False)
    except CopyRequiredError as error:
        _hold(route is None, "explain() foretells that copy=False shares, and the conversion refuses")
        _says_what_to_do(error)
        return
    _hold(route.shares_memory, "copy=False passes, and explain() says that nothing is shared")


@_promise(layout=LAYOUTS)
def sharing(s: Subject, layout: str) -> None:
    """What `explain` says of sharing is what happens, and what `trace` records."""

    def compare(route: Route, values: np.ndarray, x: Any) -> None:
        """Whether a write to ``values`` is seen in ``x`` as foretold."""
        if values.flags.writeable:
            before = s.read(x)
            values[...] = 0
            seen = _bits(s.read(x)) != _bits(before)
            words = f"explain() says {route}, and a write is {'' if seen else 'not '}seen on the other side"
            _hold(seen == route.shares_memory, words)

    source = s.sample(layout=layout)
    route = explain(source, s.name)
    with trace() as log:
        x = s.to(source)
    _hold(log.records == [route], f"explain() foretold {route}, and trace() recorded {log.records}")
    compare(route, source, x)
    x = s.make(s.sample())
    compare(explain(x, "numpy"), convert_memory(x, "numpy"), x)


@_promise(dtype=lambda s: [dtype for dtype in s.dtypes if not dtype.startswith("complex")])
def casts(s: Subject, dtype: str) -> None:
    """``dtype=`` casts, and nothing else does."""
    values = np.array([0, 1, 2, 3], "float64").reshape(s.shape(4))
    _same(s.read(s.to(values, dtype=dtype)), values.astype(hostmemory.np_dtype(dtype)))


#: What no framework but NumPy itself holds.
_STRANGE: list[Any] = [
    np.array([object()]),
    np.array(["a"]),
    np.array(["2020"], "M8[Y]"),
    np.ma.masked_array([1, 2], [True, False]),
    np.zeros(2, [("a", "i4")]),
    [1, 2],
]


def _refusable(s: Subject) -> list[Any]:
    dtypes = [dtype for dtype in DTYPES if dtype not in s.dtypes and _is_there(dtype)]
    return [s.sample(dtype=dtype) for dtype in dtypes] + (_STRANGE if s.name != "numpy" else [])


@_promise(what=_refusable)
def refusals(s: Subject, what: Any) -> None:
    """What it cannot hold is refused with a typed error that says what to do."""
    _refused(s, what)


@_promise(device=lambda s: list(s.framework.devices()))
def devices(s: Subject, device: Any) -> None:
    """Arrays land on the device that is asked for, and one that is not there is refused."""
    own = s.framework.device_of(s.make(s.sample()))
    _hold(own in s.framework.devices(), f"an array is on {own}, which devices() does not list")
    x = s.to(s.sample(), device=str(device))
    _same(s.read(x), s.sample())
    _hold(s.framework.device_of(x) == device, f"it is on {s.framework.device_of(x)}")
    if s.name != "numpy":
        _refused(s, s.sample(), gpu_id=99)


_OTHER_ERRORS = (
    *(ValueError("out of memory budget"), RuntimeError("the shapes differ"), TypeError("memory")),
    *(RuntimeError("CUDA error: an illegal memory access was encountered"), KeyboardInterrupt()),
)


@_promise(error=lambda s: [s.framework.pool.oom_error(), *_OTHER_ERRORS])
def oom(s: Subject, error: BaseException) -> None:
    """Its out-of-memory error is recognised, and nothing else is taken for one."""
    expected, words = error not in _OTHER_ERRORS, "taken" if is_oom_error(error) else "not taken"
    _hold(is_oom_error(error) == expected, f"{error!r} is {words} for running out of memory")


@_promise(axis=[0, 1])
def splitting(s: Subject, axis: int) -> None:
    """A batch that is split when memory runs out is joined again, bit for bit; here arrays of every dtype."""
    expected = [s.sample(dtype=dtype) for dtype in s.dtypes]
    shape = expected[0].shape
    if axis < len(shape) and shape[axis] > 2:
        arrays = [s.make(values) for values in expected]
        with inject_oom(s.name, above_rows=2):
            joined = split_and_retry(lambda parts: parts, arrays, axis=axis)
        for result, values in zip(joined, expected, strict=True):
            _same(s.read(result), values)
