"""The decorators: conversion of arguments and results, options, and every kind of function."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import multiprocessing
import pickle
import threading
import typing
from collections import OrderedDict, defaultdict, deque
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import pytest

import arraybridge
from arraybridge import (
    ArrayNotSupportedError,
    DeviceNotFoundError,
    DtypeConversion,
    DtypeNotSupportedError,
    Framework,
    GradientError,
    MemoryType,
    SourceMismatchError,
    UnknownFrameworkError,
    convert_memory,
    device_of,
    memory_types,
)
from arraybridge.frameworks.parts import Streams
from tests.functions import cases
from tests.functions.cases import (
    FRAMEWORKS,
    HOST,
    IMAGE,
    Box,
    BoxFramework,
    decorator,
    framework_of,
    image,
    registered,
    values,
)
from tests.helpers import require, run_script


def identity(x: Any) -> Any:
    return x


# -- arguments and results ---------------------------------------------------------------------------


@pytest.mark.parametrize("target", FRAMEWORKS)
@pytest.mark.parametrize("source", FRAMEWORKS)
def test_bare_decorator_computes_in_its_framework(source: str, target: str) -> None:
    require(source)
    require(target)
    seen = []

    @decorator(target)
    def double(x: Any) -> Any:
        seen.append(framework_of(x))
        return x + x

    result = double(image(source))
    assert seen == [target]
    assert framework_of(result) == target
    assert values(result) == [[0.0, 2.0, 4.0], [6.0, 8.0, 10.0]]


@pytest.mark.parametrize("target", FRAMEWORKS)
@pytest.mark.parametrize("source", FRAMEWORKS)
def test_output_type_input_gives_back_what_was_brought(source: str, target: str) -> None:
    require(source)
    require(target)
    brought = image(source)
    result = decorator(target)(output_type="input")(lambda x: x + x)(brought)
    assert framework_of(result) == source
    assert device_of(result) == device_of(brought)
    assert values(result) == [[0.0, 2.0, 4.0], [6.0, 8.0, 10.0]]


@pytest.mark.parametrize("output", FRAMEWORKS)
@pytest.mark.parametrize("target", FRAMEWORKS)
def test_output_type_names_the_framework_of_the_result(target: str, output: str) -> None:
    require(target)
    require(output)
    result = decorator(target)(output_type=output)(lambda x: x + x)(IMAGE)
    assert framework_of(result) == output
    assert values(result) == [[0.0, 2.0, 4.0], [6.0, 8.0, 10.0]]


def test_output_type_input_follows_the_first_array_also_within_a_container() -> None:
    torch = require("torch")
    require("jax")
    mixed = arraybridge.jax(output_type="input")(lambda *args, **kwargs: kwargs["mask"] + 1)
    ones = np.ones(2, np.float32)
    assert isinstance(mixed(3, "x", [{"a": torch.ones(2)}], mask=ones), torch.Tensor)
    assert isinstance(mixed(ones, mask=torch.ones(2)), np.ndarray)


def test_without_an_array_output_type_input_leaves_the_result() -> None:
    torch = require("torch")
    made = arraybridge.torch(output_type="input")(lambda n: torch.ones(n))(3)
    assert isinstance(made, torch.Tensor)


def test_output_type_input_goes_back_to_the_device() -> None:
    jax = require("jax")
    require("torch")
    if len(jax.devices("cpu")) < 2:
        pytest.skip("JAX has one CPU device here")
    x = convert_memory(IMAGE, "jax", device="cpu:1")
    result = arraybridge.torch(output_type="input")(lambda t: t * 2)(x)
    assert device_of(result) == "cpu:1"
    assert values(result)[1] == [6.0, 8.0, 10.0]


def test_the_very_object_arrives_and_comes_back() -> None:
    torch = require("torch")
    seen = []
    tensor = torch.ones(3)

    @arraybridge.torch
    def keep(x: Any) -> Any:
        seen.append(x)
        return x

    assert keep(tensor) is tensor
    assert seen[0] is tensor
    shared = keep(IMAGE)
    assert shared.data_ptr() == IMAGE.__array_interface__["data"][0]


def test_keyword_arguments_and_defaults() -> None:
    require("torch")

    @arraybridge.torch(output_type="numpy")
    def scale(x: Any, factor: float = 2.0, *, offset: Any = None) -> Any:
        assert framework_of(x) == "torch"
        assert offset is None or framework_of(offset) == "torch"
        return x * factor + (0 if offset is None else offset)

    assert scale(np.ones(2)).tolist() == [2.0, 2.0]
    assert scale(x=np.ones(2), factor=3.0).tolist() == [3.0, 3.0]
    assert scale(np.ones(2), offset=np.ones(2)).tolist() == [3.0, 3.0]


class Pair(NamedTuple):
    left: Any
    right: Any


def test_containers_keep_their_types_and_their_order() -> None:
    torch = require("torch")
    a = np.ones(1)
    tree = {
        "z": a,
        "a": [a, (a, 1)],
        "m": Pair(a, "right"),
        3: OrderedDict(y=a, b=None),
        "d": deque([a], maxlen=3),
        "f": defaultdict(list, k=a),
    }
    seen = arraybridge.torch(lambda t: t)(tree)
    assert list(seen) == ["z", "a", "m", 3, "d", "f"]
    assert list(seen[3]) == ["y", "b"]
    assert type(seen["m"]) is Pair
    assert seen["m"].right == "right"
    assert type(seen[3]) is OrderedDict
    assert seen[3]["b"] is None
    assert type(seen["d"]) is deque
    assert seen["d"].maxlen == 3
    assert type(seen["f"]) is defaultdict
    assert seen["f"].default_factory is list
    assert type(seen["a"][1]) is tuple
    assert seen["a"][1][1] == 1
    for found in (seen["z"], seen["a"][0], seen["a"][1][0], seen["m"].left, seen[3]["y"], seen["d"][0]):
        assert isinstance(found, torch.Tensor)
    assert isinstance(tree["z"], np.ndarray), "the caller's own container is left alone"


def test_registered_dataclasses_are_looked_into_and_others_are_not() -> None:
    torch = require("torch")
    import optree

    @optree.dataclasses.dataclass(namespace="arraybridge")
    class Batch:
        images: Any
        name: str

    class Plain:
        def __init__(self) -> None:
            self.images = np.ones(2)

    seen = arraybridge.torch(identity)(Batch(np.ones(2), "one"))
    assert type(seen) is Batch
    assert isinstance(seen.images, torch.Tensor)
    assert seen.name == "one"
    plain = Plain()
    assert arraybridge.torch(identity)(plain) is plain
    assert isinstance(plain.images, np.ndarray)


def test_what_is_no_array_passes_as_it_is() -> None:
    torch = require("torch")
    model = torch.nn.Linear(2, 2)
    log: list[str] = []
    for value in (
        1,
        2.5,
        1j,
        "text",
        b"b",
        None,
        True,
        print,
        identity,
        model,
        np.ndarray,
        log,
    ):
        assert arraybridge.jax(identity)(value) is value
        assert arraybridge.torch(lambda *, x: x)(x=value) is value
    assert torch.float32 is arraybridge.numpy(identity)(torch.float32)


def test_a_container_without_arrays_is_the_caller_s_own() -> None:
    log: list[str] = []

    @arraybridge.numpy
    def note(x: Any, into: list[str]) -> Any:
        into.append("seen")
        return x

    note(IMAGE, log)
    assert log == ["seen"]


def test_results_are_not_rescaled_and_not_cast() -> None:
    """A peer stretches the result over the range of uint16 and gives it back as uint16."""

    @arraybridge.numpy
    def half(im: Any) -> Any:
        return im / 2

    result = half(np.array([[10, 20], [30, 40]], np.uint16))
    assert result.dtype == np.float64
    assert result.tolist() == [[5.0, 10.0], [15.0, 20.0]]


@pytest.mark.parametrize("dtype", ["uint8", "int64", "float64", "complex64", "bool"])
@pytest.mark.parametrize("target", HOST)
def test_dtypes_arrive_and_come_back_unchanged(target: str, dtype: str) -> None:
    require(target)
    x = np.array([0, 1, 1]).astype(dtype)
    result = decorator(target)(output_type="numpy")(identity)(x)
    assert result.dtype == x.dtype
    assert result.tolist() == x.tolist()


def test_arrays_within_results_are_converted() -> None:
    torch = require("torch")

    @arraybridge.torch(output_type="numpy")
    def analyse(x: Any) -> Any:
        return {"sum": x.sum(), "parts": (x, [x * 2]), "name": "x", "count": 3}

    result = analyse(np.ones(2))
    assert isinstance(result["sum"], np.ndarray)
    assert result["parts"][1][0].tolist() == [2.0, 2.0]
    assert (result["name"], result["count"]) == ("x", 3)
    assert not any(isinstance(v, torch.Tensor) for v in (result["sum"], *result["parts"]))


# -- devices -----------------------------------------------------------------------------------------


def test_device_in_words() -> None:
    jax = require("jax")
    if len(jax.devices("cpu")) < 2:
        pytest.skip("JAX has one CPU device here")
    seen = []

    @arraybridge.jax(device="cpu:1")
    def double(x: Any, y: Any) -> Any:
        seen.extend([device_of(x), device_of(y)])
        return x + y

    result = double(IMAGE, y=jax.numpy.asarray(IMAGE))
    assert seen == ["cpu:1", "cpu:1"]
    assert device_of(result) == "cpu:1"
    assert double(result, result) is not None


@pytest.mark.parametrize(("name", "words"), [("jax", "cpu:1"), ("tensorflow", "cpu:1"), ("torch", "cpu")])
def test_arrays_that_the_function_makes_live_on_its_device(name: str, words: str) -> None:
    module = require(name)
    if arraybridge.Device.parse(words) not in arraybridge.framework(name).devices():
        pytest.skip(f"{name} has no {words} here")
    make = {
        "jax": lambda: module.numpy.zeros(3),
        "tensorflow": lambda: module.zeros(3),
        "torch": lambda: module.zeros(3),
    }[name]
    assert device_of(decorator(name)(device=words)(make)()) == words


def test_gpu_id_counts_the_devices_of_pyclesperanto() -> None:
    require("pyclesperanto")
    devices = arraybridge.framework("pyclesperanto").devices()
    last = len(devices) - 1
    result = arraybridge.pyclesperanto(gpu_id=last)(lambda x: x + x)(IMAGE)
    assert device_of(result) == f"opencl:{last}"
    assert values(result)[0] == [0.0, 2.0, 4.0]


def test_gpu_id_changes_nothing_for_numpy() -> None:
    assert arraybridge.numpy(gpu_id=3)(identity)(IMAGE) is IMAGE


@pytest.mark.parametrize("name", ["torch", "jax", "tensorflow", "pyclesperanto"])
@pytest.mark.parametrize("arrays", [0, 1])
def test_a_missing_device_is_refused_when_the_function_is_called(name: str, arrays: int) -> None:
    require(name)
    run = decorator(name)(gpu_id=77)(lambda *xs: xs)
    with pytest.raises(DeviceNotFoundError, match="77"):
        run(*[IMAGE] * arrays)


def test_a_missing_gpu_falls_back_to_the_host_where_that_is_asked_for() -> None:
    require("jax")
    with arraybridge.settings(missing_gpu="host"), pytest.warns(arraybridge.MissingGpuWarning):
        assert device_of(arraybridge.jax(gpu_id=77)(identity)(IMAGE)).kind == "cpu"


def test_gpu_id_auto_puts_the_arrays_of_a_call_on_one_device() -> None:
    require("pyclesperanto")
    places = arraybridge.pyclesperanto(gpu_id="auto")(lambda x, y: (device_of(x), device_of(y)))(
        IMAGE, y=IMAGE
    )
    assert places[0] == places[1]


def test_tracing_sees_the_conversions() -> None:
    require("torch")
    with arraybridge.trace() as log:
        arraybridge.torch(device="cpu", output_type="numpy")(lambda x: x + 1)(IMAGE)
    assert [(r.source, r.target) for r in log.records] == [("numpy", "torch"), ("torch", "numpy")]


# -- input_type, contract, metadata ------------------------------------------------------------------


def test_input_type_is_declared_and_strict_refuses_the_rest() -> None:
    torch = require("torch")

    @arraybridge.torch(input_type="numpy", strict=True, output_type="numpy")
    def double(picture: Any) -> Any:
        return picture * 2

    assert double(np.ones(2)).tolist() == [2.0, 2.0]
    with pytest.raises(SourceMismatchError, match=r"double\(\), argument 'picture'.*numpy.*torch"):
        double(torch.ones(2))
    with pytest.raises(SourceMismatchError, match=r"at \['a'\]\[0\]"):
        double(picture={"a": [torch.ones(2)]})
    loose = arraybridge.torch(input_type="numpy")(identity)
    assert loose.input_memory_type == "numpy"
    assert loose(torch.ones(2)).tolist() == [1.0, 1.0]


def test_memory_types_are_readable() -> None:
    def plain(x: Any) -> Any:
        return x

    def read(f: Any) -> tuple[str, str, str]:
        return f.input_memory_type, f.output_memory_type, f.execution_memory_type

    assert read(arraybridge.torch(plain)) == ("torch", "torch", "torch")
    assert read(arraybridge.cupy(output_type="input")(plain)) == ("cupy", "input", "cupy")
    both = arraybridge.jax(input_type=MemoryType.NUMPY, output_type=MemoryType.NUMPY, gpu_id=1)(plain)
    assert read(both) == ("numpy", "numpy", "jax")
    assert type(both.input_memory_type) is str
    assert (both.gpu_id, both.device) == (1, None)
    assert arraybridge.jax(device="cpu:1")(plain).device == "cpu:1"


def test_contract_checks_what_the_caller_gets() -> None:
    require("torch")
    seen = []

    def is_flat(result: Any) -> bool:
        seen.append(framework_of(result))
        return result.ndim == 1

    flatten = arraybridge.torch(contract=is_flat, output_type="numpy")(lambda x: x)
    assert flatten(np.ones(2)).tolist() == [1.0, 1.0]
    assert seen == ["numpy"]
    with pytest.raises(ValueError, match=r"breaks its contract is_flat"):
        flatten(IMAGE)

    def raising(result: Any) -> None:
        np.testing.assert_array_equal(result, 1)

    checked = arraybridge.numpy(contract=raising)(identity)
    checked(np.ones(2))
    with pytest.raises(AssertionError):
        checked(np.zeros(2))


def test_memory_types_only_declares() -> None:
    torch = require("torch")

    @memory_types("numpy", MemoryType.TORCH, contract=lambda r: r is not None)
    def f(x: Any) -> Any:
        """Says."""
        return x

    assert (f.input_memory_type, f.output_memory_type) == ("numpy", "torch")
    assert f.__doc__ == "Says."
    tensor = torch.ones(2)
    assert f(tensor) is tensor
    assert f(IMAGE) is IMAGE
    with pytest.raises(ValueError, match="contract"):
        f(None)
    with pytest.raises(UnknownFrameworkError, match="torch"):
        memory_types("numpy", "troch")
    with pytest.raises(TypeError, match="contract"):
        memory_types("numpy", "torch", contract="yes")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="cannot be called"):
        memory_types("numpy", "torch")(3)  # type: ignore[call-overload]


def test_name_docstring_signature_and_hints_stay() -> None:
    def segment(image: np.ndarray, sigma: float = 1.0, *, mask: Any = None) -> np.ndarray:
        """Finds the cells."""
        return image

    wrapped = arraybridge.torch(gpu_id=0)(segment)
    assert wrapped.__name__ == "segment"
    assert wrapped.__qualname__ == segment.__qualname__
    assert wrapped.__module__ == __name__
    assert wrapped.__doc__ == "Finds the cells."
    assert wrapped.__wrapped__ is segment
    assert inspect.signature(wrapped) == inspect.signature(segment)
    assert typing.get_type_hints(wrapped) == typing.get_type_hints(segment)
    assert inspect.isfunction(wrapped)


# -- kinds of functions ------------------------------------------------------------------------------


class Model:
    weight = 2.0

    @arraybridge.torch
    def bare(self, x: Any) -> Any:
        assert type(self) is Model
        return x * self.weight

    @arraybridge.torch(output_type="input")
    def called(self, x: Any) -> Any:
        return x * self.weight

    @arraybridge.torch(output_type="numpy")
    @staticmethod
    def static_inside(x: Any) -> Any:
        return x * 3

    @staticmethod
    @arraybridge.torch(output_type="numpy")
    def static_outside(x: Any) -> Any:
        return x * 4

    @arraybridge.torch(output_type="numpy")
    @classmethod
    def class_inside(cls, x: Any) -> Any:
        return x * cls.weight * 2

    @classmethod
    @arraybridge.torch(output_type="numpy")
    def class_outside(cls, x: Any) -> Any:
        return x * cls.weight * 3

    @property
    @arraybridge.torch(output_type="numpy")
    def as_property(self) -> Any:
        return convert_memory(np.ones(1), "torch")

    @arraybridge.torch(output_type="numpy")
    def __call__(self, x: Any) -> Any:
        return x * 7


def test_methods_of_every_kind() -> None:
    torch = require("torch")
    x, model = np.ones(1), Model()
    assert isinstance(model.bare(x), torch.Tensor)
    assert Model.bare(model, x).tolist() == [2.0]
    assert model.called(x).tolist() == [2.0]
    assert model.called.execution_memory_type == "torch"
    assert model.static_inside(x).tolist() == Model.static_inside(x).tolist() == [3.0]
    assert model.static_outside(x).tolist() == [4.0]
    assert model.class_inside(x).tolist() == Model.class_inside(x).tolist() == [4.0]
    assert model.class_outside(x).tolist() == [6.0]
    assert model.as_property.tolist() == [1.0]
    assert model(x).tolist() == [7.0]


def test_self_is_left_alone_also_where_it_is_an_array() -> None:
    torch = require("torch")

    class Image(np.ndarray):
        @arraybridge.torch(output_type="numpy")
        def add(self, other: Any) -> Any:
            assert type(self) is Image
            assert isinstance(other, torch.Tensor)
            return other + float(self[0])

    picture = np.ones(2).view(Image)
    assert picture.add(np.zeros(2)).tolist() == [1.0, 1.0]


def test_a_method_of_a_torch_model() -> None:
    torch = require("torch")

    class Net(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(3, 1, bias=False)
            torch.nn.init.ones_(self.layer.weight)

        @arraybridge.torch(output_type="input", grad="detach")
        def predict(self, x: Any) -> Any:
            return self.layer(x)

        @arraybridge.torch
        def forward(self, x: Any) -> Any:
            return self.layer(x)

    net = Net()
    result = net.predict(IMAGE)
    assert isinstance(result, np.ndarray)
    assert result.tolist() == [[3.0], [12.0]]
    loss = net(IMAGE).sum()
    loss.backward()
    assert net.layer.weight.grad.tolist() == [[3.0, 5.0, 7.0]]


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


def test_generators_are_refused_at_decoration() -> None:
    def generator(x: Any) -> Iterator[Any]:
        yield x

    async def asynchronous(x: Any) -> AsyncIterator[Any]:
        yield x

    for fn in (generator, asynchronous):
        for refusing in (arraybridge.numpy, arraybridge.torch(gpu_id=0), memory_types("numpy", "numpy")):
            with pytest.raises(ValueError, match=f"{fn.__name__} is a generator"):
                refusing(fn)


def test_partials_and_objects_that_can_be_called() -> None:
    torch = require("torch")

    def scale(x: Any, factor: float) -> Any:
        """Scales."""
        return x * factor

    by_three = arraybridge.torch(output_type="numpy")(functools.partial(scale, factor=3))
    assert by_three(np.ones(1)).tolist() == [3.0]
    assert by_three.__name__ == "scale"
    assert by_three.__doc__ == "Scales."
    assert list(inspect.signature(by_three).parameters) == ["x", "factor"]

    layer = torch.nn.Linear(3, 1, bias=False)
    run = arraybridge.torch(output_type="numpy", grad="detach")(layer)
    assert run(IMAGE).shape == (2, 1)
    assert run.__name__ == "Linear"
    assert run.__wrapped__ is layer
    bound = arraybridge.torch(output_type="numpy")(Model().bare.__wrapped__.__get__(Model()))
    assert bound(np.ones(1)).tolist() == [2.0]
    assert arraybridge.numpy(len)([1, 2]) == 2
    assert arraybridge.numpy(np.add)(IMAGE, IMAGE).tolist() == (IMAGE * 2).tolist()


def test_decorators_stack() -> None:
    require("torch")
    require("jax")
    inner = arraybridge.jax(output_type="input")(lambda x: x + 1)
    outer = arraybridge.torch(output_type="numpy")(lambda x: inner(x) * 2)
    assert outer(np.ones(1, np.float32)).tolist() == [4.0]


# -- pickles, processes, threads ---------------------------------------------------------------------


def test_pickles_by_reference() -> None:
    again = pickle.loads(pickle.dumps(cases.doubled))
    assert again is cases.doubled
    assert pickle.loads(pickle.dumps(arraybridge.torch)) is arraybridge.torch


def test_cloudpickle_carries_a_local_function_by_value() -> None:
    cloudpickle = pytest.importorskip("cloudpickle")
    require("torch")
    factor = 3
    local = arraybridge.torch(output_type="numpy", device="cpu")(lambda x: x * factor)
    assert local(np.ones(1)).tolist() == [3.0]
    again = pickle.loads(cloudpickle.dumps(local))
    assert again(np.ones(1)).tolist() == [3.0]
    assert again.execution_memory_type == "torch"


def test_a_spawned_worker_runs_a_decorated_function() -> None:
    require("torch")
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        direct = pool.apply(cases.doubled, (np.ones(2),))
        both = pool.apply(cases.run_in_worker, (np.ones(2),))
    assert direct.tolist() == [2.0, 2.0]
    assert [r.tolist() for r in both] == [[2.0, 2.0], [2.0, 2.0]]


@pytest.mark.parametrize("name", HOST)
def test_eight_threads(name: str) -> None:
    require(name)
    barrier = threading.Barrier(8)
    run = decorator(name)(output_type="numpy")(lambda x: x + x)

    def work(i: int) -> bool:
        barrier.wait(30)
        x = np.full(100, float(i), np.float32)
        return all((run(x) == 2 * i).all() for _ in range(10))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


# -- gradients, jit, compile -------------------------------------------------------------------------


def test_gradients_are_kept_inside_torch() -> None:
    torch = require("torch")

    @arraybridge.torch
    def square(x: Any, weights: Any) -> Any:
        return (x * weights).sum()

    weights = torch.ones(3, requires_grad=True)
    square(np.array([1.0, 2.0, 3.0], np.float32), weights).backward()
    assert weights.grad.tolist() == [1.0, 2.0, 3.0]


def test_a_tensor_that_requires_grad_follows_grad() -> None:
    torch = require("torch")
    require("jax")
    tensor = torch.ones(2, requires_grad=True)
    plain = arraybridge.jax(identity)
    with pytest.raises(GradientError, match=r"identity\(\), argument 'x'.*grad='detach'"):
        plain(tensor)
    assert values(arraybridge.jax(grad="detach")(identity)(tensor)) == [1.0, 1.0]
    with pytest.raises(GradientError, match=r"identity\(\), result"):
        arraybridge.torch(output_type="numpy")(identity)(tensor)
    assert arraybridge.torch(output_type="numpy", grad="detach")(identity)(tensor).tolist() == [1.0, 1.0]


def test_jax_transformations_around_a_jax_function() -> None:
    jax = require("jax")
    f = arraybridge.jax(lambda x, y: {"z": (x * x * y).sum()})
    x = jax.numpy.array([1.0, 2.0])
    assert float(jax.jit(f)(x, x)["z"]) == 9.0
    assert jax.grad(lambda v: f(v, 2.0)["z"])(x).tolist() == [4.0, 8.0]
    assert jax.vmap(f)(x, x)["z"].tolist() == [1.0, 8.0]
    one_constant = jax.jit(lambda v: f(v, np.ones(2, np.float32))["z"])
    assert float(one_constant(x)) == 5.0


def test_jax_jit_inside() -> None:
    jax = require("jax")
    f = arraybridge.jax(output_type="numpy")(jax.jit(lambda x: x * 2))
    assert f(IMAGE).tolist() == (IMAGE * 2).tolist()


def test_jax_jit_around_another_framework_is_refused_clearly() -> None:
    jax = require("jax")
    require("torch")
    for refusing in (
        arraybridge.numpy(identity),
        arraybridge.torch(identity),
        arraybridge.jax(output_type="numpy")(identity),
        arraybridge.jax(dtype_conversion=DtypeConversion.UINT8)(identity),
    ):
        with pytest.raises(ArrayNotSupportedError, match=r"identity\(\).*outside jax\.jit"):
            jax.jit(refusing)(jax.numpy.ones(2))


def test_tf_function_and_gradients_around_a_tensorflow_function() -> None:
    tf = require("tensorflow")
    f = arraybridge.tensorflow(lambda x: {"y": x * x})
    assert tf.function(lambda x: f(x)["y"])(tf.constant([2.0])).numpy().tolist() == [4.0]
    with tf.GradientTape() as tape:
        x = tf.Variable([3.0])
        y = f(x)["y"]
    assert tape.gradient(y, x).numpy().tolist() == [6.0]
    refused = arraybridge.numpy(identity)
    with pytest.raises(ArrayNotSupportedError, match=r"outside tf\.function"):
        tf.function(refused, autograph=False)(tf.constant([2.0]))


def compiled(fn: Any, **options: Any) -> Any:
    torch = require("torch")
    torch.compiler.reset()
    return torch.compile(fn, backend="eager", **options)


@pytest.mark.parametrize("options", [{}, {"device": "cpu"}, {"output_type": "input"}])
def test_torch_compile_around_a_torch_function_makes_one_graph(options: Any) -> None:
    torch = require("torch")
    f = arraybridge.torch(**options)(lambda x, k=2.0: {"y": torch.sin(x) * k})
    weights = torch.ones(3, requires_grad=True)
    result = compiled(lambda x: f(x)["y"].sum(), fullgraph=True)(weights)
    result.backward()
    assert torch.allclose(weights.grad, 2 * torch.cos(torch.ones(3)))


def test_torch_compile_looks_at_no_plan_of_another_call() -> None:
    torch = require("torch")
    tf = require("tensorflow")
    convert_memory(np.ones(3, np.float32), "torch", dtype=tf.float32)  # whose dtypes it cannot hash
    f = arraybridge.torch(device="cpu")(lambda x: torch.sin(x))
    x = torch.ones(3)
    assert torch.equal(compiled(lambda x: f(x) * 2, fullgraph=True)(x), torch.sin(x) * 2)


def test_torch_compile_comes_before_all_else() -> None:
    """What the library learns at first sight of a type, it may have to learn while torch traces."""
    require("torch")
    done = run_script("compile_first.py", env={"PYTHONWARNINGS": ""})
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[3.0, 3.0]\n"


@pytest.mark.parametrize("options", [{}, {"grad": "detach"}, {"contract": lambda _: True}])
def test_torch_compile_converts_numpy_arrays_too(options: Any) -> None:
    """It traces NumPy with tensors, which are not to be taken for what came in, nor remembered as such."""
    torch = require("torch")
    f = arraybridge.torch(**options)(lambda x: x * 2)
    x = np.arange(3, dtype=np.float32)
    found = compiled(lambda x: f(x))(x)
    assert isinstance(found, torch.Tensor)
    assert found.tolist() == [0.0, 2.0, 4.0]
    afterwards = arraybridge.torch(grad="detach")(lambda x: x + 1)(x)
    assert isinstance(afterwards, torch.Tensor)
    assert afterwards.tolist() == [1.0, 2.0, 3.0]


def test_torch_compile_inside() -> None:
    torch = require("torch")
    f = arraybridge.torch(output_type="numpy")(compiled(lambda x: torch.sin(x) * 2, fullgraph=True))
    assert f(np.zeros(2)).tolist() == [0.0, 0.0]


def test_torch_compile_around_another_framework_breaks_the_graph_or_says_why() -> None:
    torch = require("torch")
    f = arraybridge.numpy(output_type="torch")(lambda x: np.sqrt(x))
    assert compiled(lambda x: f(x) + 1)(torch.full((2,), 4.0)).tolist() == [3.0, 3.0]
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"arraybridge.*leave fullgraph=True out"):
        compiled(lambda x: f(x) + 1, fullgraph=True)(torch.full((2,), 4.0))


def test_errors_name_function_argument_and_leaf() -> None:
    require("torch")
    masked = np.ma.masked_equal(np.array([1.0, -1.0]), -1.0)

    @arraybridge.torch
    def segment(picture: Any, *more: Any, **options: Any) -> Any:
        return picture

    with pytest.raises(ArrayNotSupportedError, match=r"segment\(\), argument 'picture': .*mask") as caught:
        segment(masked)
    assert caught.value.source_type == "numpy"
    assert caught.value.target_type == "torch"
    with pytest.raises(ArrayNotSupportedError, match=r"argument \*more\[1\]: .*mask"):
        segment(IMAGE, 1, masked)
    with pytest.raises(ArrayNotSupportedError, match=r"argument 'side': at \['a'\]\[1\]: .*mask"):
        segment(IMAGE, side={"a": [1, masked]})
    with pytest.raises(DtypeNotSupportedError, match=r"segment\(\), argument 'picture': .*object"):
        segment(np.array(["a", None], object))


def test_a_result_that_cannot_be_converted_is_named() -> None:
    require("pyclesperanto")

    @arraybridge.numpy(output_type="pyclesperanto")
    def wide(x: Any) -> Any:
        return {"fine": x, "wide": x.astype("float64")}

    with pytest.raises(DtypeNotSupportedError, match=r"wide\(\), result: at \['wide'\]: .*float64"):
        wide(IMAGE)


def test_errors_of_the_function_pass_untouched() -> None:
    error = ArrayNotSupportedError("my own")

    @arraybridge.numpy
    def fail(x: Any) -> Any:
        raise error

    with pytest.raises(ArrayNotSupportedError) as caught:
        fail(IMAGE)
    assert caught.value is error
    assert str(error) == "my own"


# -- bad options -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"gpuid": 0}, TypeError, r"no option 'gpuid' \(did you mean 'gpu_id'"),
        ({"output": "torch"}, TypeError, r"did you mean 'output_type'"),
        ({"output_type": "troch"}, UnknownFrameworkError, r"did you mean 'torch'"),
        ({"output_type": "inptu"}, UnknownFrameworkError, r"did you mean 'input'"),
        ({"output_type": 3}, TypeError, "named by a string"),
        ({"input_type": "nunpy"}, UnknownFrameworkError, r"did you mean 'numpy'"),
        ({"gpu_id": -1}, ValueError, "gpu_id"),
        ({"gpu_id": True}, ValueError, "gpu_id"),
        ({"gpu_id": 0.0}, ValueError, "gpu_id"),
        ({"device": "gup:0"}, ValueError, "is not a device"),
        ({"device": 0}, ValueError, "is not a device"),
        ({"gpu_id": 0, "device": "gpu:0"}, ValueError, "not both"),
        ({"strict": True}, ValueError, "input_type"),
        ({"strict": 1, "input_type": "numpy"}, TypeError, "strict"),
        ({"oom_recovery": "spilt"}, ValueError, r"did you mean 'split'"),
        ({"oom_recovery": 3}, TypeError, "oom_recovery"),
        ({"max_retries": -1}, ValueError, "max_retries"),
        ({"max_retries": 1.5}, TypeError, "max_retries"),
        ({"split_axis": "0"}, TypeError, "split_axis"),
        ({"min_split": 0}, ValueError, "min_split"),
        ({"dtype_conversion": "uint9"}, TypeError, r"did you mean 'uint8'"),
        ({"slice_by_slice": "yes"}, TypeError, "slice_by_slice"),
        ({"contract": 3}, TypeError, "contract"),
        ({"grad": "detatch"}, ValueError, r"did you mean 'detach'"),
    ],
)
def test_wrong_options_fail_at_decoration(options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        arraybridge.torch(**options)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (3, "options go by name"),
        ("cpu", "options go by name"),
        (None, "cannot be called"),
        (int, "class"),
        (property(identity), "put @property above"),
    ],
)
def test_what_is_no_function_is_refused(what: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        arraybridge.torch(what)
    with pytest.raises(TypeError):
        arraybridge.torch()(what)


def test_function_and_options_together_are_refused() -> None:
    with pytest.raises(TypeError, match="not both"):
        arraybridge.torch(identity, gpu_id=0)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="one function"):
        arraybridge.torch(identity, identity)  # type: ignore[call-overload]


@pytest.mark.parametrize("option", [{"oom_recovery": True}, {"slice_by_slice": True}])
def test_what_takes_plain_functions_refuses_others_at_decoration(option: Any) -> None:
    async def coroutine(x: Any) -> Any:
        return x

    def generator(x: Any) -> Any:
        yield x

    with pytest.raises(ValueError, match="is a coroutine"):
        arraybridge.numpy(**option)(coroutine)
    with pytest.raises(ValueError, match="is a generator"):
        arraybridge.numpy(**option)(generator)


def test_the_decorator_taken_for_its_framework_says_so() -> None:
    with pytest.raises(AttributeError, match=r"arraybridge\.torch is a decorator.*torch\.zeros"):
        arraybridge.torch.zeros  # type: ignore[attr-defined]  # noqa: B018


# -- dtype_conversion, slices, recovery, plugins -----------------------------------------------------


@pytest.mark.parametrize("target", FRAMEWORKS)
def test_dtype_conversion_on_request(target: str) -> None:
    require(target)
    kept = decorator(target)(dtype_conversion=DtypeConversion.PRESERVE_INPUT, output_type="numpy")
    result = kept(lambda x: decorator("numpy")(output_type=target)(lambda a: a.astype("float32"))(x))(
        np.array([[0, 50], [100, 200]], np.uint8)
    )
    assert result.dtype == np.uint8
    assert result.tolist() == [[0, 64], [128, 255]]
    to_uint16 = decorator(target)(dtype_conversion=DtypeConversion.UINT16, output_type="numpy")(identity)
    assert to_uint16(IMAGE).tolist() == [[0, 13107, 26214], [39321, 52428, 65535]]


@pytest.mark.parametrize("target", FRAMEWORKS)
def test_slice_by_slice_feeds_planes(target: str) -> None:
    require(target)
    shapes = []

    @decorator(target)(slice_by_slice=True, output_type="numpy")
    def double(x: Any, y: Any, name: str) -> Any:
        shapes.append((tuple(x.shape), tuple(y.shape), name))
        return x + y

    stack = np.arange(24, dtype=np.float32).reshape(4, 2, 3)
    assert double(stack, y=stack, name="n").tolist() == (2 * stack).tolist()
    assert shapes == [((2, 3), (2, 3), "n")] * 4
    shapes.clear()
    assert double(IMAGE, IMAGE, "n").tolist() == (2 * IMAGE).tolist()
    assert len(shapes) == 1


def test_slice_by_slice_refuses_what_it_cannot_feed() -> None:
    f = arraybridge.numpy(slice_by_slice=True)(lambda x, y: x + y)
    with pytest.raises(ValueError, match="three axes"):
        f(np.ones((2, 2, 2, 2)), 1)
    with pytest.raises(ValueError, match="2 planes, another one has 3"):
        f(np.ones((2, 2, 2)), np.ones((3, 2, 2)))


def test_a_method_slice_by_slice() -> None:
    class Filter:
        @arraybridge.numpy(slice_by_slice=True)
        def run(self, x: Any) -> Any:
            assert type(self) is Filter
            return x.max()

    assert Filter().run(np.arange(8.0).reshape(2, 2, 2)) == [3.0, 7.0]


class Hungry:
    """Runs out of memory while a batch is larger than it bears."""

    def __init__(self, failures: int = 0, rows: int = 10**9) -> None:
        self.failures, self.rows, self.calls = failures, rows, 0

    def __call__(self, x: Any, max_retries: float = 2.0) -> Any:
        self.calls += 1
        if self.calls <= self.failures or len(x) > self.rows:
            raise MemoryError("rehearsed")
        return x * max_retries


@pytest.mark.parametrize("target", HOST)
def test_oom_recovery_tries_again(target: str) -> None:
    require(target)
    hungry = Hungry(failures=2)
    run = decorator(target)(oom_recovery=True, output_type="numpy")(hungry)
    # A keyword of the function may be called like an option of the recovery.
    assert run(IMAGE, max_retries=2.0).tolist() == (2 * IMAGE).tolist()
    assert hungry.calls == 3
    with pytest.raises(MemoryError, match="rehearsed"):
        decorator(target)(oom_recovery=True, max_retries=1)(Hungry(failures=2))(IMAGE)
    with pytest.raises(MemoryError):
        decorator(target)(Hungry(failures=1))(IMAGE)


@pytest.mark.parametrize("target", HOST)
def test_oom_recovery_splits_the_batch(target: str) -> None:
    require(target)
    hungry = Hungry(rows=3)
    run = decorator(target)(oom_recovery="split", output_type="input")(hungry)
    batch = np.arange(20, dtype=np.float32).reshape(10, 2)
    assert run(batch, max_retries=2.0).tolist() == (2 * batch).tolist()
    assert hungry.calls > 4


def test_oom_recovery_of_a_method() -> None:
    class Net:
        calls = 0

        @arraybridge.numpy(oom_recovery="split", min_split=2)
        def run(self, x: Any) -> Any:
            assert type(self) is Net
            if len(x) > 2:
                raise MemoryError
            return x + 1

    assert Net().run(np.zeros(8)).tolist() == [1.0] * 8


def test_errors_that_are_no_oom_pass() -> None:
    with pytest.raises(ZeroDivisionError):
        arraybridge.numpy(oom_recovery=True)(lambda x: 1 // 0)(IMAGE)


def test_a_registered_framework_has_its_decorator(boxes: Framework) -> None:
    assert arraybridge.framework("boxes").decorator is boxes.decorator

    @boxes.decorator(output_type="input", slice_by_slice=True)
    def double(x: Any) -> Any:
        assert isinstance(x, Box)
        return Box(x.memory * 2)

    stack = np.arange(8.0).reshape(2, 2, 2)
    assert double(stack).tolist() == (2 * stack).tolist()
    assert double.execution_memory_type == "boxes"
    assert values(arraybridge.numpy(output_type="boxes")(lambda x: x + 1)(Box(np.ones(1)))) == [2.0]
    named = boxes.decorator(dtype_conversion=DtypeConversion.UINT8)(identity)(np.array([0.0, 1.0]))
    assert values(named) == [0, 255]


def test_built_in_decorators_are_those_of_the_frameworks() -> None:
    for name in HOST:
        require(name)
        assert arraybridge.framework(name).decorator is decorator(name)
    with pytest.raises(UnknownFrameworkError, match="torch"):
        arraybridge.functions.decorators.FrameworkDecorator("troch")


def test_an_array_behind_a_protocol_is_converted() -> None:
    require("torch")

    class Foreign:
        def __init__(self) -> None:
            self.held = np.arange(3.0)
            self.__array_interface__ = self.held.__array_interface__

        @property
        def __array_interface__(self) -> Any:
            return self.__dict__["interface"]

        @__array_interface__.setter
        def __array_interface__(self, value: Any) -> None:
            self.__dict__["interface"] = value

    result = arraybridge.torch(output_type="input")(lambda x: x + 1)(Foreign())
    assert isinstance(result, np.ndarray)
    assert result.tolist() == [1.0, 2.0, 3.0]


def test_cupy_without_a_card_decorates_and_says_why_it_cannot_run() -> None:
    f = arraybridge.cupy(gpu_id=0, output_type="input")(identity)
    assert f.execution_memory_type == "cupy"
    require("cupy")
    if arraybridge.framework("cupy").devices():
        pytest.skip("there is a card; tests/gpu has what runs on it")
    with pytest.raises(DeviceNotFoundError, match=r"identity\(\), argument 'x': cupy has no device gpu:0"):
        f(IMAGE)


def test_streams_are_entered_around_the_function_alone() -> None:
    """A framework that plays a card: its device and its streams are entered for the function."""
    events: list[str] = []

    class Side(Streams):
        def stream(self, device: Any) -> Any:
            @contextlib.contextmanager
            def side() -> Iterator[None]:
                events.append(f"enter {device}")
                try:
                    yield
                finally:
                    events.append("leave")

            return side()

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


def test_trees_go_by_plans_and_say_where_they_fail() -> None:
    """Warm calls bring trees by plans; what a plan cannot bring is told as by the first call."""
    torch = require("torch")
    seen: list[Any] = []

    @arraybridge.torch
    def keep(batch: Any) -> Any:
        seen.append(batch)
        return {"doubled": [batch["x"] * 2], "n": 3, "scalar": np.float32(2)}

    x = np.arange(3.0)
    for _ in range(3):
        found = keep({"x": x, "label": "a"})
        assert isinstance(found["doubled"][0], torch.Tensor)
        assert found["doubled"][0].tolist() == [0.0, 2.0, 4.0]
        assert (found["n"], float(found["scalar"])) == (3, 2.0)
        assert seen[-1]["label"] == "a"
        assert seen[-1]["x"].data_ptr() == x.__array_interface__["data"][0]
    for value in (np.array(["a"]), np.ma.masked_array(x, [True, False, False])):
        with pytest.raises(
            arraybridge.MemoryConversionError, match=r"keep\(\), argument 'batch': at \['x'\]"
        ):
            keep({"x": value})
    # What is aligned otherwise, or reversed, is brought the careful way.
    assert keep({"x": x[::-1]})["doubled"][0].tolist() == [4.0, 2.0, 0.0]


def test_results_in_trees_go_home_by_plans() -> None:
    require("torch")

    @arraybridge.torch(output_type="numpy")
    def both(x: Any, scale: float) -> Any:
        return x * scale, [x + 1, None]

    for _ in range(3):
        first, (second, nothing) = both(np.ones(2), 3.0)
        assert type(first) is type(second) is np.ndarray
        assert (first.tolist(), second.tolist(), nothing) == ([3.0, 3.0], [2.0, 2.0], None)
