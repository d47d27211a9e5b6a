"""The promises of the library, one function each, which gives the cases of a framework.

A case is a line of Python that shows it, a check that raises where the promise is broken, and the check's
arguments. Expected values come from NumPy. What an array holds is read by a copy that nothing else refers to.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from arraybridge.conversion.convert import convert_memory, explain
from arraybridge.conversion.trace import trace
from arraybridge.errors import (
    CopyRequiredError,
    DeviceNotFoundError,
    DtypeNotSupportedError,
    MemoryConversionError,
)
from arraybridge.frameworks import hostmemory, registry
from arraybridge.frameworks.base import Framework
from arraybridge.memory.recognise import is_oom_error
from arraybridge.memory.recovery import split_and_retry
from arraybridge.testing.oom import inject_oom
from arraybridge.types import Device

__all__ = ["DTYPES", "LAYOUTS", "PROMISES", "BrokenPromiseError", "Case", "Subject", "sample"]

# -- arrays to try ------------------------------------------------------------------------------------

#: Names of the dtypes that travel.
DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
    *("bfloat16", "float8_e4m3fn", "float8_e5m2"),
)
LAYOUTS = (
    *("aligned", "offset", "unaligned", "fortran", "strided", "negative", "broadcast"),
    *("read-only", "big-endian", "memmap"),
)


def sample(dtype: str = "float32", layout: str = "aligned", shape: tuple[int, ...] = (4, 6)) -> Any:
    """A NumPy array with the extreme values of its dtype, the same at each call.

    Args:
        dtype: one of `DTYPES`.
        layout: ``"aligned"``: C-contiguous, at a multiple of 64 bytes; ``"offset"``: one element further;
            ``"unaligned"``: one byte further; ``"fortran"``; ``"strided"``: every second element;
            ``"negative"``: the last axis reversed; ``"broadcast"``: a row repeated; ``"read-only"``;
            ``"big-endian"``; ``"memmap"``: a file mapped read-only.
        shape: its shape.

    >>> sample("uint8", shape=(3,)).tolist()
    [0, 255, 1]
    """
    values = np.resize(_values(hostmemory.np_dtype(dtype)), shape)
    axes = values.ndim > 0
    match layout:
        case "aligned" | "read-only":
            values = _at(values, 0)
            values.flags.writeable = layout == "aligned"
            return values
        case "offset":
            return _at(values, values.itemsize)
        case "unaligned":
            return _at(values, 1)
        case "fortran":
            return np.asfortranarray(values)
        case "strided":
            return np.repeat(values, 2, axis=-1)[..., ::2] if axes else values
        case "negative":
            return np.ascontiguousarray(values[..., ::-1])[..., ::-1] if axes else values
        case "broadcast":
            return np.broadcast_to(values[:1], shape) if axes else values
        case "big-endian":
            return values.astype(values.dtype.newbyteorder(">"))
        case "memmap":
            return _mapped(values)
    raise ValueError(f"layout={layout!r} is none of {', '.join(LAYOUTS)}")


def _values(dtype: np.dtype[Any]) -> np.ndarray:
    if dtype.kind == "b":
        return np.array([True, False, True])
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return np.array([limits.min, limits.max, 1, 0, 7, 100], dtype)
    numbers = [0.0, -0.0, 1.5, -2.0, np.inf, -np.inf, np.nan, 6e-5, 0.1]
    if dtype.name == "float8_e4m3fn":  # which has no infinity
        numbers = [0.0, -0.0, 1.5, -2.0, 448.0, 0.0625, np.nan]
    if dtype.kind == "c":
        return np.array([complex(a, b) for a, b in zip(numbers, reversed(numbers), strict=True)], dtype)
    with np.errstate(all="ignore"):
        real = np.array(numbers, np.float64).astype(dtype)
    if dtype.name in ("float32", "float64"):
        real[-1] = np.finfo(dtype).tiny
        real[-2] = np.finfo(dtype).max
    return real


def _at(values: np.ndarray, offset: int) -> np.ndarray:
    """A C-contiguous copy ``offset`` bytes behind a multiple of 64."""
    memory = hostmemory.packed((values.nbytes + 64,), np.dtype(np.uint8))
    result = memory[offset : offset + values.nbytes].view(values.dtype).reshape(values.shape)
    result[...] = values
    return result


def _mapped(values: np.ndarray) -> np.ndarray:
    if not values.nbytes:  # an empty file cannot be mapped
        return values
    handle, name = tempfile.mkstemp()
    os.close(handle)
    path = Path(name)
    path.write_bytes(values.tobytes())
    try:
        # As bytes, since a map knows no bfloat16.
        flat = np.memmap(path, np.uint8, mode="r")
        return flat.view(values.dtype).reshape(values.shape)
    finally:
        path.unlink(missing_ok=os.name != "nt")


# -- the framework under trial ---------------------------------------------------------------------------

#: A line of Python, the check, and its arguments.
Case = tuple[Any, ...]


class BrokenPromiseError(AssertionError):
    """A promise is not kept; the message says how."""


class Subject:
    """The framework under trial, and how to make and read its arrays."""

    def __init__(self, framework: Framework, make: Callable[[np.ndarray], Any] | None) -> None:
        self.framework = framework
        self.name = framework.name
        self._make = make
        self.dtypes = [name for name in DTYPES if framework.dtypes is None or name in framework.dtypes]
        self.dtypes = [name for name in self.dtypes if _is_there(name)]
        #: A dtype for everything that is not about dtypes.
        self.dtype = next((d for d in ("float32", "int32", "uint8") if d in self.dtypes), self.dtypes[0])

    def shape(self, wish: tuple[int, ...]) -> tuple[int, ...] | None:
        """That shape, or one of the same size that the framework takes; None where it takes neither."""
        size = int(np.prod(wish))
        for shape in (wish, (size,), (1, size)):
            try:
                self.framework.supports(self.dtype, shape)
            except MemoryConversionError:
                continue
            return shape
        return None

    def sample(self, layout: str = "aligned", dtype: str | None = None) -> np.ndarray:
        values: np.ndarray = sample(dtype or self.dtype, layout, self.shape((4, 6)) or (24,))
        return values

    def line(self, layout: str = "aligned", dtype: str | None = None, options: str = "") -> str:
        """The conversion of a sample, as a line of Python."""
        shape = self.shape((4, 6)) or (24,)
        return f'convert_memory(sample("{dtype or self.dtype}", "{layout}", {shape}), "{self.name}"{options})'

    def make(self, values: np.ndarray) -> Any:
        if self._make is not None:
            return self._make(values)
        return self.framework.from_host(hostmemory.fresh(values), self.framework.default_device())

    def to(self, values: Any, **options: Any) -> Any:
        return convert_memory(values, self.name, **options)

    def read(self, x: Any) -> np.ndarray:
        values: np.ndarray = convert_memory(x, "numpy", copy=True, grad="detach")
        return values


# -- what the checks are made of -----------------------------------------------------------------------


def _is_there(dtype: str) -> bool:
    try:
        hostmemory.np_dtype(dtype)
    except DtypeNotSupportedError:  # ml_dtypes is missing
        return False
    return True


def _hold(condition: object, otherwise: str) -> None:
    # No `assert`, which `python -O` would leave out.
    if not condition:
        raise BrokenPromiseError(otherwise)


def _bits(x: np.ndarray) -> bytes:
    return x.astype(x.dtype.newbyteorder("="), copy=False).tobytes()


def _same(result: np.ndarray, expected: np.ndarray) -> None:
    _hold(
        result.dtype.name == expected.dtype.name,
        f"the dtype is {result.dtype.name}, and was {expected.dtype.name}",
    )
    _hold(result.shape == expected.shape, f"the shape is {result.shape}, and was {expected.shape}")
    first, was = result.reshape(-1)[:4], expected.reshape(-1)[:4]
    _hold(_bits(result) == _bits(expected), f"the values differ: {first} and {was}")


def _arrives(s: Subject, values: np.ndarray, **options: Any) -> Any:
    expected = np.array(values)
    x = s.to(values, **options)
    _same(s.read(x), expected)
    return x


def _refused(
    s: Subject, values: Any, error: type[MemoryConversionError], otherwise: str, **options: Any
) -> None:
    try:
        s.to(values, **options)
    except error as refusal:
        _says_what_to_do(refusal)
        return
    raise BrokenPromiseError(otherwise)


def _says_what_to_do(error: MemoryConversionError) -> None:
    _hold(len(str(error).split()) >= 5, f"the error says too little: {error}")


def _churn(nbytes: int) -> None:
    """Fill what was freed with other values."""
    gc.collect()
    for _ in range(20):
        np.full(max(nbytes, 1), 0xA5, np.uint8)


# -- the promises --------------------------------------------------------------------------------------


def dtypes(s: Subject) -> Iterator[Case]:
    """Every dtype that it claims arrives there and back, bit for bit."""
    for dtype in s.dtypes:
        yield f'convert_memory({s.line(dtype=dtype)}, "numpy")', _arrives, s, s.sample(dtype=dtype)


def names(s: Subject) -> Iterator[Case]:
    """It calls the dtype of an array as NumPy does, and knows its shape and its bytes."""

    def check(dtype: str) -> None:
        x = s.make(s.sample(dtype=dtype))
        values, name = s.framework.to_host(x), s.framework.dtype_name(x)
        _hold(
            name == values.dtype.name, f"dtype_name() says {name}, and its memory holds {values.dtype.name}"
        )
        _hold(s.framework.shape(x) == values.shape, "shape() is not that of its values")
        _hold(s.framework.nbytes(x) == values.nbytes, "nbytes() is not that of its values")

    for dtype in s.dtypes:
        yield f'framework("{s.name}").dtype_name({s.line(dtype=dtype)})', check, dtype


def layouts(s: Subject) -> Iterator[Case]:
    """Arrays of every layout arrive with the right values."""
    for layout in LAYOUTS:
        for dtype in s.dtypes:
            if layout != "big-endian" or not dtype.startswith("float8"):  # a byte has no order
                yield s.line(layout, dtype), _arrives, s, s.sample(layout, dtype)


def shapes(s: Subject) -> Iterator[Case]:
    """Empty arrays, 0-d arrays and every rank arrive as they are, or are refused with a typed error."""

    def check(shape: tuple[int, ...]) -> None:
        try:
            _arrives(s, sample(s.dtype, shape=shape))
        except MemoryConversionError as error:
            _says_what_to_do(error)

    ranks = [(1,) * rank for rank in (1, 2, 3, 4, 5, 8, 9, 10, 32, 33, 64) if rank <= hostmemory.MAX_RANK]
    for shape in [(), (0,), (0, 3), (3, 0, 2), (1, 5), (2, 3, 4), *ranks]:
        yield f'convert_memory(sample("{s.dtype}", shape={shape}), "{s.name}")', check, shape


def read_only(s: Subject) -> Iterator[Case]:
    """Nobody gets to write what may not be written."""

    def view() -> None:
        if s.framework.mutable or not s.framework.has_host:
            return
        x = s.make(s.sample())
        values, route = convert_memory(x, "numpy"), explain(x, "numpy")
        writable = route.shares_memory and values.flags.writeable
        _hold(not writable, "NumPy's view of an immutable array is writable")

    def lent() -> None:
        if s.framework.mutable and not s.framework.honours_readonly:
            route = explain(s.sample("read-only"), s.name)
            _hold(not route.shares_memory, "read-only memory is lent to arrays that can be written to")

    yield f'convert_memory({s.line()}, "numpy").flags.writeable', view
    yield f'explain(sample("{s.dtype}", "read-only"), "{s.name}")', lent


def lifetime(s: Subject) -> Iterator[Case]:
    """Memory outlives its source: delete it, and the result still holds."""

    def from_numpy(shape: tuple[int, ...]) -> None:
        expected = sample(s.dtype, shape=shape)
        source = expected.copy()
        x = s.to(source)
        del source
        _churn(expected.nbytes)
        _same(s.read(x), expected)

    def to_numpy(shape: tuple[int, ...]) -> None:
        expected = sample(s.dtype, shape=shape)
        x = s.make(expected.copy())
        values = convert_memory(x, "numpy")
        del x
        _churn(expected.nbytes)
        others = [s.make(np.zeros(shape, expected.dtype)) for _ in range(8)]
        _same(values, expected)
        del others

    for shape in filter(None, (s.shape((size,)) for size in (16, 1024, 1 << 18))):
        line = f'convert_memory(sample("{s.dtype}", shape={shape}), "{s.name}")'
        yield f"x = {line}; gc.collect(); x", from_numpy, shape
        yield f"x = {line}; y = to_numpy(x); del x; gc.collect(); y", to_numpy, shape


def copies(s: Subject) -> Iterator[Case]:
    """``copy=True`` never shares, ``copy=False`` shares or refuses, and a copy is complete on return."""

    def always(layout: str) -> None:
        source, expected = s.sample(layout), s.sample(layout)
        x = s.to(source, copy=True)
        source[...] = 0
        _same(s.read(x), expected)

    def never(layout: str) -> None:
        source, route = s.sample(layout), None
        try:
            route = explain(source, s.name, copy=False)
            s.to(source, copy=False)
        except CopyRequiredError as error:
            _hold(route is None, "explain() foretells that copy=False shares, and the conversion refuses")
            _says_what_to_do(error)
            return
        _hold(route.shares_memory, "copy=False passes, and explain() says that nothing is shared")

    def itself() -> None:
        x = s.make(s.sample())
        _hold(convert_memory(x, s.name) is x, "within the framework, the very object has to come back")
        other = convert_memory(x, s.name, copy=True)
        _hold(other is not x, "copy=True gives the very object back")
        _same(s.read(other), s.sample())

    for layout in ("aligned", "fortran", "strided", "offset", "negative"):
        yield s.line(layout, options=", copy=True"), always, layout
        yield s.line(layout, options=", copy=False"), never, layout
    yield f'convert_memory({s.line()}, "{s.name}")', itself


def sharing(s: Subject) -> Iterator[Case]:
    """What `explain` says of sharing is what happens, and what `trace` records."""

    def agree(foretold: bool, happened: bool) -> None:
        verb, seen = ("shared", "not seen") if foretold else ("copied", "seen")
        _hold(
            foretold == happened,
            f"explain() says that memory is {verb}, and a write is {seen} on the other side",
        )

    def from_numpy(layout: str) -> None:
        source = s.sample(layout)
        route = explain(source, s.name)
        with trace() as log:
            x = s.to(source)
        _hold(log.records[-1] == route, f"explain() foretold {route}, and trace() recorded {log.records[-1]}")
        if source.flags.writeable:
            before = s.read(x)
            source[...] = 0
            agree(route.shares_memory, _bits(s.read(x)) != _bits(before))

    def to_numpy() -> None:
        x = s.make(s.sample())
        shares = explain(x, "numpy").shares_memory
        first, second = convert_memory(x, "numpy"), convert_memory(x, "numpy")
        agree(shares, hostmemory.address(first) == hostmemory.address(second))
        if shares and first.flags.writeable:
            before = s.read(x)
            first[...] = 0
            agree(shares, _bits(s.read(x)) != _bits(before))

    for layout in LAYOUTS:
        yield f"explain({s.line(layout).removeprefix('convert_memory(')}", from_numpy, layout
    yield f'explain({s.line()}, "numpy")', to_numpy


def casts(s: Subject) -> Iterator[Case]:
    """``dtype=`` casts, and nothing else does."""

    def check(dtype: str) -> None:
        values = np.array([0, 1, 2, 3], "float64").reshape(s.shape((4,)) or (4,))
        _same(s.read(s.to(values, dtype=dtype)), values.astype(hostmemory.np_dtype(dtype)))

    for dtype in s.dtypes:
        if not dtype.startswith("complex"):
            line = f'convert_memory(np.array([0.0, 1.0, 2.0, 3.0]), "{s.name}", dtype="{dtype}")'
            yield line, check, dtype


#: What no framework but NumPy itself holds.
_STRANGE: dict[str, Any] = {
    "np.array([object()])": np.array([object()]),
    'np.array(["a"])': np.array(["a"]),
    'np.array(["2020"], "M8[Y]")': np.array(["2020"], "M8[Y]"),
    "np.ma.masked_array([1, 2], [True, False])": np.ma.masked_array([1, 2], [True, False]),
    'np.zeros(2, [("a", "i4")])': np.zeros(2, [("a", "i4")]),
    "[1, 2]": [1, 2],
}


def refusals(s: Subject) -> Iterator[Case]:
    """What it cannot hold is refused with a typed error that says what to do."""
    for dtype in DTYPES:
        if dtype not in s.dtypes and _is_there(dtype):
            otherwise = f"it does not claim {dtype}, and takes it"
            yield s.line(dtype=dtype), _refused, s, s.sample(dtype=dtype), DtypeNotSupportedError, otherwise
    for words, value in _STRANGE.items() if s.name != "numpy" else ():
        yield f'convert_memory({words}, "{s.name}")', _refused, s, value, MemoryConversionError, "it is taken"


def devices(s: Subject) -> Iterator[Case]:
    """Arrays land on the device that is asked for, and one that is not there is refused."""

    def listed() -> None:
        all_devices = s.framework.devices()
        _hold(all_devices, "devices() lists none")
        device = s.framework.device_of(s.make(s.sample()))
        _hold(device in all_devices, f"an array is on {device}, which devices() does not list")

    def placed(device: Device) -> None:
        x = _arrives(s, s.sample(), device=str(device))
        _hold(s.framework.device_of(x) == device, f"it is on {s.framework.device_of(x)}")

    yield f'devices("{s.name}")', listed
    for device in s.framework.devices():
        yield s.line(options=f', device="{device}"'), placed, device
    if s.name != "numpy":
        otherwise = "gpu_id=99 is taken, and there is no such device"
        missing = lambda: _refused(s, s.sample(), DeviceNotFoundError, otherwise, gpu_id=99)  # noqa: E731
        yield s.line(options=", gpu_id=99"), missing


def oom(s: Subject) -> Iterator[Case]:
    """Its out-of-memory error is recognised, and nothing else is taken for one."""

    def recognised(error: BaseException) -> None:
        _hold(is_oom_error(error), f"its own error is not recognised: {error!r}")

    def told_apart(error: BaseException) -> None:
        _hold(not is_oom_error(error), f"{error!r} is taken for running out of memory")

    own = s.framework.pool.oom_error()
    yield f"is_oom_error({type(own).__name__}(...))", recognised, own
    for error in (
        ValueError("out of memory budget"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("the shapes differ"),
        TypeError("memory"),
        KeyboardInterrupt(),
    ):
        yield f"is_oom_error({error!r})", told_apart, error


def splitting(s: Subject) -> Iterator[Case]:
    """A batch that is split when memory runs out is joined again, bit for bit."""

    def check(dtype: str, axis: int, shape: tuple[int, ...]) -> None:
        expected = sample(dtype, shape=shape)
        with inject_oom(s.name, above_rows=2):
            joined = split_and_retry(lambda part: part, s.make(expected), axis=axis)
        _same(s.read(joined), expected)

    shape = s.shape((7, 6)) or ()
    for dtype in s.dtypes:
        for axis in (axis for axis in (0, 1) if axis < len(shape) and shape[axis] > 2):
            array = f'convert_memory(sample("{dtype}", shape={shape}), "{s.name}")'
            line = f"split_and_retry(lambda part: part, {array}, axis={axis})"
            yield f'{line}  # with inject_oom("{s.name}", above_rows=2)', check, dtype, axis, shape


def functions(s: Subject) -> Iterator[Case]:
    """A decorated function gets its arrays, and gives back what the caller brought."""

    def check() -> None:
        owned: list[bool] = []

        def look(x: Any) -> Any:
            owned.append(s.framework.owns(x))
            return x

        result = s.framework.decorator(output_type="input")(look)(s.sample())
        _hold(owned == [True], "the function got something else")
        _hold(isinstance(result, np.ndarray), f"the caller of a NumPy array got {type(result).__qualname__}")
        _same(result, s.sample())

    yield f'framework("{s.name}").decorator(output_type="input")(lambda x: x)(sample("{s.dtype}"))', check


def threads(s: Subject) -> Iterator[Case]:
    """Conversions in several threads, and arrays that pass from one to another, hold."""

    def check() -> None:
        expected = s.sample()
        passed = s.make(expected)
        problems: list[BaseException] = []
        start = threading.Barrier(8)

        def work() -> None:
            try:
                start.wait()
                for _ in range(20):
                    _arrives(s, s.sample())
                    _same(s.read(passed), expected)
            except Exception as error:  # noqa: BLE001  # whatever a plug-in raises is what is reported
                problems.append(error)

        workers = [threading.Thread(target=work) for _ in range(8)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if problems:
            raise problems[0]

    yield f"{s.line()}  # in 8 threads", check


#: NumPy loads some of the standard library, and may load more.
_LOADED = """
import sys, numpy
before = set(sys.modules)
import arraybridge.testing
print(*(name for name in sys.argv[1:] if name in sys.modules and name not in before))
"""


def laziness(s: Subject) -> Iterator[Case]:
    """``import arraybridge`` does not import it."""

    def check() -> None:
        done = subprocess.run(
            [sys.executable, "-c", _LOADED, *packages], capture_output=True, text=True, check=True
        )
        _hold(not done.stdout.split(), f"it loads {', '.join(done.stdout.split())}")

    packages = registry.facts(s.name).packages
    if s.name != "numpy" and packages:
        yield "import arraybridge", check


#: Name → the cases of a promise.
PROMISES: dict[str, Callable[[Subject], Iterator[Case]]] = {
    promise.__name__: promise
    for promise in (
        *(dtypes, names, layouts, shapes, read_only, lifetime, copies, sharing, casts, refusals),
        *(devices, oom, splitting, functions, threads, laziness),
    )
}
