"""Dask on a real GPU: one worker per GPU, relative device numbers, and chunks that stay on the GPU.

With `ARRAYBRIDGE_REQUIRE=gpu,cupy,torch,jax pytest -m gpu`, a missing GPU or framework is a failure. Tests
that need dask-cuda skip without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import detect_memory_type, device_of, hardware
from tests.helpers import output_of, require, require_two_gpus

# Importing dask-cuda and its dependencies emits warnings that do not concern arraybridge.
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default::DeprecationWarning", "default::FutureWarning"),
]

pytest.importorskip("dask", reason="dask is not installed")
pytest.importorskip("distributed", reason="distributed is not installed")

from distributed import Client  # noqa: E402

from arraybridge.dask import cluster, from_dask, map_blocks, to_dask  # noqa: E402
from tests.dask import functions  # noqa: E402

WHOLE = np.arange(48, dtype=np.float32).reshape(8, 6)
ADDRESS = "127.0.0.1:0"  # a free port


@pytest.fixture(scope="module")
def one_worker_per_gpu() -> Iterator[Client]:
    require("dask_cuda")
    with cluster(dashboard_address=ADDRESS) as started, Client(started, set_as_default=False) as client:
        client.wait_for_workers(len(hardware.gpus()), timeout=120)
        yield client


def cupy_image() -> Any:
    return to_dask(require("cupy").asarray(WHOLE), chunks=(4, 3))


# -- without dask-cuda ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["torch", "cupy", "jax"])
def test_cupy_chunks_stay_on_the_gpu(name: str) -> None:
    cupy = require("cupy")
    require(name)
    seen = []

    @arraybridge.framework(name).decorator
    def doubled(x: Any) -> Any:
        seen.append((detect_memory_type(x), str(device_of(x))))
        return x * 2

    array = cupy_image()
    assert array.chunks == ((4, 4), (3, 3))
    # Host functions are also moved to the worker's GPU.
    lazy = [map_blocks(doubled, array), map_blocks(arraybridge.numpy(lambda x: x * 2), array)]
    assert seen == []
    assert [isinstance(one._meta, cupy.ndarray) for one in (array, *lazy)] == [True] * 3
    for result in (lazy[0].compute(scheduler="threads"), from_dask(lazy[1], "cupy")):
        assert isinstance(result, cupy.ndarray)
        np.testing.assert_array_equal(result.get(), WHOLE * 2, strict=True)
    assert seen == [(name, "gpu:0")] * 4


@pytest.mark.parametrize("loaded_first", [True, False], ids=["after CuPy", "before CuPy"])
def test_blocks_are_joined_on_their_gpu(loaded_first: bool) -> None:
    """Check blocks of the second GPU, and of both, while the first one is current."""
    require_two_gpus()
    said = output_of(
        "import numpy as np, arraybridge as ab" + (", cupy" if loaded_first else ""),
        "from arraybridge.dask import from_dask, map_blocks, to_dask",
        "import dask.array as da",
        "host = np.arange(48.0).reshape(8, 6)",
        "x = to_dask(ab.to_cupy(host, 1), chunks=(4, 3))",
        "y = map_blocks(ab.cupy(lambda block: block + 1), x)",
        "z = da.concatenate([x, to_dask(ab.to_cupy(host + 2, 0), chunks=(4, 3))])",
        "da.dispatch.take_lookup.dispatch(type(x._meta))  # by which Dask registers all its functions",
        "for lazy, expected in ((x, host), (y, host + 1), (z, [*host, *(host + 2)])):",
        "    for whole in (lazy.compute(scheduler='threads'), from_dask(lazy, 'cupy')):",
        "        print(ab.device_of(whole), (whole.get() == expected).all())",
        "block = from_dask(y.blocks[0, 0], 'cupy'); print(ab.device_of(block), block.get().sum() == 132)",
    )
    assert said.splitlines() == ["gpu:1 True"] * 7


# -- LocalCUDACluster ----------------------------------------------------------------------------------


def test_cluster_starts_one_worker_per_gpu(one_worker_per_gpu: Client) -> None:
    from dask_cuda import LocalCUDACluster

    assert isinstance(one_worker_per_gpu.cluster, LocalCUDACluster)
    assert len(one_worker_per_gpu.ncores()) == len(hardware.gpus())
    assert set(one_worker_per_gpu.nthreads().values()) == {1}
    assert set(one_worker_per_gpu.run(functions.only_gpu).values()) == {0}
    first = set()
    for found in one_worker_per_gpu.run(functions.environment).values():
        assert found["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
        assert found["TF_FORCE_GPU_ALLOW_GROWTH"] == "true"
        first.add(found["CUDA_VISIBLE_DEVICES"].partition(",")[0])
    # Each worker starts with its own GPU.
    assert len(first) == len(hardware.gpus())


@pytest.mark.parametrize("gpu_id", [0, 1, "auto"])
@pytest.mark.parametrize("name", ["torch", "cupy"])
def test_gpu_ids_refer_to_the_gpu_of_the_worker(name: str, gpu_id: Any, one_worker_per_gpu: Client) -> None:
    """Check chunks of NumPy and chunks of CuPy, which keep their type."""
    cupy = require("cupy")
    require(name)

    @arraybridge.framework(name).decorator(gpu_id=gpu_id)
    def plus_one(x: Any) -> Any:
        assert (detect_memory_type(x), str(device_of(x))) == (name, "gpu:0")
        return x + 1

    for array in (to_dask(WHOLE, chunks=(2, 3)), cupy_image()):
        result = map_blocks(plus_one, map_blocks(plus_one, array)).compute(scheduler=one_worker_per_gpu)
        assert type(result) is type(array._meta)
        np.testing.assert_array_equal(cupy.asnumpy(result), WHOLE + 2, strict=True)
