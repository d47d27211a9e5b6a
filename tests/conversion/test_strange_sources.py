"""Sources that are not what they seem: without memory of their own, with less of it, or with another's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import (
    ArrayNotSupportedError,
    CopyRequiredError,
    GradientError,
    MemoryConversionError,
    UnknownArrayError,
    convert_memory,
    explain,
)
from tests import matrix_data
from tests.helpers import require, run_python

TARGETS = ("numpy", "jax", "tensorflow")


# ---- torch: storage that is missing, or was taken away ---------------------------------------------------


def refused_everywhere(x: Any, targets: tuple[str, ...], error: type[Exception], **options: Any) -> str:
    message = ""
    for target in targets:
        for call in (convert_memory, explain, convert_memory):
            with pytest.raises(error) as caught:
                call(x, target, **options)
            message = str(caught.value)
    return message


@pytest.mark.parametrize("target", TARGETS)
def test_tensors_under_functionalize_have_no_memory(target: str) -> None:
    torch = require("torch")
    require(target)
    convert_memory(torch.ones(4), target)  # so that the fast path is taken
    told: list[str] = []

    def body(x: Any) -> Any:
        told.append(refused_everywhere(x, (target,), ArrayNotSupportedError))
        told.append(refused_everywhere(x + 1, (target,), ArrayNotSupportedError))
        told.append(refused_everywhere(x, (target,), ArrayNotSupportedError, copy=True))
        return x + 1

    out = torch.func.functionalize(body)(torch.arange(4.0))
    assert out.tolist() == [1.0, 2.0, 3.0, 4.0]
    assert all("torch.func" in message for message in told)
    assert len(told) == 3


@pytest.mark.parametrize("target", TARGETS)
def test_a_storage_that_was_taken_away_is_not_read(target: str) -> None:
    torch = require("torch")
    require(target)
    convert_memory(torch.ones(4), target)  # so that the fast path is taken
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.arange(1000).to(dtype)
        x.untyped_storage().resize_(0)
        for options in ({}, {"copy": True}, {"copy": False}, {"device": "cpu"}):
            assert "storage" in refused_everywhere(x, (target,), ArrayNotSupportedError, **options)
    assert convert_memory(x, "torch") is x
    with pytest.raises(ArrayNotSupportedError, match="storage"):
        convert_memory(x, "torch", copy=True)


@pytest.mark.parametrize("target", TARGETS)
def test_gradients_are_asked_for_also_where_none_are_recorded(target: str) -> None:
    torch = require("torch")
    require(target)
    leaf = torch.ones(3, requires_grad=True)
    result = leaf * 2
    parameter = torch.nn.Parameter(torch.ones(2))
    convert_memory(torch.ones(3), target)
    convert_memory(torch.nn.Parameter(torch.ones(2), requires_grad=False), target)
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            for x in (leaf, result, parameter):
                assert "detach" in refused_everywhere(x, (target,), GradientError)
                got = convert_memory(x, target, grad="detach")
                assert matrix_data.bits(got) == x.detach().numpy().tobytes()


@pytest.mark.parametrize("target", TARGETS)
def test_a_fake_tensor_has_no_values(target: str) -> None:
    torch = require("torch")
    require(target)
    from torch._subclasses.fake_tensor import FakeTensorMode

    real = torch.ones(3)
    with FakeTensorMode():
        for call in (convert_memory, explain):
            with pytest.raises(MemoryConversionError, match="FakeTensor"):
                call(real, target)
        fake = torch.zeros(3)
        inside = refused_everywhere(fake, (target,), ArrayNotSupportedError)
    outside = refused_everywhere(fake, (target,), ArrayNotSupportedError)
    for message in (inside, outside):
        assert "FakeTensorMode" in message
        assert "convert to numpy first" not in message


def test_a_tensor_that_is_spread_over_processes_is_named() -> None:
    torch = require("torch")
    distributed = pytest.importorskip("torch.distributed")
    tensors = pytest.importorskip("torch.distributed.tensor")
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = tensors.init_device_mesh("cpu", (1,))
        spread = tensors.distribute_tensor(torch.arange(4.0), mesh, [tensors.Shard(0)])
        message = refused_everywhere(spread, ("numpy",), ArrayNotSupportedError)
        assert convert_memory(spread, "torch") is spread
        assert convert_memory(spread.to_local(), "numpy").tolist() == [0, 1, 2, 3]
    finally:
        distributed.destroy_process_group()
    assert "DTensor" in message
    assert "to_local()" in message
    assert "full_tensor()" in message


@pytest.mark.parametrize("target", TARGETS)
def test_a_real_tensor_where_only_fake_ones_may_be(target: str) -> None:
    torch = require("torch")
    require(target)
    from torch._subclasses.fake_tensor import FakeTensorMode

    x = torch.ones(3)
    with FakeTensorMode(), pytest.raises(MemoryConversionError, match="torch"):
        convert_memory(x, target)


def test_a_tensor_spread_over_processes_is_called_so() -> None:
    require("torch")
    done = run_python(
        "-c",
        "import torch.distributed as dist, torch, arraybridge\n"
        "from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "x = distribute_tensor(torch.arange(6.0), init_device_mesh('cpu', (1,)), [Shard(0)])\n"
        "try: arraybridge.to_numpy(x)\n"
        "except arraybridge.MemoryConversionError as error: print(error)\n"
        "dist.destroy_process_group()",
    )
    assert "DTensor" in done.stdout, done.stderr
    assert "x.to_local()" in done.stdout
    assert "x.full_tensor()" in done.stdout


# ---- NumPy: whose memory it is ---------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["torch", "jax", "tensorflow"])
def test_numpy_resizes_nothing_that_a_consumer_reads(target: str) -> None:
    require(target)
    owner = np.arange(4096.0)
    for source in (owner, owner[-owner.ctypes.data % 64 // 8 :]):
        result = convert_memory(source, target)
        del source
        with pytest.raises(ValueError, match="resize"):
            owner.resize(1 << 16)
        del result


# ---- NumPy to torch, and copies within NumPy -------------------------------------------------------------


def odd_strides() -> dict[str, np.ndarray]:
    raw = np.arange(64, dtype=np.uint8)
    values = raw.view(np.float32)[:4]
    as_strided = np.lib.stride_tricks.as_strided
    return {
        "odd": as_strided(values, (4, 1), (4, 7)),
        "negative": as_strided(values, (1, 4), (-3, 4)),
        "negative multiple": as_strided(values, (1, 2, 2), (-8, 8, 4)),
        "between": as_strided(values, (2, 1, 2), (8, 5, 4)),
        "alone": as_strided(values, (1,), (3,)),
        "strided too": as_strided(values, (2, 1), (8, 9)),
    }


@pytest.mark.parametrize("kind", odd_strides())
def test_an_axis_of_one_element_has_no_stride_to_mind(kind: str) -> None:
    require("torch")
    array = odd_strides()[kind]
    for _ in range(2):
        shared = convert_memory(array, "torch", copy=False)
        assert tuple(shared.shape) == array.shape
        assert shared.numpy().tobytes() == array.tobytes()
        assert shared.data_ptr() == array.__array_interface__["data"][0]
        assert convert_memory(array, "torch", copy=True).numpy().tobytes() == array.tobytes()
    assert explain(array, "torch").shares_memory


@pytest.mark.parametrize("code", ["longlong", "ulonglong", "long", "ulong"])
@pytest.mark.parametrize("target", ["torch", "jax", "tensorflow"])
def test_c_types_of_one_size_are_one(target: str, code: str) -> None:
    require(target)
    array = np.arange(5, dtype=code) + np.array(2**62, code)
    for copy in (None, True):
        for _ in range(2):
            result = convert_memory(array, target, copy=copy)
            assert matrix_data.bits(result) == array.tobytes()
            assert matrix_data.dtype_name(result) == array.dtype.name


def whatever_numpy_holds() -> dict[str, np.ndarray]:
    found = {
        "objects": np.array([[1], None], object),
        "fields": np.zeros(3, [("a", "i4"), ("b", object)]),
        "nested": np.zeros(2, [("a", [("b", object)])]),
        "plain fields": np.ones(2, [("a", "i4"), ("b", "f8")]),
        "V0": np.zeros(3, "V0"),
        "V5": np.zeros(3, "V5"),
        "U0": np.zeros(2, "U0"),
        "strings": np.array(["a", "bc"]),
        "bytes": np.array([b"a"]),
        "dates": np.array(["2020-01-01"], "M8[D]"),
        "empty": np.zeros((0, 3), object),
        "big-endian": np.arange(3, dtype=">i4"),
        "masked": np.ma.masked_array([1.0, 2.0], [True, False]),
    }
    if hasattr(np.dtypes, "StringDType"):
        found["StringDType"] = np.array(["a", "longer than a short string is"], np.dtypes.StringDType())
    return found


@pytest.mark.parametrize("kind", whatever_numpy_holds())
def test_numpy_copies_whatever_it_holds(kind: str) -> None:
    array = whatever_numpy_holds()[kind]
    assert convert_memory(array, "numpy") is array
    for _ in range(2):
        twin = convert_memory(array, "numpy", copy=True)
        assert twin is not array
        assert type(twin) is type(array)
        assert twin.dtype == array.dtype
        assert twin.tolist() == array.tolist()
        assert not (array.nbytes and np.shares_memory(twin, array))


# ---- JAX -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["numpy", "torch", "jax", "tensorflow"])
def test_a_deleted_array_is_refused_by_name(target: str) -> None:
    require("jax")
    require(target)
    import jax.numpy as jnp

    def gone() -> Any:
        x = jnp.arange(4.0) + 1
        x.delete()
        return x

    refused_everywhere(gone(), (target,), ArrayNotSupportedError)
    convert_memory(jnp.arange(4.0), target)
    for options in ({}, {"copy": True}, {"device": "cpu"}):
        refused_everywhere(gone(), (target,), ArrayNotSupportedError, **options)
    with pytest.raises(ArrayNotSupportedError):
        arraybridge.device_of(gone())


def sharded(replicated: bool = False) -> Any:
    jax = require("jax")
    if len(jax.devices("cpu")) < 2:
        pytest.skip("one CPU device: XLA_FLAGS names no more")
    mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:2]), ("x",))
    spec = jax.sharding.PartitionSpec(None if replicated else "x")
    return jax.device_put(np.arange(8.0, dtype=np.float32), jax.sharding.NamedSharding(mesh, spec))


@pytest.mark.parametrize("replicated", [False, True])
@pytest.mark.parametrize("device", ["cpu:0", "cpu", "cpu:1"])
def test_a_sharded_array_goes_to_the_device_that_is_asked_for(device: str, replicated: bool) -> None:
    x = sharded(replicated)
    for _ in range(2):
        result = convert_memory(x, "jax", device=device)
        assert [str(arraybridge.Device("cpu", d.id)) for d in result.devices()] == [
            str(arraybridge.Device.parse(device))
        ]
        assert np.asarray(result).tolist() == list(range(8))
    route = explain(x, "jax", device=device)
    assert (route.method, route.copies) == ("host", 1)
    with pytest.raises(CopyRequiredError):
        convert_memory(x, "jax", device=device, copy=False)


def test_a_sharded_array_stays_where_it_is_unless_asked() -> None:
    x = sharded()
    assert convert_memory(x, "jax") is x
    assert convert_memory(x, "jax", "jax") is x
    here = arraybridge.to_cpu(x)
    assert len(here.devices()) == 1
    assert np.asarray(here).tolist() == list(range(8))


# ---- other libraries -------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["numpy", "torch", "jax", "tensorflow"])
def test_bytes_that_were_handed_out_are_a_copy(target: str) -> None:
    require(target)
    picture = Picture(np.arange(12, dtype=np.uint8).reshape(3, 4))
    for _ in range(2):
        route = explain(picture, target)
        assert (route.shares_memory, route.copies, route.source) == (False, 1, "numpy")
        result = convert_memory(picture, target)
        assert matrix_data.bits(result) == bytes(range(12))
        for call in (convert_memory, explain):
            with pytest.raises(CopyRequiredError, match="bytes"):
                call(picture, target, copy=False)
    if target == "numpy":
        result[0, 0] = 9
        assert picture.values[0, 0] == 0


class OnCard:
    """An array of numba's, say."""

    __cuda_array_interface__ = {"shape": (2,), "typestr": "<f4", "data": (64, True), "version": 3}  # noqa: RUF012


@pytest.mark.parametrize("call", [convert_memory, explain])
def test_an_array_of_a_card_without_a_driver_is_refused_by_name(call: Any) -> None:
    require("cupy")
    if arraybridge.framework("cupy").devices():
        pytest.skip("there is a card")
    with pytest.raises(ArrayNotSupportedError, match=r"CUDA array.*copy it to the host") as caught:
        call(OnCard(), "numpy")
    assert caught.value.__cause__ is not None


class Picture:
    """As Pillow's images: each question makes bytes anew."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    @property
    def __array_interface__(self) -> dict[str, Any]:
        bits, kind = self.values.tobytes(), self.values.dtype.str
        return {"shape": self.values.shape, "typestr": kind, "version": 3, "data": bits}


def test_an_interface_of_the_object_itself_is_seen() -> None:
    require("torch")

    class Plain:
        pass

    held = np.arange(6.0)
    for name in ("__array_interface__", "both"):
        thing: Any = Plain()
        thing.__array_interface__ = held.__array_interface__
        thing.kept = held
        if name == "both":
            thing.__dlpack__ = held.__dlpack__
            thing.__dlpack_device__ = held.__dlpack_device__
        assert arraybridge.detect_memory_type(thing) == "numpy"
        assert convert_memory(thing, "torch").data_ptr() == held.__array_interface__["data"][0]
    with pytest.raises(UnknownArrayError):
        convert_memory(Plain(), "torch")


class Producer:
    """Speaks DLPack, and nothing else."""

    def __init__(self, held: Any, versions: bool) -> None:
        self.held, self.versions = held, versions

    def __dlpack__(self, **options: Any) -> Any:
        if not self.versions and "max_version" in options:
            raise TypeError("max_version")
        return self.held.__dlpack__(**options) if self.versions else self.held.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


@pytest.mark.parametrize("versions", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float32", "int64", "bool"])
@pytest.mark.parametrize("target", ["numpy", "torch", "jax", "tensorflow"])
def test_what_speaks_dlpack_alone_keeps_its_dtype(target: str, dtype: str, versions: bool) -> None:
    torch = require("torch")
    require(target)
    held = torch.tensor([1, 0, 1, 1]).to(getattr(torch, dtype))
    producer = Producer(held, versions)
    for _ in range(2):
        result = convert_memory(producer, target)
        assert matrix_data.dtype_name(result) == dtype
        assert matrix_data.bits(result) == held.view(torch.uint8).numpy().tobytes()
    if target == "numpy":
        assert explain(producer, target, copy=False).shares_memory


@pytest.mark.parametrize(
    "scalar",
    [
        np.float32(3),
        np.float64(-0.5),
        np.int8(-3),
        np.uint64(2**63),
        np.bool_(True),
        np.complex64(1 - 2j),
        np.float16(2),
    ],
    ids=lambda x: x.dtype.name,
)
@pytest.mark.parametrize("target", ["numpy", "torch", "jax", "tensorflow"])
def test_scalars_of_numpy_are_arrays_without_axes(target: str, scalar: np.generic) -> None:
    require(target)
    assert arraybridge.detect_memory_type(scalar) == "numpy"
    for _ in range(2):
        result = convert_memory(scalar, target)
        assert tuple(result.shape) == ()
        assert matrix_data.framework_of(result) == target
        assert matrix_data.dtype_name(result) == scalar.dtype.name
        assert matrix_data.bits(result) == scalar.tobytes()
        assert not explain(scalar, target).shares_memory
        with pytest.raises(CopyRequiredError):
            convert_memory(scalar, target, copy=False)


def test_the_copy_of_a_variable_is_no_part_of_it() -> None:
    require("torch")
    variable = require("tensorflow").Variable([1.0, 2.0])
    arraybridge.to_torch(convert_memory(variable, "tensorflow", copy=True))[0] = 9
    assert variable.numpy().tolist() == [1.0, 2.0]
