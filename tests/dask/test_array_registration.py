"""Dask's handling of arrays: their sizes, tokens, transfer and spilling."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import arraybridge
from tests import matrix_data as data
from tests.dask.functions import QUIET, bits, built
from tests.helpers import output_of, require

pytest.importorskip("distributed")

import dask
from dask.base import tokenize
from dask.sizeof import sizeof
from distributed import Client, LocalCluster, wait
from distributed.protocol import deserialize, serialize, to_serialize
from distributed.protocol.core import dumps, loads

from arraybridge.dask.array_registration import register_transport
from arraybridge.memory.serialization import load, save

register_transport()  # as `cluster` does

FRAMEWORKS = ("torch", "jax", "tensorflow", "pyclesperanto")


def pairs(layouts: tuple[str, ...], dtypes: tuple[str, ...] = data.DTYPES) -> list[Any]:
    """Return every framework with each dtype and layout that it supports."""
    return [
        pytest.param(framework, layout, dtype, id=f"{framework}-{layout}-{dtype}")
        for framework in FRAMEWORKS
        for layout in layouts
        for dtype in dtypes
        if not data.inexpressible(framework, layout, dtype)
    ]


def float32(framework: str, *shape: int) -> Any:
    """Return an array of 0, 1, 2, … created by the framework itself."""
    return own_array(framework, np.arange(math.prod(shape), dtype=np.float32).reshape(shape))


def own_array(framework: str, values: np.ndarray[Any, Any]) -> Any:
    """Return these values in an array created by the framework's own call."""
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
    """Return an object as a receiver gets it after serialization into frames of bytes."""
    options = {} if split is None else {"frame_split_size": split}
    frames = dumps({"x": to_serialize(x)}, **options)
    # A socket only carries bytes, and the receiver allocates new memory.
    return loads([bytearray(memoryview(frame).tobytes()) for frame in frames])["x"]


def same_array(array: Any, source: data.Source) -> bool:
    """Return whether framework, dtype, shape and every bit are as expected."""
    return (
        data.framework_of(array) == data.framework_of(source.array)
        and data.dtype_name(array) == data.dtype_name(source.array)
        and tuple(array.shape) == source.shape
        and bits(array) == source.values
    )


class Measurement:
    """A user's object that holds arrays."""

    def __init__(self, *arrays: Any) -> None:
        self.arrays = arrays


# -- sizes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_sizeof_reports_the_bytes_of_an_array(framework: str) -> None:
    array = float32(framework, 1000, 10_000)
    assert sizeof(array) == pytest.approx(40_000_000, rel=0.01)
    assert sizeof({"a": (array, [array])}) == pytest.approx(80_000_000, rel=0.01)


def test_sizes_of_torch_views() -> None:
    torch = require("torch")
    matrix = torch.zeros(1000, 1000)
    assert [sizeof(x) for x in (matrix[:10], matrix.T, matrix[::2, ::2])] == [40_000, 4_000_000, 1_000_000]
    assert [sizeof(x) for x in (torch.zeros(0, 3), torch.zeros(()))] == [0, 4]
    assert sizeof(torch.nn.Parameter(torch.zeros(1000))) == 4000


def test_size_and_token_of_arrays_without_dense_bytes() -> None:
    torch, tf = require("torch"), require("tensorflow")
    for odd in (torch.eye(3).to_sparse(), torch.zeros(3, device="meta"), tf.constant(["a"])):
        assert sizeof(odd) > 0
        assert tokenize(odd)
    assert tokenize(tf.constant(["a"])) != tokenize(tf.constant(["b"]))


def test_dask_registration_without_importing_arraybridge() -> None:
    """Also check an import of arraybridge after Dask has used its own functions."""
    torch = require("torch")
    sent = torch.tensor([1.0, -0.0, 3.0], dtype=torch.bfloat16)
    lines = (
        "import json, sys, dask.array; before = 'torch' in sys.modules",
        "import torch; from dask.sizeof import sizeof; from dask.tokenize import tokenize",
        "from distributed.protocol import deserialize, serialize",
        "size = sizeof(torch.zeros(1000, 10_000)); tokenize(torch.zeros(3)); serialize(torch.zeros(3))",
        "early = 'arraybridge.dask.cluster_workers' in sys.modules",
        "import arraybridge.dask.cluster_workers; arraybridge.dask.array_registration.register_transport()",
        "sent = torch.tensor([1.0, -0.0, 3.0], dtype=torch.bfloat16); back = deserialize(*serialize(sent))",
        "same = torch.equal(sent.view(torch.int16), back.view(torch.int16))",
        "others = [name for name in ('jax', 'pyclesperanto', 'tensorflow') if name in sys.modules]",
        "print(json.dumps([before, size, early, tokenize(sent), same, others]))",
    )
    assert json.loads(output_of(*lines)) == [False, 40_000_000, False, tokenize(sent), True, []]


# -- tokens ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_only_equal_arrays_have_equal_tokens(framework: str) -> None:
    values = np.array([[0, 0, 0, 0], [1, 2, 3, 4]], np.float32)
    changed = values.copy()
    changed.view(np.uint32)[0, 0] = 0x80000000  # -0.0, which equals 0.0
    reshaped = (values.reshape(4, 2), values.reshape(2, 4, 1), values[:1], values.view(np.int32))
    arrays = [values, changed, *reshaped]
    tokens = {tokenize(own_array(framework, x)) for x in arrays}
    assert len(tokens) == len(arrays)
    assert tokenize(own_array(framework, values.copy())) in tokens, "equal arrays must have equal tokens"
    assert tokenize(values) not in tokens


def test_tokens_depend_on_gradients_attributes_and_devices() -> None:
    torch, jax = require("torch"), require("jax")
    x = torch.arange(12.0).reshape(3, 4)
    assert tokenize(x.T.contiguous().T) == tokenize(x)
    assert tokenize(x.clone().requires_grad_(True)) != tokenize(x)
    z = torch.complex(x, x)
    assert tokenize(z.conj()) == tokenize(torch.complex(x, -x)) != tokenize(z), "conj bit"
    boxes, other = torch.ones(2), torch.ones(2)
    boxes.format, other.format = "xyxy", "cxcywh"
    assert tokenize(boxes) != tokenize(other)
    assert through_the_wire(boxes).format == "xyxy"
    assert tokenize(torch.nn.Parameter(torch.ones(2))) != tokenize(torch.ones(2, requires_grad=True))
    assert tokenize(jax.numpy.asarray(2.0)) != tokenize(jax.numpy.asarray(2.0, dtype="float32")), "weak type"
    first, *_, last = jax.devices("cpu")
    ramp = jax.numpy.arange(5.0)
    assert tokenize(jax.device_put(ramp, first)) != tokenize(jax.device_put(ramp, last))
    assert through_the_wire(jax.device_put(ramp, last)).devices() == {last}


# -- transfer ----------------------------------------------------------------------------------------


LAYOUTS = ("C", "fortran", "transposed", "strided", "broadcast", "offset", "unaligned", "size-one")


@pytest.mark.parametrize(
    ("framework", "layout", "dtype"),
    [*pairs(("aligned", "0-d", "zero-size", "5-D")), *pairs(LAYOUTS, ("float32", "complex128", "bfloat16"))],
)
def test_every_dtype_travels_bit_for_bit(framework: str, layout: str, dtype: str) -> None:
    source = built(framework, layout, dtype)
    if layout not in LAYOUTS:
        assert sizeof(source.array) == len(source.values)
    token = tokenize(source.array, ensure_deterministic=True)
    assert tokenize(built(framework, layout, dtype).array) == token
    assert serialize(source.array)[0]["serializer"] == "dask"
    (array,), inside = through_the_wire([[source.array], {"x": (source.array,)}])
    assert same_array(array, source)
    assert same_array(inside["x"][0], source)
    assert tokenize(array) == token


def test_64_bit_jax_arrays_travel_while_x64_is_off() -> None:
    """Also check arrays inside an object: JAX's own pickle narrows them."""
    jax = require("jax")
    values = [2**64 - 1, 2**32 + 5]
    with data.x64(jax):
        wide = jax.numpy.array(values, dtype="uint64")
    assert sizeof(wide) == 16
    for back in (through_the_wire(wide), through_the_wire(SimpleNamespace(array=wide)).array):
        assert back.dtype == np.uint64
        assert np.asarray(back).tolist() == values


def test_gradients_travel() -> None:
    torch = require("torch")
    leaf = torch.tensor([1.0, 2.0], dtype=torch.bfloat16, requires_grad=True)
    back = through_the_wire(leaf)
    assert (back.requires_grad, back.is_leaf, back.grad) == (True, True, None)
    (leaf * torch.tensor([3.0, 5.0])).sum().backward()
    back = through_the_wire({"leaf": leaf})["leaf"]
    assert back.grad.tolist() == [3.0, 5.0]
    assert back.grad.dtype == torch.bfloat16
    (back * 2).sum().backward()  # the parameter is still trainable
    assert back.grad.tolist() == [5.0, 7.0]
    assert leaf.grad.tolist() == [3.0, 5.0], "the original must not change"
    result = through_the_wire(leaf * 2)
    assert (result.tolist(), result.requires_grad, result.is_leaf) == ([2.0, 4.0], True, True)
    parameter = through_the_wire(torch.nn.Parameter(torch.tensor([1.0, 2.0])))
    assert (type(parameter), parameter.requires_grad) == (torch.nn.Parameter, True)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_arrays_travel_inside_objects_and_split_frames(framework: str) -> None:
    # arraybridge does not handle arrays inside objects: pickle calls the arrays' own methods.
    dtypes = ("float32",) if framework == "pyclesperanto" else ("float32", "bfloat16", "complex64")
    sources = [built(framework, "aligned", dtype) for dtype in dtypes]
    back = through_the_wire(Measurement(*(source.array for source in sources)))
    assert type(back) is Measurement
    assert all(same_array(*pair) for pair in zip(back.arrays, sources, strict=True))
    array = float32(framework, 300, 200)
    assert len(dumps({"x": to_serialize(array)}, frame_split_size=4096)) > 240_000 // 4096
    direct, inside = through_the_wire([array, Measurement(array)], 4096)
    for copy in (direct, inside.arrays[0]):
        assert bits(copy) == np.arange(60_000, dtype=np.float32).tobytes()


def test_received_arrays_are_writable() -> None:
    array = float32("torch", 64, 64)
    header, frames = serialize(array)
    back = deserialize(header, [bytearray(memoryview(frame).tobytes()) for frame in frames])
    back += 1
    assert (array[0, 1], back[0, 1]) == (1.0, 2.0)


def test_missing_devices_are_replaced() -> None:
    header, frames = save(float32("torch", 3))
    assert load({**header, "device": "gpu:97"}, frames).tolist() == [0.0, 1.0, 2.0]


def test_objects_that_need_pickle_travel_by_pickle() -> None:
    """Check objects that Dask pickles, with or without arraybridge."""
    tf, jax = require("tensorflow"), require("jax")
    assert through_the_wire(tf.constant(["a", "b"])).numpy().tolist() == [b"a", b"b"]
    key = jax.random.key(7)
    assert jax.random.key_data(through_the_wire(key)).tolist() == jax.random.key_data(key).tolist()
    assert through_the_wire(tf.ragged.constant([[1], [2, 3]])).to_list() == [[1], [2, 3]]
    variable = through_the_wire(tf.Variable([1.0, 2.0]))
    assert isinstance(variable, tf.Variable)
    assert variable.numpy().tolist() == [1.0, 2.0]


# -- spilling ----------------------------------------------------------------------------------------


def test_workers_spill_arrays_and_read_them_back() -> None:
    """Send 100 MB to a worker limited to 20 MB: Dask decides only by the sizes to spill."""
    require("torch")
    # The memory of the whole process is ignored, because the frameworks' libraries are large.
    memory = {"target": 0.02, "spill": False, "pause": False, "terminate": False}
    with (
        dask.config.set({f"distributed.worker.memory.{key}": value for key, value in memory.items()}),
        LocalCluster(1, processes=False, memory_limit=10**9, **QUIET) as started,
        Client(started) as client,
    ):
        arrays = client.map(lambda i: float32("torch", 10**6) - i, range(25), pure=False)
        wait(arrays)
        held = started.workers[0].data
        assert held.memory.total_weight <= 20_100_000
        assert held.spilled_total.memory >= 79_900_000
        expected = np.arange(10**6, dtype=np.float32)
        for i, future in enumerate(arrays):
            np.testing.assert_array_equal(arraybridge.to_numpy(future.result()), expected - i)
