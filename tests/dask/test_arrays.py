"""What Dask learns of arrays: their sizes, their tokens, and how they travel and spill."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import arraybridge
from tests import matrix_data as data
from tests.dask.functions import bits, built
from tests.helpers import require, run_python

pytest.importorskip("distributed")

import dask
from dask.base import tokenize
from dask.sizeof import sizeof
from distributed import Client, wait
from distributed.protocol import deserialize, deserialize_bytes, serialize, serialize_bytelist, to_serialize
from distributed.protocol.core import dumps, loads

from arraybridge.dask import cluster
from arraybridge.dask.arrays import register_transport, save

register_transport()  # as `cluster` does

PROGRAMS = Path(__file__).parent / "scripts" / "array_programs.py"
FRAMEWORKS = ("torch", "jax", "tensorflow", "pyclesperanto")


def program(*arguments: str, **env: str) -> Any:
    """What a program of array_programs.py found."""
    done = run_python(str(PROGRAMS), *arguments, env=env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def pairs(*layouts: str) -> list[Any]:
    """Every framework with every dtype and each of the layouts that it can have."""
    return [
        pytest.param(framework, layout, dtype, id=f"{framework}-{layout}-{dtype}")
        for framework in FRAMEWORKS
        for layout in layouts
        for dtype in data.DTYPES
        if data.inexpressible(framework, layout, dtype) is None
    ]


def float32(framework: str, *shape: int) -> Any:
    """An array of 0, 1, 2, … made by the framework itself."""
    return own_array(framework, np.arange(math.prod(shape), dtype=np.float32).reshape(shape))


def own_array(framework: str, values: np.ndarray[Any, Any]) -> Any:
    """These values in an array that the framework's own call makes."""
    module = require(framework)
    match framework:
        case "torch":
            return module.tensor(values)
        case "jax":
            return module.numpy.array(values)
        case "tensorflow":
            return module.constant(values)
        case _:
            return module.push(values)


def through_the_wire(x: Any, split: int | None = None) -> Any:
    """What arrives of an object: as bytes in pieces, as a socket carries them."""
    options = {} if split is None else {"frame_split_size": split}
    frames = dumps({"x": to_serialize(x)}, **options)
    # A socket knows bytes alone, and hands out memory of its own.
    return loads([bytearray(memoryview(frame).tobytes()) for frame in frames])["x"]


def same_array(got: Any, expected: data.Source) -> bool:
    """Whether framework, dtype, shape and every bit are as expected."""
    return (
        data.framework_of(got) == data.framework_of(expected.array)
        and data.dtype_name(got) == data.dtype_name(expected.array)
        and tuple(got.shape) == expected.shape
        and bits(got) == expected.values
    )


# -- sizes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_an_array_of_forty_megabytes_has_forty_megabytes(framework: str) -> None:
    assert sizeof(float32(framework, 1000, 10_000)) == pytest.approx(40_000_000, rel=0.01)


@pytest.mark.parametrize(("framework", "layout", "dtype"), pairs("aligned", "C"))
def test_sizes_of_all_dtypes(framework: str, layout: str, dtype: str) -> None:
    assert sizeof(built(framework, layout, dtype).array) == 24 * data.numpy_dtype(dtype).itemsize


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_sizes_inside_containers(framework: str) -> None:
    arrays = [float32(framework, 500, 500) for _ in range(3)]  # 1 MB each
    assert sizeof(arrays) == pytest.approx(3_000_000, rel=0.01)
    assert sizeof({"a": arrays[0], "b": (arrays[1], [arrays[2]])}) == pytest.approx(3_000_000, rel=0.01)


def test_sizes_of_torch_views() -> None:
    torch = require("torch")
    whole = torch.zeros(1000, 1000)
    assert sizeof(whole[:10]) == 40_000
    assert sizeof(whole.T) == 4_000_000
    assert sizeof(whole[::2, ::2]) == 1_000_000
    assert sizeof(torch.zeros(0, 3)) == 0
    assert sizeof(torch.zeros(())) == 4
    assert sizeof(torch.zeros(1).expand(1000, 1000)) == 4, "one element in memory, a million in shape"


def test_size_of_a_torch_leaf_with_its_gradient() -> None:
    torch = require("torch")
    leaf = torch.zeros(1000, requires_grad=True)
    assert sizeof(leaf) == 4000
    (leaf * 2).sum().backward()
    assert sizeof(leaf) == 8000
    parameter = torch.nn.Parameter(torch.zeros(1000))
    assert sizeof(parameter) == 4000


def test_size_of_a_tensorflow_variable() -> None:
    tf = require("tensorflow")
    assert sizeof(tf.Variable(tf.zeros((1000, 1000)))) == pytest.approx(4_000_000, rel=0.01)


def test_sizes_of_64_bits_in_jax() -> None:
    jax = require("jax")
    with data.x64(jax):
        wide = jax.numpy.zeros(1000, dtype="float64")
    assert sizeof(wide) == 8000


def test_size_and_token_of_what_has_no_dense_bytes() -> None:
    torch = require("torch")
    for odd in (torch.eye(3).to_sparse(), torch.zeros(3, device="meta")):
        assert sizeof(odd) > 0
        assert tokenize(odd)
    tf = require("tensorflow")
    assert sizeof(tf.constant(["a", "b"])) > 0
    assert tokenize(tf.constant(["a"])) != tokenize(tf.constant(["b"]))


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_dask_knows_the_sizes_where_nobody_imports_arraybridge(framework: str) -> None:
    require(framework)
    found = program("sizes", framework)
    assert found["bytes"] == 40_000_000
    assert found["loaded before"] == [], "the entry point loads no framework"
    assert framework in found["loaded after"], "the line above, and the test below, can fail"
    assert not found["dask module"]


@pytest.mark.parametrize("module", ["arraybridge.dask.workers", "arraybridge.dask.arrays", "dask.sizeof"])
def test_no_framework_is_loaded_by_what_teaches_dask(module: str) -> None:
    found = set(program("loaded", module))
    assert found <= {"cupy"}, "dask.array itself imports CuPy, where it is installed"
    assert not found or module == "arraybridge.dask.workers"


# -- the order of imports ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "steps",
    [
        # Of each kind one: torch is there, and Dask's own answers are in use, or are registered afterwards;
        # torch comes later; the entry point comes first; Dask registers its own for the sake of torchvision.
        ["torch", "distributed", "use", "arraybridge.dask.workers", "use"],
        ["torch", "arraybridge.dask.workers", "distributed.protocol.torch"],
        ["arraybridge.dask.workers", "torch"],
        ["dask.sizeof", "use", "arraybridge.dask.workers"],
        ["arraybridge.dask.workers", "torchvision"],
        ["torchvision", "arraybridge.dask.workers"],
        # Easier ones of these kinds.
        pytest.param(["dask", "distributed", "torch", "arraybridge.dask.workers"], marks=pytest.mark.slow),
        pytest.param(["torch", "dask", "arraybridge.dask.workers"], marks=pytest.mark.slow),
        pytest.param(["torch", "arraybridge.dask.workers", "torchvision"], marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_the_registration_holds_in_every_order(steps: list[str]) -> None:
    require("torch")
    assert program("order", *steps) == {"bytes": 4000, "same token": True, "same bits": True}


# -- tokens ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("framework", "layout", "dtype"), pairs("aligned"))
def test_equal_arrays_have_equal_tokens_and_a_changed_bit_another(
    framework: str, layout: str, dtype: str
) -> None:
    source, again = built(framework, layout, dtype), built(framework, layout, dtype)
    token = tokenize(source.array)
    assert tokenize(again.array) == token
    assert tokenize(again.array, ensure_deterministic=True) == token
    if again.flip is not None and framework == "torch":
        again.flip()
        assert tokenize(again.array) != token
        again.flip()
        assert tokenize(again.array) == token


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_any_other_array_has_another_token(framework: str) -> None:
    values = np.array([[0, 0, 0, 0], [1, 2, 3, 4]], np.float32)
    changed = values.copy()
    changed.view(np.uint32)[0, 0] = 0x80000000  # -0.0, which equals 0.0
    others = [
        values,
        changed,
        values.reshape(4, 2),
        values.reshape(2, 4, 1),
        values[:1],
        values.view(np.int32),
    ]
    tokens = {tokenize(own_array(framework, x)) for x in others}
    assert len(tokens) == len(others)
    assert tokenize(own_array(framework, values.copy())) in tokens, "an equal array is no other"


def test_tokens_tell_dtypes_with_equal_bytes_apart() -> None:
    torch = require("torch")
    zeros = [torch.zeros(4, dtype=dtype) for dtype in (torch.int32, torch.float32, torch.uint32)]
    assert len({tokenize(x) for x in zeros}) == 3


def test_tokens_tell_frameworks_apart() -> None:
    there = [name for name in FRAMEWORKS if importlib.util.find_spec(name) is not None]
    tokens = {tokenize(float32(name, 2, 3)) for name in there}
    assert len(tokens) == len(there) > 1
    assert tokenize(np.arange(6, dtype=np.float32).reshape(2, 3)) not in tokens


def test_tokens_mind_gradients_and_not_strides() -> None:
    torch = require("torch")
    x = torch.arange(12.0).reshape(3, 4)
    assert tokenize(x.T.contiguous().T) == tokenize(x)
    assert tokenize(torch.arange(24.0).reshape(3, 8)[:, ::2]) == tokenize(x * 2)
    assert tokenize(torch.ones(1).expand(5)) == tokenize(torch.ones(5))
    assert tokenize(x.clone().requires_grad_(True)) != tokenize(x)
    z = torch.complex(x, x)
    assert tokenize(z.conj()) == tokenize(torch.complex(x, -x)) != tokenize(z), "the conj bit is resolved"


def test_tokens_mind_the_device() -> None:
    jax = require("jax")
    first, last = jax.devices("cpu")[0], jax.devices("cpu")[-1]
    if first == last:
        pytest.skip("JAX has one device here")
    x = jax.numpy.arange(5.0)
    assert tokenize(jax.device_put(x, first)) != tokenize(jax.device_put(x, last))


@pytest.fixture(scope="module")
def tokens_elsewhere() -> Any:
    """Tokens of arrays, and of functions before and after a call, in another process."""
    for name in ("torch", "jax"):
        require(name)
    there = [name for name in ("torch", "jax", "tensorflow") if importlib.util.find_spec(name) is not None]
    return program("tokens", *there, PYTHONHASHSEED="1")


def test_tokens_are_the_same_in_another_process(tokens_elsewhere: Any) -> None:
    found = tokens_elsewhere["arrays"]
    assert {"torch", "jax"} <= set(found)
    assert found == {name: tokenize(built(name, "aligned", "float32").array) for name in found}


@arraybridge.numpy
def on_numpy(x: Any) -> Any:
    return x + 1


@arraybridge.torch(device="cpu")
def on_torch(x: Any) -> Any:
    return x + 1


@arraybridge.gpu
def on_gpu(x: Any) -> Any:
    return x + 1


@pytest.mark.parametrize("function", [on_numpy, on_torch, on_gpu], ids=["numpy", "torch", "gpu"])
def test_decorated_functions_have_deterministic_tokens(function: Callable[..., Any]) -> None:
    require("torch")
    token = tokenize(function, ensure_deterministic=True)
    x = np.arange(4, dtype=np.float32)
    np.testing.assert_array_equal(np.asarray(function(x)), x + 1)
    assert tokenize(function, ensure_deterministic=True) == token


# -- serialization -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("framework", "layout", "dtype"), pairs("aligned", "0-d", "zero-size", "5-D"))
def test_every_dtype_travels_bit_for_bit(framework: str, layout: str, dtype: str) -> None:
    source = built(framework, layout, dtype)
    header, frames = serialize(source.array)
    assert header["serializer"] == "dask"
    assert same_array(deserialize(header, frames), source)
    assert same_array(through_the_wire(source.array), source)
    (array,), inside = through_the_wire([[source.array], {"x": (source.array,)}])
    assert same_array(array, source)
    assert same_array(inside["x"][0], source)


LAYOUTS = ("C", "fortran", "transposed", "strided", "broadcast", "offset", "unaligned", "size-one")


@pytest.mark.parametrize(
    ("framework", "layout", "dtype"),
    [pair for pair in pairs(*LAYOUTS) if pair.values[2] in ("float32", "complex128", "bfloat16")],
)
def test_every_layout_travels_bit_for_bit(framework: str, layout: str, dtype: str) -> None:
    source = built(framework, layout, dtype)
    assert same_array(through_the_wire(source.array), source)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_values_by_hand(framework: str) -> None:
    """NaN with a payload, -0.0, the smallest subnormal and the largest number."""
    words = np.array([0x7FC01234, 0xFFC00001, 0x80000000, 0x00000001, 0x7F7FFFFF, 0xFF800000], np.uint32)
    array = own_array(framework, words.view(np.float32))
    assert bits(array) == words.tobytes()
    assert bits(through_the_wire(array)) == words.tobytes()


def test_the_top_of_uint64() -> None:
    top = 2**64 - 1
    torch, jax, tf = (require(name) for name in ("torch", "jax", "tensorflow"))
    assert through_the_wire(torch.tensor([top], dtype=torch.uint64)).tolist() == [top]
    assert through_the_wire(tf.constant([top], tf.uint64)).numpy().tolist() == [top]
    with data.x64(jax):
        wide = jax.numpy.array([top, 2**32 + 5], dtype="uint64")
    back = through_the_wire(wide)  # x64 is off again
    assert back.dtype == np.uint64
    assert np.asarray(back).tolist() == [top, 2**32 + 5]


def test_lazy_bits_of_torch_are_resolved() -> None:
    torch = require("torch")
    z = torch.tensor([1 + 2j, 3 - 4j])
    assert z.conj().is_conj()
    assert through_the_wire(z.conj()).tolist() == [1 - 2j, 3 + 4j]
    negative = z.conj().imag
    assert negative.is_neg()
    assert through_the_wire(negative).tolist() == [-2.0, 4.0]


def test_gradients_travel() -> None:
    torch = require("torch")
    leaf = torch.tensor([1.0, 2.0], dtype=torch.bfloat16, requires_grad=True)
    back = through_the_wire(leaf)
    assert back.requires_grad
    assert back.is_leaf
    assert back.grad is None
    (leaf * torch.tensor([3.0, 5.0])).sum().backward()
    back = through_the_wire({"leaf": leaf})["leaf"]
    assert back.grad.tolist() == [3.0, 5.0]
    assert back.grad.dtype == torch.bfloat16
    (back * 2).sum().backward()  # it can be trained on
    assert back.grad.tolist() == [5.0, 7.0]
    assert leaf.grad.tolist() == [3.0, 5.0], "the original is untouched"


def test_a_result_of_a_graph_arrives_as_a_leaf() -> None:
    torch = require("torch")
    result = torch.ones(2, requires_grad=True) * 2
    back = through_the_wire(result)
    assert back.tolist() == [2.0, 2.0]
    assert back.requires_grad
    assert back.is_leaf


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parameters_and_modules_still_travel(dtype: str) -> None:
    torch = require("torch")
    parameter = torch.nn.Parameter(torch.tensor([1.0, 2.0], dtype=getattr(torch, dtype)))
    back = through_the_wire(parameter)
    assert type(back) is torch.nn.Parameter
    assert back.requires_grad
    assert back.tolist() == [1.0, 2.0]
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.ReLU()).to(getattr(torch, dtype))
    for got in (through_the_wire(module), through_the_wire([module])[0]):
        x = torch.ones(1, 3, dtype=getattr(torch, dtype))
        assert torch.equal(got(x), module(x))
        assert got(x).requires_grad


class Measurement:
    """An object of the user's own that holds arrays."""

    def __init__(self, *arrays: Any) -> None:
        self.arrays = arrays


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_arrays_travel_inside_any_object(framework: str) -> None:
    # Not by arraybridge: pickle asks the array itself, and no more than that is promised.
    dtypes = ("float32",) if framework == "pyclesperanto" else ("float32", "bfloat16", "complex64")
    sources = [built(framework, "aligned", dtype) for dtype in dtypes]
    back = through_the_wire(Measurement(*(source.array for source in sources)))
    assert type(back) is Measurement
    for array, source in zip(back.arrays, sources, strict=True):
        assert same_array(array, source)


def test_64_bits_of_jax_inside_any_object() -> None:
    """JAX's own pickle narrows them where x64 is off."""
    jax = require("jax")
    with data.x64(jax):
        wide = jax.numpy.array([2**64 - 1, 2**32 + 5], dtype="uint64")
    assert sizeof(wide) == 16  # Dask has met one, in case JAX was imported after arraybridge.dask
    (back,) = through_the_wire(Measurement(wide)).arrays
    assert np.asarray(back).tolist() == [2**64 - 1, 2**32 + 5]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_what_arrives_is_complete_and_may_be_written_to(framework: str) -> None:
    array = float32(framework, 64, 64)
    header, frames = serialize(array)
    received = [bytearray(memoryview(frame).tobytes()) for frame in frames]
    back = deserialize(header, received)
    if framework == "torch":
        back += 1
        assert array[0, 1] == 1.0, "the original is untouched"
        assert back[0, 1] == 2.0
    del received
    assert back.shape == (64, 64)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("split", [1000, 4096, 1 << 20])
def test_frames_that_are_split_in_transport(framework: str, split: int) -> None:
    array = float32(framework, 300, 200)
    expected = np.arange(60_000, dtype=np.float32)
    frames = dumps({"x": to_serialize(array)}, frame_split_size=split)
    assert len(frames) > 240_000 // split
    back = through_the_wire([array, Measurement(array)], split)
    for one in (back[0], back[1].arrays[0]):
        assert bits(one) == expected.tobytes()
    data_again = deserialize_bytes(b"".join(serialize_bytelist(array)))
    assert bits(data_again) == expected.tobytes()


def test_an_array_comes_back_on_its_device() -> None:
    jax = require("jax")
    last = jax.devices("cpu")[-1]
    x = jax.device_put(jax.numpy.arange(5.0), last)
    assert through_the_wire(x).devices() == {last}


def test_a_device_that_is_not_there_is_replaced() -> None:
    require("torch")
    header, frames = save(float32("torch", 3))
    header = {**header, "device": "gpu:97"}
    from arraybridge.dask.arrays import load

    assert load(header, frames).tolist() == [0.0, 1.0, 2.0]


def test_a_tensorflow_variable_stays_a_variable() -> None:
    tf = require("tensorflow")
    back = through_the_wire(tf.Variable([1.0, 2.0]))
    assert isinstance(back, tf.Variable)
    assert back.numpy().tolist() == [1.0, 2.0]


def test_what_only_pickle_can_carry_is_left_to_pickle() -> None:
    """Without arraybridge these travel, by pickle; so they do with it."""
    tf, jax = require("tensorflow"), require("jax")
    assert through_the_wire(tf.constant(["a", "b"])).numpy().tolist() == [b"a", b"b"]
    key = jax.random.key(7)
    back = through_the_wire(key)
    assert jax.random.key_data(back).tolist() == jax.random.key_data(key).tolist()
    ragged = tf.ragged.constant([[1], [2, 3]])
    assert through_the_wire(ragged).to_list() == [[1], [2, 3]]


def test_save_refuses_what_is_no_array() -> None:
    with pytest.raises(TypeError, match="of type str is no array"):
        save("text")


# -- between processes -------------------------------------------------------------------------------


def spilled_bytes(dask_worker: Any) -> tuple[int, int]:
    """Bytes of memory that a worker takes its data for, and bytes of what is on the disk."""
    return dask_worker.data.memory.total_weight, dask_worker.data.spilled_total.memory


def ramp(i: int, framework: str) -> Any:
    """20 MB, each array another one."""
    values = np.arange(5_000_000, dtype=np.float32)
    values[0] = -i
    return arraybridge.convert_memory(values, framework)


def check_ramp(x: Any, i: int) -> bool:
    values = np.asarray(arraybridge.convert_memory(x, "numpy"))
    return bool(values[0] == -i and (values[1:] == np.arange(1, 5_000_000, dtype=np.float32)).all())


def ignore_sizes() -> None:
    """Let Dask take every torch tensor for as large as it did without arraybridge."""
    import torch

    sizeof.register(torch.Tensor, sys.getsizeof)


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_worker_spills_arrays_and_reads_them_back(framework: str) -> None:
    """500 MB for a worker that may keep 100 MB: Dask sees by the sizes alone that it has to spill."""
    require(framework)
    # What the whole process holds decides nothing here: the frameworks' libraries alone are large.
    memory = {"target": 0.1, "spill": False, "pause": False, "terminate": False}
    with (
        dask.config.set({f"distributed.worker.memory.{key}": value for key, value in memory.items()}),
        cluster(1, threads_per_worker=1, memory_limit=10**9, dashboard_address=":0") as made,
        Client(made) as client,
    ):
        arrays = client.map(ramp, range(25), framework=framework, pure=False)
        wait(arrays, timeout=120)
        assert all(future.status == "finished" for future in arrays)
        ((in_memory, on_disk),) = client.run(spilled_bytes).values()
        assert in_memory <= 101_000_000
        assert on_disk >= 399_000_000
        right = client.gather([client.submit(check_ramp, x, i) for i, x in enumerate(arrays)])
        assert right == [True] * 25


def test_without_the_sizes_nothing_is_spilled() -> None:
    """The test above can fail: 80 bytes an array, as Dask alone sees it, are never too much."""
    require("torch")
    memory = {"target": 0.1, "spill": False, "pause": False, "terminate": False}
    with (
        dask.config.set({f"distributed.worker.memory.{key}": value for key, value in memory.items()}),
        cluster(1, threads_per_worker=1, memory_limit=10**9, dashboard_address=":0") as made,
        Client(made) as client,
    ):
        client.run(ignore_sizes)
        wait(client.map(ramp, range(10), framework="torch", pure=False), timeout=120)
        ((in_memory, on_disk),) = client.run(spilled_bytes).values()
        assert in_memory < 10_000
        assert on_disk == 0


def test_the_round_trips_can_fail() -> None:
    """Dask's own answer for torch, put in the place of ours, fails where ours does not."""
    torch = require("torch")
    from distributed.protocol import torch as own

    source = built("torch", "aligned", "bfloat16")
    assert same_array(through_the_wire(source.array), source)
    with pytest.raises(TypeError, match="BFloat16"):
        own.serialize_torch_Tensor(source.array)
    flipped = through_the_wire(source.array).clone()
    flipped.view(torch.uint8)[0] ^= 1
    assert not same_array(flipped, source)


# -- more than values --------------------------------------------------------------------------------


def test_what_is_more_than_its_values_is_another() -> None:
    torch, jax = require("torch"), require("jax")
    boxes, other = torch.ones(2), torch.ones(2)
    boxes.format, other.format = "xyxy", "cxcywh"
    assert tokenize(boxes) != tokenize(other)
    assert through_the_wire(boxes).format == "xyxy"
    assert tokenize(torch.nn.Parameter(torch.ones(2))) != tokenize(torch.ones(2, requires_grad=True))
    weak, strong = jax.numpy.asarray(2.0), jax.numpy.asarray(2.0, dtype="float32")
    assert (weak.weak_type, strong.weak_type) == (True, False)
    assert tokenize(weak) != tokenize(strong)
