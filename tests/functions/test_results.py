"""How results of a decorated function go back to its caller."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import (
    DtypeConversion,
    DtypeNotSupportedError,
    GradientError,
    convert_memory,
    device_of,
)
from tests.functions.cases import (
    FRAMEWORKS,
    IMAGE,
    decorator,
    framework_of,
    identity,
    values,
)
from tests.helpers import require


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


def test_results_are_not_rescaled_and_not_cast() -> None:
    """A peer stretches the result over the range of uint16 and gives it back as uint16."""

    @arraybridge.numpy
    def half(im: Any) -> Any:
        return im / 2

    result = half(np.array([[10, 20], [30, 40]], np.uint16))
    assert result.dtype == np.float64
    assert result.tolist() == [[5.0, 10.0], [15.0, 20.0]]


def test_arrays_within_results_are_converted_by_warm_calls_too() -> None:
    require("torch")

    @arraybridge.torch(output_type="numpy")
    def analyse(x: Any, scale: float) -> Any:
        return {"parts": (x * scale, [x + 1, None]), "name": "x", "sum": x.sum(), "count": 3}

    for _ in range(3):
        result = analyse(np.ones(2), 3.0)
        first, (second, nothing) = result["parts"]
        assert type(first) is type(second) is type(result["sum"]) is np.ndarray
        assert (first.tolist(), second.tolist(), nothing) == ([3.0, 3.0], [2.0, 2.0], None)
        assert (result["name"], result["count"]) == ("x", 3)


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


def test_a_result_gets_back_a_dtype_that_its_framework_lacks() -> None:
    require("pyclesperanto")
    f = arraybridge.pyclesperanto(
        dtype="float32", output_type="input", dtype_conversion=DtypeConversion.PRESERVE_INPUT
    )(identity)
    result = f(IMAGE.astype(np.float64))
    assert result.dtype == np.float64
    assert result.tolist() == IMAGE.tolist()


WITH_AXES_NONE = [name for name in FRAMEWORKS if name != "pyclesperanto"]  # it has no 0-d arrays


SCALARS = [np.float32(1.5), np.int64(2**40), np.bool_(True), np.complex128(1 + 2j), np.uint8(3)]


@pytest.mark.parametrize("scalar", SCALARS, ids=lambda s: s.dtype.name)
@pytest.mark.parametrize("target", WITH_AXES_NONE)
def test_numpy_scalars_among_results_are_converted(target: str, scalar: Any) -> None:
    require(target)
    f = arraybridge.numpy(output_type=target)(lambda x: {"alone": scalar, "list": [scalar, "words"]})
    for result in (f(IMAGE), f(None)):
        for found in (result["alone"], result["list"][0]):
            assert values(found) == scalar.item()
            if target == "numpy":
                assert found is scalar
            else:
                assert arraybridge.detect_memory_type(found) == target
                assert arraybridge.framework(target).dtype_name(found) == scalar.dtype.name
                assert arraybridge.framework(target).shape(found) == ()
        assert result["list"][1] == "words"
    alone = arraybridge.numpy(output_type=target)(lambda x: scalar)(IMAGE)
    assert values(alone) == scalar.item()
    assert target == "numpy" or arraybridge.detect_memory_type(alone) == target


def test_numpy_scalars_go_back_to_what_was_brought() -> None:
    torch = require("torch")
    f = arraybridge.numpy(output_type="input")(lambda x: (x.sum(), np.float32(2)))
    total, two = f(torch.ones(3))
    assert isinstance(total, torch.Tensor)
    assert isinstance(two, torch.Tensor)
    assert (total.shape, float(total), two.dtype) == ((), 3.0, torch.float32)
    total, two = f(np.ones(3))
    assert type(total) is np.float64
    assert type(two) is np.float32
    assert type(arraybridge.numpy(output_type="input")(lambda n: np.float32(n))(3)) is np.float32


def test_scalars_that_no_framework_has_or_that_need_axes_stay() -> None:
    require("torch")
    for scalar in (np.datetime64("2024-01-01"), np.str_("words"), np.timedelta64(3)):
        assert arraybridge.torch(lambda x, s=scalar: s)(IMAGE) is scalar
    require("pyclesperanto")
    two = np.float64(2)
    assert arraybridge.pyclesperanto(lambda x: two)(IMAGE) is two


def test_a_scalar_is_not_scaled() -> None:
    f = arraybridge.numpy(dtype_conversion=DtypeConversion.UINT8)(lambda x: (x, x.mean()))
    image, mean = f(np.array([0.0, 1.0]))
    assert image.tolist() == [0, 255]
    assert mean == 0.5


def test_a_result_that_cannot_be_converted_is_named() -> None:
    require("pyclesperanto")

    @arraybridge.numpy(output_type="pyclesperanto")
    def wide(x: Any) -> Any:
        return {"fine": x, "wide": x.astype("float64")}

    with pytest.raises(DtypeNotSupportedError, match=r"wide\(\), result: at \['wide'\]: .*float64"):
        wide(IMAGE)
