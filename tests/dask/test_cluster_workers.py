"""Workers: their preparation, missing frameworks, errors, and data that is sent between them."""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from distributed import Client, LocalCluster
from distributed.protocol import deserialize, serialize

import arraybridge
from arraybridge import DeviceNotFoundError, FrameworkNotInstalledError, GradientError, hardware, shared
from arraybridge.conversion import device_resolution
from arraybridge.dask import (
    BlockError,
    cluster,
    map_blocks,
    prepare,
    recoveries,
    to_dask,
    worker_shared_memory,
)
from arraybridge.memory.segments import Exchange
from tests import matrix_data as data
from tests.conversion.scripts.blocker import hide
from tests.dask import functions
from tests.dask.functions import QUIET, bits, built, check_equal, computed, numbers
from tests.helpers import output_of, require
from tests.parallel.functions import filled

WHOLE = np.arange(12.0).reshape(3, 4)
COEXISTENCE = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_FORCE_GPU_ALLOW_GROWTH": "true"}
GPU = hardware.Gpu(0, "A card", "GPU-0", "0000:01:00.0", 1 << 34)
FRAMEWORKS = ("torch", "jax", "tensorflow", "pyclesperanto")


# -- preparation ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def worker() -> Iterator[tuple[Client, list[str], dict[str, str]]]:
    """Start a worker process as on a machine without GPUs; return its first imports and its environment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hardware, "gpus", lambda: ())
        for name in (*COEXISTENCE, "XLA_CLIENT_MEM_FRACTION"):
            patch.delenv(name, raising=False)
        env = {"TF_FORCE_GPU_ALLOW_GROWTH": "false", "POCL_DEVICES": "pthread pthread"}
        started = cluster(1, fraction=0.25, env=env, **QUIET)
        assert not os.environ.keys() & {*COEXISTENCE, "XLA_CLIENT_MEM_FRACTION"}, (
            "they must be set only in the worker"
        )
    with started, Client(started, set_as_default=False) as client:
        (first,) = client.run(functions.loaded, *FRAMEWORKS).values()
        (environment,) = client.run(functions.environment).values()
        yield client, first, environment


def test_workers_are_prepared_before_importing_a_framework(worker: Any) -> None:
    client, first, environment = worker
    assert type(client.cluster) is LocalCluster
    assert (len(client.nthreads()), set(client.nthreads().values())) == (1, {1})
    assert first == []
    assert environment["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    assert environment["XLA_CLIENT_MEM_FRACTION"] == "0.25"
    assert environment["TF_FORCE_GPU_ALLOW_GROWTH"] == "false", "env= of the caller must override coexist()"
    assert set(client.run(functions.only_gpu).values()) == {None}


def test_gpu_ids_refer_to_the_gpu_of_the_worker(worker: Any) -> None:
    """Use OpenCL, which has two devices without a GPU. `prepare` also affects functions that ran before."""
    require("pyclesperanto")
    client, *_ = worker
    rows = to_dask(np.zeros((2, 2), np.float32), chunks=1)
    assert set(computed(map_blocks(functions.number_of_second, rows), client).flat) == {1}
    prepare(client, own_gpu=True)  # the last setting applies
    try:
        assert set(computed(map_blocks(functions.number_of_second, rows), client).flat) == {0}
    finally:
        prepare(client, own_gpu=False)


def test_workers_without_the_framework_raise(worker: Any) -> None:
    torch = require("torch")
    client, *_ = worker

    @arraybridge.torch
    def mentions_torch(x: Any) -> Any:
        return torch.add(x, 1)

    (address,) = client.ncores()
    client.run(hide, "torch")
    with pytest.raises(FrameworkNotInstalledError) as caught:
        map_blocks(functions.twice, numbers()).compute(scheduler=client)
    for part in ("twice()", address, "torch is not installed", 'pip install "torch"'):
        assert part in str(caught.value)
    assert caught.value.target_type == "torch"
    assert "No module named 'torch'" in caught.value.reason
    with pytest.raises(ImportError, match="No module named 'torch'"):
        map_blocks(mentions_torch, numbers()).compute(scheduler=client)
    # The worker continues with its settings.
    check_equal(computed(map_blocks(lambda b: b + 1, numbers()), client), WHOLE + 1)


class LocalCUDACluster(LocalCluster):
    """A replacement for the class of that name, whose workers are threads of this process."""

    def __init__(self, n_workers: int | None = None, **options: Any) -> None:
        assert n_workers is None, "one worker per GPU"
        super().__init__(n_workers=1, processes=False, **options)


@pytest.fixture
def dask_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate dask-cuda and a GPU; settings that workers change in this process are restored."""
    module = ModuleType("dask_cuda")
    module.LocalCUDACluster = LocalCUDACluster  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "dask_cuda", module)
    monkeypatch.setattr(hardware, "gpus", lambda: (GPU,))
    monkeypatch.setattr(device_resolution, "only_gpu", None)
    for name in (*COEXISTENCE, "XLA_CLIENT_MEM_FRACTION", "CUPY_GPU_MEMORY_LIMIT", "OF_THE_CALLER"):
        monkeypatch.setenv(name, "")


@pytest.mark.usefixtures("dask_cuda")
def test_each_gpu_has_a_worker() -> None:
    with cluster(env={"OF_THE_CALLER": "1"}, fraction=0.5, **QUIET) as started:
        assert type(started) is LocalCUDACluster
        assert COEXISTENCE.items() <= os.environ.items()
        assert (os.environ["XLA_CLIENT_MEM_FRACTION"], os.environ["OF_THE_CALLER"]) == ("0.5", "1")
        assert device_resolution.only_gpu == 0
    with cluster(1, gpus=False, processes=False, **QUIET) as started:
        assert type(started) is LocalCluster
        assert device_resolution.only_gpu is None


@pytest.mark.usefixtures("dask_cuda")
def test_clusters_started_by_dask_are_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """dask-cuda's workers have one GPU each, and preparing them twice has no further effect."""
    with (
        LocalCluster(n_workers=1, processes=False, **QUIET) as started,
        Client(started, set_as_default=False) as client,
    ):
        # no plug-in is needed
        check_equal(computed(map_blocks(lambda b: b * 2, numbers()), client), WHOLE * 2)
        assert device_resolution.only_gpu is None
        meant = {}
        for own_gpu in (None, False, True):
            prepare(client, own_gpu=own_gpu, env={"OF_THE_CALLER": "2"})
            meant[own_gpu] = [device_resolution.gpu_index_of(gpu_id) for gpu_id in (None, 7, "auto")]
        assert meant == {None: [None, 0, 0], False: [None, 7, "auto"], True: [None, 0, 0]}
        assert os.environ["OF_THE_CALLER"] == "2"
        assert "gpu:7" not in str(arraybridge.gpu(gpu_id=7)(lambda x: x).explain(np.zeros(1 << 20)))
        monkeypatch.delitem(sys.modules, "dask_cuda")
        prepare(client)
        assert device_resolution.only_gpu is None
        assert [name for name in started.workers[0].plugins if name == "arraybridge"] == ["arraybridge"]


def test_invalid_cluster_options_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    before = list(LocalCluster._instances)
    for fraction in (0, 1.5, -1):
        with pytest.raises(ValueError, match="out of range"):
            cluster(1, fraction=fraction, **QUIET)
    if not hardware.gpus():
        require("torch")
        require("cupy")
        with pytest.raises(DeviceNotFoundError, match="torch has no device gpu:0"):
            cluster(1, share_memory=True, processes=False, **QUIET)
    monkeypatch.setattr(hardware, "gpus", lambda: (GPU,))
    monkeypatch.setitem(sys.modules, "dask_cuda", None)
    with pytest.raises(FrameworkNotInstalledError, match=r"dask-cuda\[cu13\]") as caught:
        cluster(**QUIET)
    assert caught.value.__cause__ is not None
    open_now = [one for one in LocalCluster._instances if one.status.name == "running"]
    assert [one for one in open_now if one not in before] == []


@pytest.mark.parametrize("n_workers", ["two", True, 1.5, 0, -1])
def test_invalid_numbers_of_workers_raise(n_workers: Any) -> None:
    error = ValueError if type(n_workers) is int else TypeError
    with pytest.raises(error, match=rf"^n_workers={n_workers!r} must be .*at least 1\.$"):
        cluster(n_workers, **QUIET)


def test_options_of_the_wrong_type_raise() -> None:
    with pytest.raises(TypeError, match=r"^gpus='yes' must be None, True or False\.$"):
        cluster(1, gpus="yes", **QUIET)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^share_memory='yes' must be True or False\.$"):
        cluster(1, gpus=False, share_memory="yes", **QUIET)  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match=r"^env=5 must be a dict of environment variables, such as \{'NAME': 'v"
    ):
        cluster(1, gpus=False, env=5, **QUIET)  # type: ignore[arg-type]


def test_prepare_expects_a_client() -> None:
    with pytest.raises(TypeError, match=r"expected a distributed\.Client, got str"):
        prepare("scheduler:8786")


def test_cluster_without_dask_raises() -> None:
    lines = (
        "from tests.conversion.scripts.blocker import hide",
        "hide('cloudpickle')",
        "import arraybridge.dask",
        "try: arraybridge.dask.map_blocks",
        "except arraybridge.FrameworkNotInstalledError as error: print(error)",
    )
    assert 'pip install "dask[array]"' in output_of(*lines)
    with pytest.raises(AttributeError, match="has no attribute 'map_block'"):
        arraybridge.dask.map_block  # noqa: B018


# -- functions and errors ------------------------------------------------------------------------------


def test_results_on_workers_equal_the_plain_call(two_workers: Client) -> None:
    """test_block_functions.py checks the other frameworks, whose import takes a long time, in threads."""
    require("torch")
    functions.check_filter("torch", two_workers)


def test_kinds_of_functions_on_workers(two_workers: Client) -> None:
    torch = require("torch")
    weights = np.array([1, 2], np.float32)

    @arraybridge.torch
    def by_value(x: Any, factor: float = 1) -> Any:
        """Use an imported module, a closure variable and a default, which are pickled with the function."""
        return torch.multiply(x, float(weights[1]) * factor)

    for fn in (
        by_value,
        lambda b: b + b,
        arraybridge.gpu(lambda b: b + b),
        functools.partial(functions.twice),
        functions.Model(2).scaled,
        functools.partial(np.multiply, 2),
    ):
        check_equal(computed(map_blocks(fn, numbers()), two_workers), WHOLE * 2)


ERRORS: dict[str, tuple[type[Exception], str, str]] = {
    "one_row": (BlockError, r"one_row\(\) returned a block of shape \(1, 2\)", "numpy"),
    "with_graph": (GradientError, r"with_graph\(\).*torch\.no_grad\(\)", "numpy"),
    "on_a_gpu_that_is_not_there": (DeviceNotFoundError, "gpu:99", "torch"),
}


def test_errors_arrive_with_their_class_and_attributes(two_workers: Client) -> None:
    def failing(b: Any) -> Any:
        raise ZeroDivisionError("raised in the block")

    require("torch")
    for name, (cls, words, target) in ERRORS.items():
        with pytest.raises(cls, match=words) as caught:
            map_blocks(getattr(functions, name), numbers()).compute(scheduler=two_workers)
        assert type(caught.value) is cls
        assert caught.value.target_type == target  # type: ignore[attr-defined]
    with pytest.raises(ZeroDivisionError) as division:
        map_blocks(failing, numbers()).compute(scheduler=two_workers)
    assert str(division.value) == "raised in the block"


# -- transfers and messages ----------------------------------------------------------------------------


def facts(x: Any) -> tuple[str, str, tuple[int, ...], bytes]:
    return data.framework_of(x), data.dtype_name(x), tuple(x.shape), bits(x)


def make(framework: str, dtype: str) -> list[Any]:
    require(framework)
    return [data.build(framework, "aligned", dtype).array]


def first_of(items: list[Any]) -> Any:
    return items[0]


# test_array_registration.py checks all frameworks and dtypes without processes.
@pytest.mark.parametrize(("framework", "dtype"), [("torch", "bfloat16"), ("jax", "uint64")])
def test_arrays_travel_between_workers(framework: str, dtype: str, two_workers: Client) -> None:
    source = built(framework, "aligned", dtype)
    first, second = two_workers.ncores()
    kept = two_workers.scatter(source.array, workers=[first], hash=False)
    expected = (framework, dtype, source.shape, source.values)
    # From its worker to the other one, and back to the client.
    on_the_other = two_workers.submit(facts, kept, workers=[second], pure=False)
    assert on_the_other.result() == expected
    assert facts(kept.result()) == expected
    # An array that one worker made inside a list, and that the other one used.
    made = two_workers.submit(make, framework, dtype, workers=[first], pure=False)
    moved = two_workers.submit(first_of, made, workers=[second], pure=False)
    assert facts(moved.result()) == expected


@pytest.mark.skipif(sys.platform != "linux", reason="mappings are counted in /proc")
@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
def test_large_values_travel_between_workers_in_shared_memory(framework: str, two_workers: Client) -> None:
    """Check arrays, containers and objects; small values use Dask's own transfer."""
    require(framework)
    first, second = two_workers.ncores()
    whole = np.arange(1 << 18, dtype=np.float64)
    for place in ("itself", "in a dict", "in an object", "small"):
        made = two_workers.submit(functions.made, framework, place, workers=[first], pure=False)
        moved = two_workers.submit(functions.used, made, workers=[second], pure=False)
        values, is_shared, is_writable = moved.result()
        np.testing.assert_array_equal(values, whole[: len(values)])
        # PyTorch's own pickle copies the values.
        by_torch = (framework, place) == ("torch", "in an object")
        is_copied = place == "small" or by_torch
        assert (len(values), is_shared) == (10 if place == "small" else 1 << 18, not is_copied)
        assert is_writable == (framework != "jax")
        del made, moved
    assert arraybridge.detect_memory_type(two_workers.submit(functions.made, framework).result()) == framework


def test_shared_arrays_are_sent_as_a_location(two_workers: Client) -> None:
    x = shared(np.zeros((4, 1000)))
    result = two_workers.submit(filled, x[1]).result()
    assert np.shares_memory(result, x)
    assert x.sum() == 1000
    assert deserialize(*serialize(x[1, :3])).tolist() == [1, 1, 1]  # as Dask spills to disk


@pytest.fixture
def no_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_shared_memory, "_exchange", Exchange())
    monkeypatch.setattr(worker_shared_memory, "_exported", {})


LARGE = np.ones(1 << 20)


@pytest.mark.usefixtures("no_exchange")
def test_unreturned_memory_is_not_exported_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is not returned in time is dropped, since its reader may have been killed.

    A slow reader then requests it again.
    """
    one, two = (worker_shared_memory.import_exported(*worker_shared_memory.export(LARGE)) for _ in range(2))
    one[:] = 0
    assert one.sum() == 0
    assert two.sum() == LARGE.sum() == LARGE.size
    del one, two
    assert len(worker_shared_memory._exchange.segments) == 2
    monkeypatch.setattr(worker_shared_memory, "_exchange", Exchange())
    monkeypatch.setattr(worker_shared_memory, "_TIMEOUT", 0.0)
    (lost, _), _ = worker_shared_memory.export(LARGE), worker_shared_memory.export(LARGE)
    assert len(worker_shared_memory._exchange.segments) == 1
    with pytest.raises(EOFError, match="Keep the array until it has arrived"):
        worker_shared_memory.import_exported(lost, [])
    monkeypatch.setattr(worker_shared_memory, "_MAX_EXPORTED", 0)
    header, frames = worker_shared_memory.export(LARGE)
    assert worker_shared_memory.import_exported(header, frames).sum() == LARGE.sum()
    assert sum(map(len, frames)) == LARGE.nbytes, "the frames must contain the bytes"


def test_workers_on_other_hosts_receive_bytes() -> None:
    worker = SimpleNamespace(rpc=SimpleNamespace(deserializers=None))
    worker_shared_memory.register_memory(worker, {"arraybridge-elsewhere"})
    assert worker.rpc.deserializers is None
    header, frames = serialize(LARGE, ("arraybridge-elsewhere", "dask"))
    assert header["serializer"] == "dask"
    worker_shared_memory.register_memory(worker, {"arraybridge-elsewhere", worker_shared_memory.reach()})
    header, frames = serialize([LARGE, "word", {"a": LARGE}], worker.rpc.deserializers)
    assert sum(map(len, frames)) < 1000
    one, word, two = deserialize(header, frames, worker.rpc.deserializers)
    assert (one.sum(), word, two["a"].sum()) == (LARGE.sum(), "word", LARGE.sum())
    header, frames = serialize(threading.Lock(), worker.rpc.deserializers)
    with pytest.raises(TypeError, match="Could not serialize"):
        deserialize(header, frames, worker.rpc.deserializers)


def test_blocks_that_do_not_fit_are_split_on_the_worker(two_workers: Client) -> None:
    require("torch")
    whole = np.arange(64, dtype=np.float32).reshape(32, 2)
    before = two_workers.run(functions.begin_simulation, 2)
    own = recoveries()
    try:
        result = map_blocks(functions.plus_one, to_dask(whole, (8, 2))).compute(scheduler=two_workers)
    finally:
        two_workers.run(functions.end_simulation)
    check_equal(result, whole + 1)
    after = two_workers.run(recoveries)
    gained = {step: sum(after[w][step] - before[w][step] for w in after) for step in ("retry", "split")}
    # Each of the four blocks: 8 rows, 8 again, then 4, then 2 and 2 and 2 and 2.
    assert gained == {"retry": 4, "split": 8}
    assert recoveries() == own
    logs = two_workers.get_worker_logs()
    for name, counts in after.items():
        lines = [message for _, message in logs[name] if "ran out of memory" in message]
        assert len(lines) == sum(counts.values())
        if counts["split"]:
            assert any("8 rows" in line and "4 rows at a time" in line for line in lines)
