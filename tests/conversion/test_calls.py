"""All call signatures of convert_memory, the device of the result, and state that no call may change."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import random
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import (
    CopyRequiredError,
    Device,
    DeviceNotFoundError,
    DtypeNotSupportedError,
    GradientError,
    MemoryConversionError,
    MemoryType,
    SourceMismatchError,
    convert_memory,
    device_of,
    explain,
)
from arraybridge.interface.component import component
from tests import matrix_data as data
from tests.fake_gpu import FakeGpuFramework, GpuDevices
from tests.helpers import jax_with, registry_kept, require

HOST = ("numpy", "torch", "jax", "tensorflow")
# A GPU number that no machine has.
NOWHERE = 99

Call = Callable[..., Any]
both_calls = pytest.mark.parametrize("call", [convert_memory, explain])


def image() -> np.ndarray[Any, Any]:
    """Return six float32 values that every framework supports, 64-byte aligned."""
    memory: Any = arraybridge.aligned((2, 3), "float32")
    memory[...] = [[0.0, 1.5, -2.0], [3.25, 4.0, 1e-3]]
    return memory


# ---- call signatures -------------------------------------------------------------------------------------

# Arguments after the array, by position and by name, each with the resulting device.
CPU = (
    *((("torch",), {}), ((MemoryType.TORCH,), {}), ((), {"target": "torch"}), (("torch", None), {})),
    *((("numpy", "torch"), {}), (("numpy",), {"target": "torch"}), (("numpy", "torch", None), {})),
    ((), {"source_type": MemoryType.NUMPY, "target_type": "torch"}),
    *((("torch",), {"device": "cpu"}), (("torch",), {"device": Device("cpu")})),
    (("torch",), {"copy": None, "dtype": None, "grad": "error", "device": None, "gpu_id": None}),
)
CL = "pyclesperanto"
SECOND = (
    *(((CL, 1), {}), ((CL,), {"gpu_id": 1}), ((), {"target": CL, "gpu_id": 1}), ((CL, np.int64(1)), {})),
    *((("numpy", CL, 1), {}), (("numpy", CL), {"gpu_id": 1})),
    ((), {"source_type": "numpy", "target_type": CL, "gpu_id": 1}),
    *(((CL,), {"device": "opencl:1"}), ((CL,), {"device": Device("opencl", 1)})),
)


def need_two_opencl_devices() -> None:
    require("pyclesperanto")
    if len(arraybridge.framework("pyclesperanto").devices.available()) < 2:
        pytest.skip("POCL_DEVICES gives OpenCL fewer than two devices")


def test_every_form_of_the_call() -> None:
    require("torch")
    x = image()
    for names, options in CPU:
        route, tensor = explain(x, *names, **options), convert_memory(x, *names, **options)
        assert (route.source, route.target, route.device) == ("numpy", "torch", "cpu")
        assert (data.framework_of(tensor), data.address(tensor)) == ("torch", data.address(x))
    assert data.address(convert_memory(data=x, target_type="torch")) == data.address(x)


def test_every_form_that_names_a_gpu() -> None:
    need_two_opencl_devices()
    x = image()
    for names, options in SECOND:
        assert explain(x, *names, **options).device == "opencl:1"
        array = convert_memory(x, *names, **options)
        assert (device_of(array), data.bits(array)) == ("opencl:1", x.tobytes())


@both_calls
def test_duplicate_missing_and_unknown_arguments_raise(call: Call) -> None:
    x = image()
    with pytest.raises(TypeError, match="unexpected keyword argument 'copied'"):
        call(x, "numpy", copied=True)
    for option, nearest in (
        ("target_tpye", "target_type"),
        ("sorce_type", "source_type"),
        ("devise", "device"),
    ):
        with pytest.raises(TypeError, match=rf"'{option}' \(did you mean '{nearest}'\?\)"):
            call(x, **{option: "numpy"})
    for words, names, options in (
        ("gpu_id is given twice", ("numpy", 0), {"gpu_id": 0}),
        ("gpu_id is given twice", ("numpy", 0, 1), {}),
        ("target is given twice", ("numpy", "numpy"), {"target": "numpy"}),
        ("not both", ("numpy",), {"gpu_id": 0, "device": "cpu"}),
    ):
        with pytest.raises(ValueError, match=words):
            call(x, *names, **options)
    for names, options in (((), {}), ((), {"gpu_id": 0}), ((3,), {})):
        with pytest.raises(TypeError, match="framework"):
            call(x, *names, **options)


@both_calls
def test_the_declared_source_is_checked(call: Call) -> None:
    require("torch")
    x = image()
    with pytest.raises(SourceMismatchError, match=r"declared as torch.*numpy") as caught:
        call(x, "torch", "jax")
    assert isinstance(caught.value, (TypeError, ValueError))
    assert (caught.value.source_type, caught.value.target_type) == ("numpy", "jax")
    convert_memory(x, "numpy")  # also if the pair has a plan already
    with pytest.raises(SourceMismatchError):
        call(x, source_type=MemoryType.JAX, target_type="numpy", gpu_id=0)


@both_calls
def test_invalid_options_raise(call: Call) -> None:
    ambiguous = np.ones(3)
    for option, values in {
        "copy": ("yes", 2, 1, 0, 1.0, -0.0, float("nan"), np.int64(1), ambiguous),
        "grad": ("detached", None, 0, True, ambiguous),
        "device": (0, False, 0.0, b"cpu", ambiguous, "cpu:x"),
        "gpu_id": (np.True_, np.float64(1), ambiguous),
    }.items():
        for value in values:
            for thing in (image(), [1, 2], None):  # options are checked first, also for non-arrays
                with pytest.raises(ValueError, match=f"{option}|not a device"):
                    call(thing, "numpy", **{option: value})
    for dtype in ("object", "str", object, str, "V4", "datetime64[s]", 3):
        with pytest.raises(DtypeNotSupportedError, match="float32"):
            call(image(), "numpy", dtype=dtype)
    with pytest.raises(DtypeNotSupportedError, match="did you mean 'float32'"):
        call(image(), "numpy", dtype="flaot32")


# ---- device of the result --------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["numpy", "torch", "pyclesperanto"])
@both_calls
def test_invalid_gpu_ids_raise(call: Call, target: str) -> None:
    require(target)
    for gpu_id in (-1, -7, True, False, 0.0, 1.5, float("nan"), "0", "first", ""):
        with pytest.raises(ValueError, match="gpu_id"):
            call(image(), target, gpu_id=gpu_id)
        with pytest.raises(ValueError, match="gpu_id"):
            call(image(), "numpy", target, gpu_id)
        if not isinstance(gpu_id, str):
            with pytest.raises(ValueError, match="gpu_id"):
                call(image(), target, gpu_id)


@pytest.mark.parametrize("source", HOST)
def test_gpu_id_is_ignored_for_numpy(source: str) -> None:
    require(source)
    array = data.build(source, "aligned", "float32").array
    for gpu_id in (0, 5, NOWHERE, "auto"):
        assert data.address(convert_memory(array, "numpy", gpu_id=gpu_id)) == data.address(array)
        assert explain(array, "numpy", gpu_id) == explain(array, "numpy")


@pytest.mark.parametrize("target", ["numpy", "torch"])
def test_invalid_devices_raise_with_advice(target: str) -> None:
    torch = require("torch")
    nonsense: list[Any] = ["", "cpus", "gpu:-1", "gpu:x", "cuda:", "cpu:1.0", "gpu 0", "gpu:0:1"]
    nonsense += [3, 0, 1.5, True, ("gpu", 0), object(), np.zeros(2), torch.float32]
    for call in (Device.parse, lambda words: convert_memory(image(), target, device=words)):
        for words in nonsense:
            with pytest.raises(ValueError, match="gpu:0"):
                call(words)


def test_device_strings_of_one_accelerator_kind() -> None:
    for words in ("cuda", "mps", "xpu", "tpu", "rocm"):
        assert Device.parse(words) == Device("gpu", 0)
        assert Device.parse(f"{words}:1") == Device("gpu", 1)

    class MetalDevices(GpuDevices):
        def accelerators(self) -> tuple[str, ...]:
            return ("mps",)

    class Metal(FakeGpuFramework):
        name, modules = "metal", ("tests",)
        devices = component(MetalDevices)

    with registry_kept():
        metal = arraybridge.register(Metal())
        for call in (convert_memory, explain):
            for words in ("mps", "mps:1", "gpu:1", "mps:0"):
                call(image(), "metal", device=words)
            for words in ("cuda", "cuda:1", "xpu", "tpu:0", "rocm"):
                with pytest.raises(arraybridge.DeviceNotFoundError, match=r"it has .*gpu:1"):
                    call(image(), "metal", device=words)
        placed = convert_memory(image(), "metal", device="mps:1")
        assert arraybridge.device_of(placed) == "gpu:1"
        double = metal.decorator(device="cuda:1")(lambda x: x)
        with pytest.raises(arraybridge.DeviceNotFoundError, match="cuda"):
            double(image())
    for target in ("numpy", "torch", "jax", "tensorflow"):
        require(target)
        missing = "mps" if sys.platform != "darwin" else "xpu"
        with pytest.raises(
            arraybridge.DeviceNotFoundError, match=f"{target} has no device gpu:0 .*it has cpu"
        ):
            convert_memory(image(), target, device=missing)


def test_native_devices_are_read_and_place_an_array() -> None:
    torch, jax, tf, cupy = (require(name) for name in ("torch", "jax", "tensorflow", "cupy"))
    natives = [
        *((torch.device("cpu"), "cpu"), (torch.device("cuda:1"), "gpu:1"), (torch.device("xpu", 2), "gpu:2")),
        *((d, f"cpu:{d.id}".removesuffix(":0")) for d in jax.devices("cpu")),
        *((d, str(Device.parse(d.name))) for d in tf.config.list_logical_devices("CPU")),
        *(("/CPU:0", "cpu"), ("/job:localhost/replica:0/task:0/device:GPU:1", "gpu:1")),
    ]
    with contextlib.suppress(cupy.cuda.runtime.CUDARuntimeError):  # CuPy arrays need a driver
        natives.append((cupy.cuda.Device(1), "gpu:1"))
    for native, words in natives:
        assert str(Device.parse(native)) == words, native
    x = image()
    assert data.bits(convert_memory(x, "torch", device=torch.device("cpu"))) == x.tobytes()
    for place in jax.devices("cpu"):
        assert convert_memory(x, "jax", device=place).devices() == {place}
        assert explain(x, "jax", device=place).device == Device("cpu", place.id)
    with pytest.raises(DeviceNotFoundError, match="gpu:5"):
        convert_memory(x, "torch", device=torch.device("cuda:5"))


@both_calls
@pytest.mark.parametrize("target", HOST)
def test_missing_devices_raise_with_the_available_ones(target: str, call: Call) -> None:
    require(target)
    for kind in ("gpu", "cuda", "opencl", "cpu"):
        with pytest.raises(DeviceNotFoundError) as caught:
            call(image(), target, device=f"{kind}:{NOWHERE}")
        message = str(caught.value)
        devices = arraybridge.framework(target).devices.available()
        for word in (target, f"{kind}:{NOWHERE}".replace("cuda", "gpu"), *map(str, devices)):
            assert word in message
        assert caught.value.reason
        assert (caught.value.source_type, caught.value.target_type) == ("numpy", target)


def test_data_stays_on_its_device_unless_one_is_given() -> None:
    """Use the CPU devices of JAX and TensorFlow, and frameworks that have only one."""
    jax, tf = jax_with(3), require("tensorflow")
    require("torch")
    x = image().astype(np.float64)
    array = convert_memory(x, "jax", device="cpu:2")
    assert array.devices() == {jax.devices("cpu")[2]}
    assert convert_memory(array, "jax") is convert_memory(array, "jax", device="cpu:2") is array
    assert device_of(convert_memory(array, "jax", dtype="float32")) == "cpu:2"
    for moved, place in (
        (array, "cpu:2"),
        (convert_memory(array, "jax", copy=True), "cpu:2"),
        (convert_memory(array, "jax", device="cpu:1"), "cpu:1"),
        (arraybridge.to_cpu(array), "cpu"),
        (convert_memory(array, "torch"), "cpu"),
        (convert_memory(array, "numpy"), "cpu"),
    ):
        assert (device_of(moved), data.bits(moved)) == (place, x.tobytes())
    if len(tf.config.list_logical_devices("CPU")) > 1:
        tensor = convert_memory(convert_memory(x, "jax", device="cpu:1"), "tensorflow")
        assert tensor.device.endswith("device:CPU:1")
        assert convert_memory(tensor, "tensorflow") is tensor
        assert device_of(convert_memory(tensor, "tensorflow", device="cpu")) == "cpu"
        assert convert_memory(tensor, "numpy").tolist() == x.tolist()


def test_opencl_devices() -> None:
    need_two_opencl_devices()
    x = image()
    first = convert_memory(x, "pyclesperanto", 0)
    second = convert_memory(first, "pyclesperanto", 1)
    assert convert_memory(second, "pyclesperanto") is convert_memory(second, "pyclesperanto", 1) is second
    copied = convert_memory(second, "pyclesperanto", copy=True)
    assert copied is not second
    for array, place in (
        *((first, "opencl:0"), (second, "opencl:1"), (copied, "opencl:1")),
        *((arraybridge.to_gpu(second), "opencl:0"), (arraybridge.to_gpu(first, 1), "opencl:1")),
        (arraybridge.to_pyclesperanto(x, 1), "opencl:1"),
    ):
        assert device_of(array) == place
        assert convert_memory(array, "numpy").tolist() == x.tolist()
    large = np.arange(1 << 23, dtype=np.float32).reshape(8, 1024, 1024)  # on a CPU, in huge pages
    assert np.array_equal(arraybridge.to_numpy(arraybridge.to_pyclesperanto(large, 1)), large)
    framework = arraybridge.framework("pyclesperanto")
    assert device_of(convert_memory(x, "pyclesperanto")) == framework.devices.default_device()
    assert device_of(convert_memory(x, "pyclesperanto", "auto")) in framework.devices.available()


# ---- unchanged state -------------------------------------------------------------------------------------


def state() -> dict[str, Any]:
    """Return all state that a conversion could change unnoticed, in comparable form."""
    jax, tf, torch = (importlib.import_module(name) for name in ("jax", "tensorflow", "torch"))
    cle = arraybridge.framework("pyclesperanto")
    generator = np.random.get_state()  # noqa: NPY002  # the test is about the global state
    return {
        "environment": dict(os.environ),
        "filters": list(warnings.filters),
        "python's random": random.getstate(),
        "numpy's random": (generator[0], generator[1].tobytes(), *generator[2:]),
        "numpy's errors": np.geterr(),
        "numpy's printing": {**np.get_printoptions(), "formatter": None},
        "jax x64": (jax.config.jax_enable_x64, jax.numpy.arange(2.0).dtype.name),
        "jax device": (jax.config.jax_default_device, jax.numpy.zeros(1).devices()),
        "jax prng": (jax.config.jax_default_prng_impl, jax.config.jax_transfer_guard),
        "torch random": torch.get_rng_state().tolist(),
        "torch defaults": (torch.get_default_dtype(), torch.get_default_device(), torch.get_num_threads()),
        "torch grad": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "tf random": tf.random.get_global_generator().state.numpy().tolist(),
        "tf device": (tf.constant([1.0]).device, tf.executing_eagerly()),
        "tf soft placement": tf.config.get_soft_device_placement(),
        "opencl": str(cle.devices.default_device()),
    }


def _zeros(framework: str, layout: str, dtype: str) -> Any:
    """Return an array of that layout with values that every cast accepts."""
    return convert_memory(np.zeros_like(data.build("numpy", layout, dtype).array), framework)


def test_calls_do_not_change_global_state() -> None:
    for name in ("torch", "jax", "tensorflow", "pyclesperanto"):
        require(name)
    sources = [
        _zeros(name, layout, dtype)
        for name in data.FRAMEWORKS
        for layout, dtype in (("aligned", "float64"), ("C", "float32"), ("0-d", "int64"), ("offset", "int16"))
        if not data.inexpressible(name, layout, dtype)
    ]
    options: tuple[dict[str, Any], ...] = (
        *({}, {"copy": True}, {"copy": False}, {"dtype": "float32"}, {"device": "cpu:1"}),
        *({"gpu_id": 0}, {"gpu_id": 1}, {"gpu_id": NOWHERE}, {"dtype": "nonsense"}),
    )
    state()  # initializes everything that is initialized lazily
    before = state()
    done = failed = 0
    for source in sources:
        for target in data.FRAMEWORKS:
            for option in options:
                for call in (convert_memory, explain):
                    try:
                        call(source, target, **option)
                        done += 1
                    except MemoryConversionError:
                        failed += 1
    after = state()
    assert min(done, failed) > 100, "both conversions and failures must occur"
    for what, value in before.items():
        assert after[what] == value, what


# ---- dtype= ----------------------------------------------------------------------------------------------


def test_casts_happen_before_values_are_narrowed() -> None:
    """OpenCL has neither 64-bit integers nor doubles, so the cast happens on the host before the transfer."""
    require("pyclesperanto")
    wide = np.array([2**40 + 3, -(2**33)])
    with pytest.raises(DtypeNotSupportedError, match="no dtype int64"):
        convert_memory(wide, "pyclesperanto")
    for source in HOST:
        require(source)
        cast = convert_memory(convert_memory(wide, source), "pyclesperanto", dtype="float32")
        assert data.bits(cast) == wide.astype(np.float32).tobytes()
    with pytest.raises(DtypeNotSupportedError):
        convert_memory(image(), "pyclesperanto", dtype="float64")


@both_calls
def test_non_numeric_arrays_are_not_cast(call: Call) -> None:
    structured = np.array([(1, 2.0)], [("a", "i4"), ("b", "f8")])
    for x in (np.array(["1", "2"]), structured, np.array([1, None], object)):
        with pytest.raises(DtypeNotSupportedError):
            call(x, "numpy", dtype="float32")


@pytest.mark.parametrize("call", [convert_memory, explain, arraybridge.to_torch])
def test_dtype_must_be_passed_by_name(call: Call) -> None:
    torch = require("torch")
    named = () if call is arraybridge.to_torch else ("torch",)
    for dtype in ("float32", np.float32, torch.float32):
        with pytest.raises(ValueError, match="dtype='float32'"):
            call(image(), *named, dtype)


@pytest.mark.parametrize("target", HOST)
def test_dtypes_may_be_given_as_any_framework_writes_them(target: str) -> None:
    jnp, tf, torch = require("jax").numpy, require("tensorflow"), require("torch")
    x = np.array([1.0, 2.5])
    for dtype in ("float32", np.float32, np.dtype("float32"), torch.float32, jnp.float32, tf.float32):
        assert data.dtype_name(convert_memory(x, target, dtype=dtype)) == "float32", dtype
    for dtype in ("bfloat16", torch.bfloat16, jnp.bfloat16, tf.bfloat16):
        assert data.dtype_name(convert_memory(x, target, dtype=dtype)) == "bfloat16", dtype
    assert convert_memory(x, "numpy", dtype=float) is x
    assert data.dtype_name(convert_memory(x, target, dtype=bool)) == "bool"
    with pytest.raises(CopyRequiredError, match="cast to float16"):
        convert_memory(x, target, dtype="float16", copy=False)


# ---- gradients and short functions -----------------------------------------------------------------------


@pytest.mark.parametrize("target", ["numpy", "jax", "tensorflow", "pyclesperanto"])
def test_graphs_are_detached_only_on_request(target: str) -> None:
    """Check all gradient modes, after conversions of tensors without gradients have filled the plan cache."""
    torch = require("torch")
    require(target)
    leaf = torch.ones(2, 3, requires_grad=True)
    convert_memory(torch.ones(3), target)
    convert_memory(torch.nn.Parameter(torch.ones(2), requires_grad=False), target)
    result = leaf * 2
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            for x in (leaf, result, torch.nn.Parameter(torch.ones(2, 3))):
                for call in (convert_memory, explain):
                    with pytest.raises(GradientError, match=r"grad='detach'"):
                        call(x, target)
                assert data.bits(convert_memory(x, target, grad="detach")) == data.bits(x)
                assert x.requires_grad


@pytest.mark.parametrize("target", data.FRAMEWORKS)
def test_short_forms(target: str) -> None:
    require(target)
    array, short = abs(image()), getattr(arraybridge, f"to_{target}")
    result = short(array)
    assert (data.framework_of(result), data.bits(result)) == (target, data.bits(array))
    assert arraybridge.detect_memory_type(result) == target
    assert short(array, copy=True) is not array
    assert data.dtype_name(short(array, dtype="uint8")) == "uint8"
    if target != "pyclesperanto":
        assert device_of(short(array, device="cpu")) == "cpu"


@pytest.mark.parametrize("target", [*data.FRAMEWORKS, "mlx", "paddle"])
def test_short_forms_have_a_complete_docstring(target: str) -> None:
    text = inspect.getdoc(getattr(arraybridge, f"to_{target}")) or ""
    assert text.startswith("Convert an array to a")
    assert f'convert_memory(x, "{target}", gpu_id, ...)' in text
    headings = ["\nArgs:\n", "\nReturns:\n", "\nRaises:\n", "\nExample:\n    >>> "]
    assert [text.count(heading) for heading in headings] == [1, 1, 1, 1]
    assert text.index("Args:") < text.index("Example:") < text.index(f" to_{target}(")


_CAST_DTYPES = [
    "bool",
    "int8",
    "int64",
    "uint8",
    "uint64",
    "float16",
    "float64",
    "complex64",
    "bfloat16",
    "float8_e3m4",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e4m3b11fnuz",
    "float8_e8m0fnu",
    "int4",
    "uint4",
]


@pytest.mark.filterwarnings("ignore::Warning")  # frameworks warn about lossy casts
@pytest.mark.parametrize("target", ["numpy", "torch", "jax", "tensorflow", "pyclesperanto"])
@pytest.mark.parametrize("source", ["numpy", "torch", "jax", "tensorflow"])
def test_every_cast_and_its_advice(source: str, target: str) -> None:
    """`explain` and the call agree, and the casts and expressions in the advice work."""
    ml_dtypes = require("ml_dtypes")
    require(source)
    require(target)
    outcomes: set[str] = set()
    for dtype in _CAST_DTYPES:
        values = np.array([0.5, 1, 2]).astype(getattr(ml_dtypes, dtype, None) or dtype)
        try:
            x = arraybridge.convert_memory(values, source)
        except arraybridge.DtypeNotSupportedError:
            continue
        for cast in _CAST_DTYPES:
            found = [_error(call, x, target, cast) for call in (explain, convert_memory)]
            assert str(found[0]) == str(found[1]), (dtype, cast)
            outcomes.add(type(found[0]).__name__)
            if found[0] is not None:
                _check_advice(found[0], x, target, cast)
    assert outcomes == ({"NoneType"} if target == "numpy" else {"NoneType", "DtypeNotSupportedError"})


def _error(call: Any, x: Any, target: str, dtype: str) -> arraybridge.MemoryConversionError | None:
    try:
        call(x, target, dtype=dtype)
    except arraybridge.MemoryConversionError as error:
        return error
    return None


def _check_advice(error: arraybridge.MemoryConversionError, x: Any, target: str, dtype: str) -> None:
    names = {name: getattr(arraybridge, name) for name in ("to_numpy", "to_tensorflow")}
    for expression in error.expressions:
        result = eval(expression, {**names, "x": x})  # noqa: S307  # advice of the library
        if expression.startswith("to_"):
            assert (data.framework_of(result), data.dtype_name(result)) == (target, dtype)
    if error.cast is not None:
        # If another dtype was requested, the advice must not claim to keep its values.
        assert not error.cast.keeps_values or data.dtype_name(x) == dtype
        for name in (error.cast.dtype, *error.cast.others):
            assert data.dtype_name(arraybridge.convert_memory(x, target, dtype=name)) == name


@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")  # of NaN
@pytest.mark.parametrize("dtype", ["bool", "float16", "bfloat16", "float8_e3m4", "float8_e8m0fnu"])
def test_the_advised_cast_keeps_every_value(dtype: str) -> None:
    ml_dtypes = require("ml_dtypes")
    require("pyclesperanto")
    elements = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    bits = np.arange(2 if dtype == "bool" else 256, dtype=np.uint8)
    values = bits.view(elements) if elements.itemsize == 1 else (bits * np.uint16(257)).view(elements)
    with pytest.raises(DtypeNotSupportedError) as caught:
        convert_memory(values, "pyclesperanto")
    assert caught.value.cast is not None
    assert caught.value.cast.keeps_values
    result = convert_memory(convert_memory(values, "numpy", dtype=caught.value.cast.dtype), "pyclesperanto")
    np.testing.assert_array_equal(
        arraybridge.to_numpy(result).astype(np.float64), values.astype(np.float64), strict=True
    )


_SMALL_FLOATS = ["float8_e3m4", "float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz", "float8_e4m3fnuz"]


@pytest.mark.parametrize("dtype", _SMALL_FLOATS)
def test_casts_that_ml_dtypes_lacks_round_once(dtype: str) -> None:
    ml_dtypes = require("ml_dtypes")
    scale, small = np.dtype(ml_dtypes.float8_e8m0fnu), np.dtype(getattr(ml_dtypes, dtype))
    for before, after in ((scale, small), (small, scale)):
        values = np.arange(256, dtype=np.uint8).view(before)
        result = convert_memory(values, "numpy", dtype=after.name)
        expected = values.astype(np.float64).astype(after)
        assert result.dtype == after
        np.testing.assert_array_equal(result.astype(np.float64), expected.astype(np.float64), strict=True)
    with pytest.raises(TypeError):  # NumPy has no such cast
        np.zeros(1, scale).astype(small)


def test_casts_between_integers_below_a_byte_wrap() -> None:
    ml_dtypes = require("ml_dtypes")
    values = np.array([-2, -1, 0, 7], ml_dtypes.int4)
    result = convert_memory(values, "numpy", dtype="uint4")
    assert result.astype(int).tolist() == [14, 15, 0, 7]


@pytest.mark.parametrize(("device", "advises"), [("gpu", True), ("mps", False), ("opencl:0", False)])
def test_advice_to_install_another_build_is_for_its_devices(device: str, advises: bool) -> None:
    torch = require("torch")
    if torch.cuda.is_available() or torch.version.cuda:
        pytest.skip("PyTorch is a build for CUDA")
    with pytest.raises(DeviceNotFoundError, match=r"^torch has no device .* here; it has cpu\.") as caught:
        convert_memory(image(), "torch", device=device)
    assert ("Install a CUDA or ROCm build." in str(caught.value)) is advises


@pytest.mark.parametrize("kind", ["cuda", "mps", "xpu"])
def test_native_torch_devices_that_are_missing(kind: str) -> None:
    torch = require("torch")
    if torch.accelerator.is_available():
        pytest.skip("this machine has an accelerator")
    with pytest.raises(DeviceNotFoundError, match="torch has no device gpu:0"):
        convert_memory(np.ones(2), "torch", device=torch.device(kind))
    with pytest.warns(arraybridge.MissingGpuWarning), arraybridge.settings(missing_gpu="host"):
        assert convert_memory(np.ones(2), "torch", device=torch.device(kind)).device.type == "cpu"


_TORCH_PARTS: dict[str, Callable[[Any], Any]] = {
    "per tensor": lambda torch: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8),
    "per channel": lambda torch: torch.quantize_per_channel(
        torch.ones(2, 2), torch.tensor([0.1, 0.2]), torch.tensor([0, 0]), 0, torch.qint8
    ),
    "below a byte": lambda torch: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint4x2),
    "nested": lambda torch: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "jagged": lambda torch: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
}


@pytest.mark.filterwarnings("ignore:.*quantiz", "ignore:.*prototype")
@pytest.mark.parametrize("options", [{"copy": True}, {"dtype": "float64"}, {"dtype": "uint8", "copy": True}])
@pytest.mark.parametrize("kind", _TORCH_PARTS)
def test_quantized_and_nested_tensors_are_neither_copied_nor_cast(kind: str, options: Any) -> None:
    torch = require("torch")
    x = _TORCH_PARTS[kind](torch)
    assert convert_memory(x, "torch") is x
    for call in (convert_memory, explain):
        for target, more in (("torch", options), ("numpy", {})):
            with pytest.raises(arraybridge.ArrayNotSupportedError, match=r"nested|quantized") as caught:
                call(x, target, **more)
            assert len(caught.value.expressions) == 2


@pytest.mark.parametrize("call", [convert_memory, explain])
def test_torch_tensors_that_cannot_be_cast(call: Any) -> None:
    torch = require("torch")
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    for x, message in ((torch.ones(3, 3).to_mkldnn(), "to_dense"), (freed, "freed or truncated storage")):
        with pytest.raises(arraybridge.ArrayNotSupportedError, match=message):
            call(x, "torch", dtype="float64")
    with pytest.raises(arraybridge.ArrayNotSupportedError, match="freed or truncated storage"):
        call(freed, "torch", copy=True)
    with pytest.raises(DtypeNotSupportedError, match=r"x\.view\(torch\.uint8\)"):
        call(torch.zeros(2, dtype=torch.uint8).view(torch.bits8), "torch", dtype="float32")


@pytest.mark.parametrize("call", [convert_memory, explain])
def test_torch_casts_no_elements_below_a_byte(call: Any) -> None:
    torch = require("torch")
    x = torch.zeros(3, dtype=torch.int4)
    with pytest.raises(DtypeNotSupportedError, match=r"x\.view\(torch\.uint8\)"):
        call(x, "torch", dtype="float32")
