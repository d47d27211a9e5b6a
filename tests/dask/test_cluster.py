"""Worker processes: how they are prepared, that they may lack a framework or die, and what imports bring."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import dask
import numpy as np
import pytest
from distributed import Client, LocalCluster

import arraybridge
from arraybridge import DeviceNotFoundError, FrameworkNotInstalledError, machine, placement
from arraybridge.dask import WorkerSetup, cluster, map_blocks, prepare, to_dask
from tests.conversion.scripts.blocker import hide
from tests.dask import functions
from tests.dask.functions import IMAGE, eight_rows
from tests.helpers import require, run_python, run_script

# Port 0: two runs at a time must not quarrel about 8787, which None stands for.
QUIET = {"threads_per_worker": 1, "dashboard_address": "127.0.0.1:0"}
COEXISTENCE = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_FORCE_GPU_ALLOW_GROWTH": "true"}


@contextmanager
def workers(number: int, **options: Any) -> Iterator[Client]:
    """Worker processes of `cluster`, as on a machine without cards, and a client that is nobody's default."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "cards", lambda: ())
        started = cluster(number, **QUIET, **options)
    with started, Client(started, set_as_default=False) as client:
        yield client


# -- a worker without the framework ------------------------------------------------------------------


def test_a_worker_without_the_framework() -> None:
    torch = require("torch")
    require("jax")

    @arraybridge.torch
    def says_no_name(x: Any) -> Any:
        return x + 1

    @arraybridge.torch
    def mentions_torch(x: Any) -> Any:
        return torch.add(x, 1)

    def plain_with_torch(x: Any) -> Any:
        return torch.from_numpy(x).numpy()

    with workers(1) as client:
        (address,) = client.scheduler_info()["workers"]
        client.run(hide, "torch", "tensorflow")
        for fn in (says_no_name, mentions_torch, plain_with_torch, functions.twice):
            with pytest.raises(FrameworkNotInstalledError) as caught:
                map_blocks(fn, eight_rows()).compute(scheduler=client)
            message = str(caught.value)
            for part in (f"{fn.__name__}()", address, "torch is not installed", '"torch>='):
                assert part in message
            assert isinstance(caught.value, ImportError)
            assert caught.value.target_type == "torch"
            assert "No module named 'torch'" in caught.value.reason
        with pytest.raises(FrameworkNotInstalledError, match="tensorflow>="):
            map_blocks(functions.tensorflow_mean, eight_rows()).compute(scheduler=client)
        # The worker goes on with what it has.
        result = map_blocks(functions.normalise, eight_rows()).compute(scheduler=client)
        assert abs(result[:4].mean()) < 1e-6


# -- a worker dies -----------------------------------------------------------------------------------


def test_a_worker_that_dies_is_replaced_and_its_work_done_again(tmp_path: Path) -> None:
    require("torch")
    marker = tmp_path / "died"
    image = to_dask(IMAGE, (3, 5))
    with workers(2) as client:
        before = set(client.run(functions.process).values())
        result = map_blocks(functions.dies_once, image, marker=str(marker)).compute(scheduler=client)
        client.wait_for_workers(2, timeout=60)
        after = set(client.run(functions.process).values())
    assert marker.exists()
    assert len(before - after) == 1
    np.testing.assert_array_equal(result, IMAGE * 2, strict=True)


# -- the scheduler -----------------------------------------------------------------------------------


def test_the_scheduler_needs_no_framework(tmp_path: Path) -> None:
    """What it opens of a graph mentions torch nowhere, not even where a function does."""
    torch = require("torch")

    @arraybridge.torch
    def by_value(x: Any) -> Any:
        return torch.add(x, 1)

    def graph_of(array: Any) -> dict[Any, Any]:
        (array,) = dask.optimize(array)
        return dict(array.__dask_graph__())

    for number, fn in enumerate((by_value, functions.twice)):
        carried = tmp_path / f"graph-{number}"
        carried.write_bytes(cloudpickle.dumps(graph_of(map_blocks(fn, eight_rows()))))
        done = run_script("dask_graph_opens_nothing.py", str(carried))
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == {"tasks": 2, "loaded": []}
    # Without the care that is taken it does: the check can fail.
    carried.write_bytes(cloudpickle.dumps({"x": by_value}))
    done = run_script("dask_graph_opens_nothing.py", str(carried))
    assert json.loads(done.stdout)["loaded"] == ["torch"]


# -- how workers are prepared ------------------------------------------------------------------------


def test_workers_are_prepared_before_a_framework_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*COEXISTENCE, "XLA_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)
    env = {"TF_FORCE_GPU_ALLOW_GROWTH": "false", "OF_THE_CALLER": "1"}
    with workers(2, fraction=0.25, env=env) as client:
        assert type(client.cluster) is LocalCluster
        assert len(client.scheduler_info()["workers"]) == 2
        assert set(client.nthreads().values()) == {1}
        loaded = client.run(functions.loaded, "torch", "jax", "tensorflow", "pyclesperanto")
        assert list(loaded.values()) == [[], []]
        for result in client.run(functions.environment).values():
            assert result["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
            assert result["XLA_CLIENT_MEM_FRACTION"] == "0.25"
            assert result["TF_FORCE_GPU_ALLOW_GROWTH"] == "false"
            assert result["OF_THE_CALLER"] == "1"
        assert set(client.run(functions.only_card).values()) == {None}
        # The plugin has been there: the workers know our arrays.
        assert client.run(functions.loaded, "arraybridge.dask.workers")
        assert list(client.run(functions.plugins).values()) == [["arraybridge"]] * 2


@pytest.mark.parametrize("fraction", [0, 1.5, -1])
def test_a_fraction_that_is_none(fraction: float) -> None:
    with pytest.raises(ValueError, match="no share of a card"):
        cluster(1, fraction=fraction, **QUIET)


def test_one_pool_needs_a_card() -> None:
    require("torch")
    if machine.cards():
        pytest.skip("there is a card")
    before = list(LocalCluster._instances)
    with pytest.raises(DeviceNotFoundError, match="torch has no device gpu:0"):
        cluster(1, share_memory=True, **QUIET)
    assert [one for one in LocalCluster._instances if one not in before] == []


# -- dask-cuda ---------------------------------------------------------------------------------------

CARD = machine.Card(0, "A card", "GPU-0", "0000:01:00.0", 1 << 34, (9, 0))


class LocalCUDACluster(LocalCluster):
    """What `cluster` relies on of the class of that name: each worker has a card in its environment."""

    def __init__(self, n_workers: int | None = None, threads_per_worker: int = 1, **options: Any) -> None:
        self.given = {"n_workers": n_workers, "threads_per_worker": threads_per_worker, **options}
        super().__init__(n_workers=0, threads_per_worker=threads_per_worker, **options)
        self.scale(2 if n_workers is None else n_workers)
        self.sync(self._correct_state)

    def new_worker_spec(self) -> dict[Any, Any]:
        ((name, spec),) = super().new_worker_spec().items()
        # In place of what the caller said, as there.
        options = {
            **spec["options"],
            "env": {"CUDA_VISIBLE_DEVICES": str(name)},
            "plugins": {functions.Marks()},
        }
        return {name: {**spec, "options": options}}


@pytest.fixture
def with_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cards", lambda: (CARD,))
    module = ModuleType("dask_cuda")
    module.LocalCUDACluster = LocalCUDACluster  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "dask_cuda", module)


@pytest.mark.usefixtures("with_cards")
def test_where_there_are_cards_each_has_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*COEXISTENCE, "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    env = {"OF_THE_CALLER": "1", "CUDA_VISIBLE_DEVICES": "7"}
    options = {"dashboard_address": "127.0.0.1:0", "plugins": [functions.Others()]}
    with cluster(env=env, fraction=0.5, **options) as started:
        assert isinstance(started, LocalCUDACluster)
        assert type(started).__name__ == "LocalCUDACluster"
        assert started.given == {
            "n_workers": None, "threads_per_worker": 1, "dashboard_address": "127.0.0.1:0"
        }  # fmt: skip
        with Client(started, set_as_default=False) as client:
            client.wait_for_workers(2, timeout=60)
            result = list(client.run(functions.environment).values())
            assert {one["CUDA_VISIBLE_DEVICES"] for one in result} == {"0", "1"}
            for one in result:
                assert COEXISTENCE.items() <= one.items()
                assert (one["XLA_CLIENT_MEM_FRACTION"], one["OF_THE_CALLER"]) == ("0.5", "1")
            assert set(client.run(functions.only_card).values()) == {0}
            assert list(client.run(functions.plugins).values()) == [["arraybridge", "mark", "others"]] * 2
    assert placement.only_card is None


@pytest.mark.usefixtures("with_cards")
def test_a_machine_with_cards_whose_processors_are_meant() -> None:
    with cluster(1, cards=False, **QUIET) as started, Client(started, set_as_default=False) as client:
        assert not isinstance(started, LocalCUDACluster)
        assert set(client.run(functions.only_card).values()) == {None}


def test_cards_without_dask_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cards", lambda: (CARD,))
    monkeypatch.setitem(sys.modules, "dask_cuda", None)
    before = list(LocalCluster._instances)
    with pytest.raises(FrameworkNotInstalledError, match=r"dask-cuda\[cu13\]") as caught:
        cluster(**QUIET)
    assert isinstance(caught.value, ImportError)
    assert caught.value.__cause__ is not None
    assert [one for one in LocalCluster._instances if one not in before] == []


# -- one worker, one card ----------------------------------------------------------------------------


@pytest.fixture
def _card_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "only_card", None)


@pytest.mark.usefixtures("_card_kept")
def test_when_the_first_card_is_the_only_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "dask_cuda", raising=False)
    for setup in (WorkerSetup(), WorkerSetup(own_card=False)):
        setup.setup(None)
        assert placement.only_card is None
    # dask-cuda in a process that is no worker says nothing.
    monkeypatch.setitem(sys.modules, "dask_cuda", ModuleType("dask_cuda"))
    map_blocks(lambda x: x, eight_rows()).compute(scheduler="synchronous")
    WorkerSetup(own_card=False).setup(None)
    assert placement.only_card is None
    assert [placement.card_meant(gpu_id) for gpu_id in (None, 7, "auto")] == [None, 7, "auto"]
    WorkerSetup().setup(None)
    assert placement.only_card == 0
    assert [placement.card_meant(gpu_id) for gpu_id in (None, 7, "auto")] == [None, 0, 0]
    assert "gpu:7" not in str(arraybridge.gpu(gpu_id=7)(lambda x: x).explain(np.zeros(1 << 20)))


def test_every_number_means_the_card_of_the_worker() -> None:
    """With OpenCL, which has two devices without a card."""
    require("pyclesperanto")
    with workers(1, env={"POCL_DEVICES": "pthread pthread"}) as client:

        def number(fn: Callable[..., Any]) -> float:
            result = map_blocks(fn, eight_rows()).compute(scheduler=client)
            (only,) = set(result.ravel().tolist())
            return float(only)

        assert number(functions.number_of_second) == 1
        client.register_plugin(WorkerSetup(own_card=True))
        assert set(client.run(functions.only_card).values()) == {0}
        assert number(functions.number_of_only) == 0
        # A function that has run before is no exception.
        assert number(functions.number_of_second) == 0


def test_a_cluster_that_was_started_otherwise() -> None:
    """map_blocks needs no plugin; one that is registered twice is there once."""
    require("torch")
    with LocalCluster(n_workers=1, **QUIET) as started, Client(started, set_as_default=False) as client:
        result = map_blocks(functions.twice, eight_rows()).compute(scheduler=client)
        np.testing.assert_array_equal(result, np.arange(0, 32, 2, np.float32).reshape(8, 2), strict=True)
        for _ in range(2):
            client.register_plugin(WorkerSetup())
        assert list(client.run(functions.plugins).values()) == [["arraybridge"]]
        assert set(client.run(functions.only_card).values()) == {None}
        prepare(client, own_card=True)  # the last word counts
        assert set(client.run(functions.only_card).values()) == {0}
        client.run(functions.pretend_dask_cuda)
        prepare(client, own_card=False)
        map_blocks(functions.twice, eight_rows() + 1).compute(scheduler=client)
        assert set(client.run(functions.only_card).values()) == {None}


# -- what an import brings along ---------------------------------------------------------------------


def test_nothing_else_imports_dask() -> None:
    root = Path(arraybridge.__file__).parent
    files = [file for file in root.rglob("*.py") if root / "dask" not in file.parents]
    imports = re.compile(r"^(import|from) (dask|distributed|cloudpickle|dask_cuda)\b", re.MULTILINE)
    assert imports.search((root / "dask" / "workers.py").read_text(encoding="utf-8")), "the check can fail"
    assert [file for file in files if imports.search(file.read_text(encoding="utf-8"))] == []
    done = run_script("loaded_after_import.py", "arraybridge", "arraybridge.dask", "arraybridge.dask.arrays")
    assert done.returncode == 0, done.stderr
    assert not set(json.loads(done.stdout)) & {"dask", "distributed", "cloudpickle", "dask_cuda"}


@pytest.mark.parametrize("missing", [("dask", "distributed"), ("distributed",), ("cloudpickle",)])
def test_without_dask(missing: tuple[str, ...]) -> None:
    done = run_script("dask_missing.py", *missing)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("FrameworkNotInstalledError: ")
    assert 'pip install "dask[array]"' in done.stdout


def test_what_a_worker_finds_when_it_imports_the_script() -> None:
    """The script that starts the cluster imports JAX at its top, and so does each worker, first of all."""
    require("jax")
    script = Path(__file__).parent / "scripts" / "imports_jax_first.py"
    done = run_python(str(script), timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["['True']"]
