"""Conversion of a decorated function's results for its caller."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import DtypeConversion, DtypeNotSupportedError, GradientError, convert_memory, device_of
from tests.decorators.cases import FRAMEWORKS, HOST, IMAGE, decorator, framework_of, identity, values
from tests.helpers import jax_with, require


def test_output_type_input_follows_the_first_array() -> None:
    torch = require("torch")
    require("jax")
    mixed = arraybridge.jax(output_type="input")(lambda *args, **kwargs: kwargs["mask"] + 1)
    ones = np.ones(2, np.float32)
    assert isinstance(mixed(3, "x", [{"a": torch.ones(2)}], mask=ones), torch.Tensor)
    assert isinstance(mixed(ones, mask=torch.ones(2)), np.ndarray)
    made = arraybridge.torch(output_type="input")(lambda n: torch.ones(n))(3)
    assert isinstance(made, torch.Tensor), "without an array argument, the result must not change"


def test_output_type_input_restores_the_device() -> None:
    jax_with(2)
    require("torch")
    x = convert_memory(IMAGE, "jax", device="cpu:1")
    result = arraybridge.torch(output_type="input")(lambda t: t * 2)(x)
    assert device_of(result) == "cpu:1"
    assert values(result)[1] == [6.0, 8.0, 10.0]


def test_contract_checks_the_converted_result() -> None:
    require("torch")

    def is_flat(result: Any) -> bool:
        assert framework_of(result) == "numpy"
        return result.ndim == 1

    flatten = arraybridge.torch(contract=is_flat, output_type="numpy")(lambda x: x)
    assert flatten(np.ones(2)).tolist() == [1.0, 1.0]
    with pytest.raises(ValueError, match=r"breaks its contract is_flat"):
        flatten(IMAGE)
    checked = arraybridge.numpy(contract=lambda x: np.testing.assert_array_equal(x, 1))(identity)
    checked(np.ones(2))
    with pytest.raises(AssertionError):
        checked(np.zeros(2))


def test_tensors_that_require_grad_follow_the_grad_option() -> None:
    torch = require("torch")
    require("jax")
    tensor = torch.ones(2, requires_grad=True)
    plain = arraybridge.jax(identity)
    with pytest.raises(GradientError, match=r"identity\(\), argument 'x'.*grad='detach'"):
        plain(tensor)
    assert values(arraybridge.jax(grad="detach")(identity)(tensor)) == [1.0, 1.0]
    with pytest.raises(GradientError, match=r"identity\(\), result: .*pass grad='detach' to the decorator"):
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


def test_results_restore_a_dtype_that_the_framework_lacks() -> None:
    require("pyclesperanto")
    f = arraybridge.pyclesperanto(
        dtype="float32", output_type="input", dtype_conversion=DtypeConversion.PRESERVE_INPUT
    )(identity)
    result = f(IMAGE.astype(np.float64))
    assert result.dtype == np.float64
    assert result.tolist() == IMAGE.tolist()


@pytest.mark.parametrize("scalar", [np.int64(2**40), np.bool_(True), np.complex128(1 + 2j)], ids=repr)
@pytest.mark.parametrize("target", HOST)
def test_numpy_scalars_among_results_are_converted(target: str, scalar: Any) -> None:
    require(target)
    result = arraybridge.numpy(output_type=target)(lambda x: [scalar, "words"])(IMAGE)
    alone = arraybridge.numpy(output_type=target)(lambda x: scalar)(None)
    assert result[1] == "words"
    for x in (result[0], alone):
        assert values(x) == scalar.item()
        if target != "numpy":
            assert framework_of(x) == target
            assert arraybridge.framework(target).dtype_name(x) == scalar.dtype.name
            assert arraybridge.framework(target).shape(x) == ()


def test_numpy_scalars_are_converted_to_the_input_type_or_stay() -> None:
    torch = require("torch")
    f = arraybridge.numpy(output_type="input")(lambda x: (x.sum(), np.float32(2)))
    total, two = f(torch.ones(3))
    assert (type(total), total.shape, float(total), two.dtype) == (torch.Tensor, (), 3.0, torch.float32)
    assert [type(x) for x in f(np.ones(3))] == [np.float64, np.float32]
    for scalar in (np.datetime64("2024-01-01"), np.str_("words"), np.timedelta64(3, "D")):
        assert arraybridge.torch(lambda x, s=scalar: s)(IMAGE) is scalar
    require("pyclesperanto")  # does not support 0-d arrays
    number = np.float64(2)
    assert arraybridge.pyclesperanto(lambda x: number)(IMAGE) is number
    image, mean = arraybridge.numpy(dtype_conversion=DtypeConversion.UINT8)(lambda x: (x, x.mean()))(IMAGE)
    assert (image.max(), mean) == (255, 2.5)  # a scalar is not scaled


def test_errors_name_results_that_cannot_be_converted() -> None:
    require("pyclesperanto")

    @arraybridge.numpy(output_type="pyclesperanto")
    def wide(x: Any) -> Any:
        return {"fine": x, "wide": x.astype("float64")}

    with pytest.raises(DtypeNotSupportedError, match=r"wide\(\), result\['wide'\]: .*float64"):
        wide(IMAGE)


def test_an_argument_that_the_function_puts_into_itself_raises() -> None:
    @arraybridge.numpy(output_type="input")
    def grow(history: list[Any], x: Any) -> Any:
        history.append(history)
        return x

    with pytest.raises(ValueError, match="contains itself"):
        grow([1], np.ones(2))
