"""The steps of a decorated call between its arguments and its results."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import multiprocessing
import pickle
import sys
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import ArrayNotSupportedError
from arraybridge.conversion.plan_cache import plans_by_signature
from arraybridge.decorators import decorated_call
from arraybridge.interface.streams import Streams
from tests.decorators import cases
from tests.decorators.cases import (
    FRAMEWORKS,
    HOST,
    IMAGE,
    Box,
    BoxFramework,
    decorator,
    framework_of,
    identity,
    registered,
)
from tests.helpers import require, run_python

OPTIONS: tuple[dict[str, Any], ...] = (
    *({}, {"strict": True, "input_type": "numpy"}, {"oom_recovery": True}, {"oom_recovery": "split"}),
    *({"device": "cpu"}, {"grad": "detach"}, {"dtype": "float32"}, {"contract": lambda _: True}),
)


@pytest.mark.parametrize("framework", HOST)
def test_repeated_calls_return_the_same_results(framework: str) -> None:
    """Check each option, with other arrays passed between the two calls."""
    require(framework)
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    frozen, unaligned = x.copy(), np.zeros(25, np.uint8)[1:].view(np.float32)
    frozen.flags.writeable, unaligned[:] = False, x.ravel()

    def body(one: Any) -> Any:
        assert framework_of(one) == framework
        return one

    for options in OPTIONS:
        fn = decorator(framework)(output_type="numpy", **options)(body)
        for _ in range(3):
            for brought in (x, x[::-1], x.T, frozen, unaligned, x[:0], x.astype(">f4")):
                result = fn(brought)
                assert (type(result), result.dtype.name) == (np.ndarray, "float32")
                assert result.tolist() == brought.tolist()


def test_coroutines() -> None:
    require("torch")

    @arraybridge.torch(output_type="numpy", contract=lambda r: r.ndim == 1)
    async def double(x: Any) -> Any:
        await asyncio.sleep(0)
        assert framework_of(x) == "torch"
        return x * 2

    assert inspect.iscoroutinefunction(double)

    async def main() -> list[Any]:
        return await asyncio.gather(*(double(np.full(1, float(i))) for i in range(5)))

    assert [r.tolist() for r in asyncio.run(main())] == [[0.0], [2.0], [4.0], [6.0], [8.0]]


def test_pickles_by_reference_and_by_value() -> None:
    cloudpickle = pytest.importorskip("cloudpickle")
    require("torch")
    assert pickle.loads(pickle.dumps(cases.doubled)) is cases.doubled
    assert pickle.loads(pickle.dumps(arraybridge.torch)) is arraybridge.torch
    factor = 3
    for options in ({"output_type": "numpy", "device": "cpu"}, {"grad": "flow"}):
        local = arraybridge.torch(**options)(lambda x: x * factor)
        assert local(np.ones(1)).tolist() == [3.0]
        again = pickle.loads(cloudpickle.dumps(local))
        assert again(np.ones(1)).tolist() == [3.0]
        assert again.execution_memory_type == "torch"


def test_dill_pickles_script_functions_by_value(tmp_path: Path) -> None:
    """Pickle as Hugging Face datasets does to hash a function."""
    pytest.importorskip("dill")
    require("torch")
    script = tmp_path / "script.py"
    script.write_text(
        "import arraybridge, dill, numpy as np\n"
        '@arraybridge.torch(output_type="numpy")\n'
        "def twice(x): return x * 2\n"
        '@arraybridge.torch(grad="flow")\n'
        "def thrice(x): return x * 3\n"
        "for one in (twice, thrice):\n"
        "    again = dill.loads(dill.dumps(one, recurse=True))\n"
        "    print(again(np.ones(2)).tolist())\n"
    )
    done = run_python(str(script), imported=True)
    assert (done.returncode, done.stdout) == (0, "[2.0, 2.0]\n[3.0, 3.0]\n"), done.stderr


def test_spawned_worker_runs_decorated_functions() -> None:
    require("torch")
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        both = pool.apply(cases.run_in_worker, (np.ones(2),))
    assert [r.tolist() for r in both] == [[2.0, 2.0], [2.0, 2.0]]


@pytest.mark.parametrize("name", HOST)
def test_eight_threads_call_one_function(name: str) -> None:
    require(name)
    barrier = threading.Barrier(8)
    run = decorator(name)(output_type="numpy")(lambda x: x + x)

    def work(i: int) -> bool:
        barrier.wait(30)
        x = np.full(100, float(i), np.float32)
        return all((run(x) == 2 * i).all() for _ in range(10))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


def test_errors_of_the_function_propagate_unchanged() -> None:
    error = ArrayNotSupportedError("my own")

    @arraybridge.numpy
    def fail(x: Any) -> Any:
        raise error

    with pytest.raises(ArrayNotSupportedError) as caught:
        fail(IMAGE)
    assert caught.value is error
    assert str(error) == "my own"


@pytest.mark.parametrize(
    ("options", "most"),
    [({}, 10), ({"output_type": "input"}, 19), ({"device": "cpu", "output_type": "input"}, 22)],
)
def test_calls_with_a_container_enter_few_functions(
    options: dict[str, Any], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first array is found at most once, without a traversal of the whole container."""
    if require("torch").version.cuda:
        pytest.skip("builds of PyTorch for CUDA enter more functions, to select the device and its stream")
    monkeypatch.setattr(decorated_call, "busy_workers", [])  # threads of earlier tests may still be ending
    plans_by_signature.clear()  # a plan that was made for the string "cpu" is compared with each `Device`
    fn = arraybridge.torch(**options)(lambda batch: batch["image"])
    batch = {"image": np.ones((4, 4), np.float32), "label": 3}
    calls: list[list[str]] = []

    def observe(frame: Any, event: str, _: Any) -> None:
        # `find_untraced_call` is called only after `torch._dynamo` was imported.
        if event == "call" and frame.f_code.co_name != "find_untraced_call":
            calls[-1].append(frame.f_code.co_name)

    for _ in range(5):
        calls.append([])
        sys.setprofile(observe)
        try:
            fn(batch)
        finally:
            sys.setprofile(None)
    # Plans are cached by the earlier calls, and during any call, garbage collection may run other functions.
    entered = min(calls, key=len)
    assert len(entered) <= most, " ".join(entered)
    assert entered.count("first_array_argument") <= 1
    assert "leaves_of" not in entered


def test_streams_are_entered_only_around_the_function() -> None:
    """Use a fake GPU framework, whose device and streams are entered around the function."""
    events: list[str] = []

    class Side(Streams):
        has_streams = True

        @contextlib.contextmanager
        def stream(self, device: Any) -> Iterator[None]:
            events.append(f"enter {device}")
            try:
                yield
            finally:
                events.append("leave")

    class Streamy(BoxFramework):
        streams = Side()

        def from_host(self, view: np.ndarray[Any, Any], device: Any) -> Box:
            events.append("convert")
            return Box(view)

    with registered(Streamy()) as streamy:
        result = streamy.decorator(output_type="numpy")(lambda box: events.append("run") or box)(np.ones(2))
        assert result.tolist() == [1.0, 1.0]
        assert events == ["convert", "enter cpu", "run", "leave"]
        with pytest.raises(ZeroDivisionError):
            streamy.decorator(lambda box: 1 // 0)(np.ones(2))
        assert events[-1] == "leave"
        events.clear()
        streamy.decorator(stream=False)(identity)(np.ones(2))  # stays on the caller's stream
        assert events == ["convert"]


@pytest.mark.parametrize("target", FRAMEWORKS)
def test_slice_by_slice_passes_planes(target: str) -> None:
    require(target)
    shapes = []

    class Filter:
        @decorator(target)(slice_by_slice=True, output_type="numpy")
        def double(self, x: Any, y: Any, name: str) -> Any:
            shapes.append((type(self), tuple(x.shape), tuple(y.shape), name))
            return x + y

    double, stack = Filter().double, np.arange(24, dtype=np.float32).reshape(4, 2, 3)
    assert double(stack, y=stack, name="n").tolist() == (2 * stack).tolist()
    assert shapes == [(Filter, (2, 3), (2, 3), "n")] * 4
    shapes.clear()
    assert double(IMAGE, IMAGE, "n").tolist() == (2 * IMAGE).tolist()
    assert len(shapes) == 1
    with pytest.raises(ValueError, match=r"different numbers of planes: \[4, 3\]"):
        double(stack, stack[1:], "n")
    with pytest.raises(ValueError, match="three axes"):
        arraybridge.numpy(slice_by_slice=True)(identity)(np.ones((2, 2, 2, 2)))


class Hungry:
    """A function that runs out of memory if a batch exceeds its limit."""

    def __init__(self, failures: int = 0, rows: int = 10**9) -> None:
        self.failures, self.rows, self.calls = failures, rows, 0

    def __call__(self, x: Any, max_retries: float = 2.0) -> Any:
        self.calls += 1
        if self.calls <= self.failures or len(x) > self.rows:
            raise MemoryError("simulated")
        return x * max_retries


@pytest.mark.parametrize("target", HOST)
def test_oom_recovery_retries_and_splits(target: str) -> None:
    require(target)
    hungry = Hungry(failures=2)
    # A parameter of the function may have the same name as an option of the recovery.
    run = decorator(target)(oom_recovery=True, output_type="numpy")(hungry)
    assert run(IMAGE, max_retries=2.0).tolist() == (2 * IMAGE).tolist()
    assert hungry.calls == 3
    hungry = Hungry(rows=3)
    batch = np.arange(20, dtype=np.float32).reshape(10, 2)
    run = decorator(target)(oom_recovery="split", output_type="input")(hungry)
    assert run(batch, max_retries=2.0).tolist() == (2 * batch).tolist()
    assert hungry.calls > 4
    for options, failures in (({"oom_recovery": True, "max_retries": 1}, 2), ({}, 1)):
        with pytest.raises(MemoryError, match="simulated"):
            decorator(target)(**options)(Hungry(failures=failures))(IMAGE)
    with pytest.raises(ZeroDivisionError):
        decorator(target)(oom_recovery=True)(lambda x: 1 // 0)(IMAGE)


@pytest.mark.parametrize("recovery", [True, "split"])
def test_failed_attempts_are_freed_before_the_next(recovery: Any) -> None:
    require("torch")
    brought: list[Any] = []
    alive: list[bool] = []

    class Net(np.ndarray):
        @arraybridge.torch(oom_recovery=recovery, output_type="numpy")
        def work(self, x: Any) -> Any:
            assert self.shape == (8,)  # self is never split
            alive.extend(ref() is not None for ref in brought)
            made = x + 1  # an array that this attempt created
            brought.extend((weakref.ref(x), weakref.ref(made)))
            if len(brought) < 4 or (recovery == "split" and len(x) > 2):
                raise MemoryError
            return x

    x = np.arange(4.0)
    for _ in range(2):
        arraybridge.torch(identity)(x)  # adds a plan to the cache
    assert np.ones(8).view(Net).work(x).tolist() == [0.0, 1.0, 2.0, 3.0]
    assert alive
    assert not any(alive)


@pytest.mark.parametrize("recovery", [True, "split"])
def test_oom_in_a_conversion_is_recovered(recovery: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    numpy = arraybridge.framework("numpy")
    cast, failures, sizes = numpy.cast, [0], []

    def scarce(x: Any, dtype: str) -> Any:
        sizes.append(len(x))
        if failures[0] or (recovery == "split" and len(x) > 2):
            failures[0] = max(0, failures[0] - 1)
            raise MemoryError("no memory")
        return cast(x, dtype)

    fn = arraybridge.numpy(dtype="float64", oom_recovery=recovery)(lambda x: x + 1)
    for _ in range(2):
        fn(np.arange(4, dtype=np.float32))  # adds a plan to the cache
    monkeypatch.setattr(numpy, "cast", scarce)
    failures[0] = 2 if recovery is True else 0
    assert fn(np.arange(4, dtype=np.float32)).tolist() == [1.0, 2.0, 3.0, 4.0]
    assert sizes[-2:] == ([4, 4] if recovery is True else [2, 2])
