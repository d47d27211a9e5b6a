"""The promises of the library as cases, one function each: a line of Python, and a check that raises.

Expected values come from NumPy, and what an array holds is read by a copy that nothing else refers to.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
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
from arraybridge.memory.recognise import is_oom_error
from arraybridge.memory.recovery import split_and_retry
from arraybridge.testing.rehearsal import inject_oom
from arraybridge.testing.samples import DTYPES, LAYOUTS, sample
from arraybridge.testing.subject import BrokenPromiseError, Subject, bits, churn, held, hold, same

__all__ = ["PROMISES"]

Case = tuple[str, Callable[[], object]]


# -- the promises --------------------------------------------------------------------------------------


def dtypes(s: Subject) -> Iterator[Case]:
    """Every dtype that it claims arrives there and back, bit for bit."""
    for dtype in s.dtypes:

        def check(dtype: str = dtype) -> None:
            want = s.sample(dtype=dtype)
            x = s.to(want)
            same(s.read(x), want)

        yield f'convert_memory({s.line(dtype=dtype)}, "numpy")', check


def names(s: Subject) -> Iterator[Case]:
    """It calls the dtype of an array as NumPy does, and knows its shape and its bytes."""
    for dtype in s.dtypes:

        def check(dtype: str = dtype) -> None:
            x = s.make(s.sample(dtype=dtype))
            read = s.framework.to_host(x)
            said = s.framework.dtype_name(x)
            hold(said == read.dtype.name, f"dtype_name() says {said}, and its memory holds {read.dtype.name}")
            hold(s.framework.shape(x) == read.shape, "shape() is not that of its values")
            hold(s.framework.nbytes(x) == read.nbytes, "nbytes() is not that of its values")

        yield f'framework("{s.name}").dtype_name({s.line(dtype=dtype)})', check


def layouts(s: Subject) -> Iterator[Case]:
    """Arrays of every layout arrive with the right values."""
    for layout in LAYOUTS:
        for dtype in s.dtypes:
            if layout == "big-endian" and dtype.startswith("float8"):
                continue  # a byte has no order

            def check(layout: str = layout, dtype: str = dtype) -> None:
                want = s.sample(layout, dtype)
                same(s.read(s.to(want)), s.sample(layout, dtype))

            yield s.line(layout, dtype), check


def shapes(s: Subject) -> Iterator[Case]:
    """Empty arrays, 0-d arrays and every rank arrive as they are, or are refused with a typed error."""
    ranks = [(1,) * rank for rank in (1, 2, 3, 4, 5, 8, 9, 10, 32, 33, 64) if rank <= hostmemory.MAX_RANK]
    for shape in [(), (0,), (0, 3), (3, 0, 2), (1, 5), (2, 3, 4), *ranks]:

        def check(shape: tuple[int, ...] = shape) -> None:
            want = sample(s.dtype, shape=shape)
            try:
                x = s.to(want)
            except MemoryConversionError as error:
                _is_advice(error)
                return
            same(s.read(x), want)

        yield f'convert_memory(sample("{s.dtype}", shape={shape}), "{s.name}")', check


def read_only(s: Subject) -> Iterator[Case]:
    """Nobody gets to write what may not be written."""

    def view() -> None:
        x = s.make(s.sample())
        if s.framework.mutable or not s.framework.has_host:
            return
        shown = convert_memory(x, "numpy")
        said = explain(x, "numpy")
        hold(
            not (said.shares_memory and shown.flags.writeable),
            "NumPy's view of an immutable array is writable",
        )

    def lent() -> None:
        want = s.sample("read-only")
        if s.framework.mutable and not s.framework.honours_readonly:
            said = explain(want, s.name)
            hold(not said.shares_memory, "read-only memory is lent to arrays that can be written to")

    yield f'convert_memory({s.line()}, "numpy").flags.writeable', view
    yield f'explain(sample("{s.dtype}", "read-only"), "{s.name}")', lent


def lifetime(s: Subject) -> Iterator[Case]:
    """Memory outlives its source: delete it, and the result still holds."""
    for size in (16, 1024, 1 << 18):
        shape = s.shape((size,))
        if shape is None:
            continue

        def there(shape: tuple[int, ...] = shape) -> None:
            want = sample(s.dtype, shape=shape)
            source = want.copy()
            x = s.to(source)
            del source
            churn(want.nbytes)
            same(s.read(x), want)

        def back(shape: tuple[int, ...] = shape) -> None:
            want = sample(s.dtype, shape=shape)
            x = s.make(want.copy())
            shown = convert_memory(x, "numpy")
            del x
            churn(want.nbytes)
            others = [s.make(np.zeros(shape, want.dtype)) for _ in range(8)]
            same(shown, want)
            del others

        line = f'convert_memory(sample("{s.dtype}", shape={shape}), "{s.name}")'
        yield f"x = {line}; gc.collect(); x", there
        yield f"x = {line}; y = to_numpy(x); del x; gc.collect(); y", back


def copies(s: Subject) -> Iterator[Case]:
    """``copy=True`` never shares, ``copy=False`` shares or refuses, and a copy is complete on return."""
    for layout in ("aligned", "fortran", "strided", "offset", "negative"):

        def always(layout: str = layout) -> None:
            source, want = s.sample(layout), s.sample(layout)
            x = s.to(source, copy=True)
            source[...] = 0
            same(s.read(x), want)

        def never(layout: str = layout) -> None:
            source = s.sample(layout)
            said = None
            try:
                said = explain(source, s.name, copy=False)
                s.to(source, copy=False)
            except CopyRequiredError as error:
                hold(said is None, "explain() foretells that copy=False shares, and the conversion refuses")
                _is_advice(error)
                return
            hold(said.shares_memory, "copy=False passes, and explain() says that nothing is shared")

        yield s.line(layout, more=", copy=True"), always
        yield s.line(layout, more=", copy=False"), never

    def itself() -> None:
        x = s.make(s.sample())
        hold(convert_memory(x, s.name) is x, "within the framework, the very object has to come back")
        other = convert_memory(x, s.name, copy=True)
        hold(other is not x, "copy=True gives the very object back")
        same(s.read(other), s.sample())

    yield f'convert_memory({s.line()}, "{s.name}")', itself


def sharing(s: Subject) -> Iterator[Case]:
    """What `explain` says of sharing is what happens, and what `trace` records."""
    for layout in LAYOUTS:

        def there(layout: str = layout) -> None:
            source = s.sample(layout)
            said = explain(source, s.name)
            with trace() as log:
                x = s.to(source)
            hold(
                log.records[-1] == said, f"explain() foretold {said}, and trace() recorded {log.records[-1]}"
            )
            if source.flags.writeable:
                before = s.read(x)
                source[...] = 0
                changed = bits(s.read(x)) != bits(before)
                hold(changed == said.shares_memory, _lie(said.shares_memory))

        yield f"explain({s.line(layout).removeprefix('convert_memory(')}", there

    def back() -> None:
        x = s.make(s.sample())
        said = explain(x, "numpy")
        shown, again = convert_memory(x, "numpy"), convert_memory(x, "numpy")
        if not said.shares_memory:
            hold(not np.shares_memory(shown, again), _lie(said.shares_memory))
            return
        hold(hostmemory.address(shown) == hostmemory.address(again), _lie(said.shares_memory))
        if shown.flags.writeable:
            before = s.read(x)
            shown[...] = 0
            hold(bits(s.read(x)) != bits(before), _lie(said.shares_memory))

    yield f'explain({s.line()}, "numpy")', back


def _lie(said: bool) -> str:
    if said:
        return "explain() says that memory is shared, and a write is not seen on the other side"
    return "explain() says that memory is copied, and a write is seen on the other side"


def casts(s: Subject) -> Iterator[Case]:
    """``dtype=`` casts, and nothing else does."""
    for dtype in s.dtypes:
        if dtype.startswith("complex"):
            continue

        def check(dtype: str = dtype) -> None:
            values = np.array([0, 1, 2, 3], "float64").reshape(s.shape((4,)) or (4,))
            x = s.to(values, dtype=dtype)
            same(s.read(x), values.astype(hostmemory.np_dtype(dtype)))

        yield f'convert_memory(np.array([0.0, 1.0, 2.0, 3.0]), "{s.name}", dtype="{dtype}")', check


def refusals(s: Subject) -> Iterator[Case]:
    """What it cannot hold is refused with a typed error that says what to do."""
    for dtype in DTYPES:
        if dtype in s.dtypes or not held(dtype):
            continue

        def unheld(dtype: str = dtype) -> None:
            try:
                s.to(s.sample(dtype=dtype))
            except DtypeNotSupportedError as error:
                _is_advice(error)
                return
            raise BrokenPromiseError(f"it does not claim {dtype}, and takes it")

        yield s.line(dtype=dtype), unheld
    strange: dict[str, Any] = {
        "np.array([object()])": np.array([object()]),
        'np.array(["a"])': np.array(["a"]),
        'np.array(["2020"], "M8[Y]")': np.array(["2020"], "M8[Y]"),
        "np.ma.masked_array([1, 2], [True, False])": np.ma.masked_array([1, 2], [True, False]),
        'np.zeros(2, [("a", "i4")])': np.zeros(2, [("a", "i4")]),
        "[1, 2]": [1, 2],
    }
    for words, value in strange.items():
        if s.name == "numpy":
            continue  # NumPy holds its own

        def refused(value: Any = value) -> None:
            try:
                s.to(value)
            except MemoryConversionError as error:
                _is_advice(error)
                return
            raise BrokenPromiseError("it is taken")

        yield f'convert_memory({words}, "{s.name}")', refused


def _is_advice(error: MemoryConversionError) -> None:
    hold(len(str(error).split()) >= 5, f"the error says too little: {error}")


def devices(s: Subject) -> Iterator[Case]:
    """Arrays land on the device that is asked for, and one that is not there is refused."""

    def listed() -> None:
        there = s.framework.devices()
        hold(there, "devices() lists none")
        here = s.framework.device_of(s.make(s.sample()))
        hold(here in there, f"an array is on {here}, which devices() does not list")

    yield f'devices("{s.name}")', listed
    for device in s.framework.devices():

        def placed(device: Any = device) -> None:
            x = s.to(s.sample(), device=str(device))
            hold(s.framework.device_of(x) == device, f"it is on {s.framework.device_of(x)}")
            same(s.read(x), s.sample())

        yield s.line(more=f', device="{device}"'), placed

    def missing() -> None:
        try:
            s.to(s.sample(), gpu_id=99)
        except DeviceNotFoundError:
            return
        hold(s.name == "numpy", "gpu_id=99 is taken, and there is no such device")

    yield s.line(more=", gpu_id=99"), missing


def oom(s: Subject) -> Iterator[Case]:
    """Its out-of-memory error is recognised, and nothing else is taken for one."""
    error = s.framework.pool.oom_error()

    def own() -> None:
        hold(is_oom_error(error), f"its own error is not recognised: {error!r}")

    yield f"is_oom_error({type(error).__name__}(...))", own
    for other in (
        ValueError("out of memory budget"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("the shapes differ"),
        TypeError("memory"),
        KeyboardInterrupt(),
    ):

        def foreign(other: BaseException = other) -> None:
            hold(not is_oom_error(other), f"{other!r} is taken for running out of memory")

        yield f"is_oom_error({other!r})", foreign


def splitting(s: Subject) -> Iterator[Case]:
    """A batch that is split when memory runs out is joined again, bit for bit."""
    for dtype in s.dtypes:
        for axis in (0, 1):
            shape = s.shape((7, 6))
            if shape is None or len(shape) <= axis or shape[axis] < 3:
                continue

            def check(dtype: str = dtype, axis: int = axis, shape: tuple[int, ...] = shape) -> None:
                want = sample(dtype, shape=shape)
                x = s.make(want)
                with inject_oom(s.name, above_rows=2):
                    joined = split_and_retry(lambda part: part, x, axis=axis)
                same(s.read(joined), want)

            yield (
                (
                    f'split_and_retry(lambda part: part, convert_memory(sample("{dtype}", shape={shape}),'
                    f' "{s.name}"), axis={axis})  # with inject_oom("{s.name}", above_rows=2)'
                ),
                check,
            )


def functions(s: Subject) -> Iterator[Case]:
    """A decorated function gets its arrays, and gives back what the caller brought."""

    def check() -> None:
        seen: list[bool] = []

        def look(x: Any) -> Any:
            seen.append(s.framework.owns(x))
            return x

        decorated = s.framework.decorator(output_type="input")(look)
        want = s.sample()
        got = decorated(want)
        hold(seen == [True], "the function got something else")
        hold(isinstance(got, np.ndarray), f"the caller of a NumPy array got {type(got).__qualname__}")
        same(got, want)

    yield f'framework("{s.name}").decorator(output_type="input")(lambda x: x)(sample("{s.dtype}"))', check


def threads(s: Subject) -> Iterator[Case]:
    """Conversions in several threads, and arrays that pass from one to another, hold."""

    def check() -> None:
        want = s.sample()
        ours = s.make(want)
        problems: list[BaseException] = []
        start = threading.Barrier(8)

        def work() -> None:
            try:
                start.wait()
                for _ in range(20):
                    same(s.read(s.to(s.sample())), want)
                    same(s.read(ours), want)
            except Exception as error:  # noqa: BLE001  # whatever a plug-in raises is what is reported
                problems.append(error)

        running = [threading.Thread(target=work) for _ in range(8)]
        for one in running:
            one.start()
        for one in running:
            one.join()
        if problems:
            raise problems[0]

    yield f"{s.line()}  # in 8 threads", check


def laziness(s: Subject) -> Iterator[Case]:
    """``import arraybridge`` does not import it."""
    packages = registry.facts(s.name).packages
    if s.name == "numpy" or not packages:
        return

    def check() -> None:
        command = [sys.executable, "-m", "arraybridge.testing.loaded", *packages]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        hold(not done.stdout.split(), f"it loads {', '.join(done.stdout.split())}")

    yield "import arraybridge", check


#: Name → the cases of a promise.
PROMISES: dict[str, Callable[[Subject], Iterator[Case]]] = {
    one.__name__: one
    for one in (
        *(dtypes, names, layouts, shapes, read_only, lifetime, copies, sharing, casts, refusals),
        *(devices, oom, splitting, functions, threads, laziness),
    )
}
