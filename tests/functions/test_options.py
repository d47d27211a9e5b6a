"""Options of the decorators, and what is an array to them: dtype, stream, device, scalars, tables."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import DtypeConversion, UnknownArrayError
from arraybridge.frameworks.parts import Streams
from tests.functions.cases import FRAMEWORKS, HOST, IMAGE, decorator, values
from tests.helpers import require

WITH_AXES_NONE = [name for name in FRAMEWORKS if name != "pyclesperanto"]  # it has no 0-d arrays


class Table:
    """What pandas, xarray and h5py have: an array can be made of it, and it is none."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return np.ones((2, 2), dtype)


def identity(x: Any, *rest: Any, **named: Any) -> Any:
    return x


# -- what could be made an array ----------------------------------------------------------------------

CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "alone": ((Table(),), {}, "argument 'x'"),
    "beside others": ((1, Table()), {}, r"argument \*rest\[0\]"),
    "by keyword": ((1,), {"image": Table()}, "argument 'image'"),
    "in a container": (({"a": [Table()]},), {}, "argument 'x'"),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_call_without_arrays_but_with_a_table_is_refused(name: str, call: str) -> None:
    require(name)
    args, kwargs, where = CALLS[call]
    ran: list[Any] = []
    f = decorator(name)(lambda x, *rest, **named: ran.append(x))
    with pytest.raises(UnknownArrayError, match=rf"{where}: .*Table is no array: .*np\.asarray\(x\)"):
        f(*args, **kwargs)
    assert not ran


@pytest.mark.parametrize("call", CALLS)
def test_strict_refuses_a_table_beside_an_array_too(call: str) -> None:
    args, kwargs, _ = CALLS[call]
    f = arraybridge.numpy(input_type="numpy", strict=True)(identity)
    assert arraybridge.numpy(identity)(np.ones(2), *args, **kwargs).tolist() == [1.0, 1.0]
    with pytest.raises(UnknownArrayError, match="is no array"):
        f(np.ones(2), *args, **kwargs)


def test_methods_and_coroutines_refuse_tables() -> None:
    class Model(Table):
        """Its methods are not refused for what it is itself."""

        @arraybridge.numpy
        def method(self, x: Any) -> Any:
            return x

    assert Model().method(3) == 3
    with pytest.raises(UnknownArrayError, match="argument 'x'"):
        Model().method(Table())

    @arraybridge.numpy
    async def later(x: Any) -> Any:
        return x

    with pytest.raises(UnknownArrayError):
        asyncio.run(later(Table()))


def test_what_is_no_table_passes() -> None:
    f = arraybridge.numpy(lambda *x: x)
    for given in (1, 1.5, "words", None, np.float32(3), np.float64, Table, len, [1, 2], b"bytes"):
        assert f(given)[0] is given


# -- dtype --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", HOST)
@pytest.mark.parametrize("target", FRAMEWORKS)
@pytest.mark.parametrize("dtype", ["float64", "int16", "bool", "float32"])
def test_dtype_casts_arrays_on_their_way_in(source: str, target: str, dtype: str) -> None:
    require(source)
    require(target)
    seen: list[str] = []

    @decorator(target)(dtype="float32", output_type="numpy")
    def f(image: Any, *, others: Any, scalar: Any) -> Any:
        seen.extend(arraybridge.framework(target).dtype_name(x) for x in (image, others[0]))
        assert scalar == 2.5
        assert type(scalar) is np.float64
        return image

    x = arraybridge.convert_memory(IMAGE.astype(dtype), source)
    result = f(x, others=[x], scalar=np.float64(2.5))
    assert seen == ["float32"] * 2
    assert result.dtype == np.float32
    assert result.tolist() == IMAGE.astype(dtype).astype(np.float32).tolist()


def test_dtype_where_the_device_is_named_or_nothing_is_to_be_done() -> None:
    torch = require("torch")
    f = arraybridge.torch(dtype=torch.float32, device="cpu")(identity)
    x = torch.ones(2)
    assert f(x) is x
    assert f(torch.ones(2, dtype=torch.float64)).dtype == torch.float32
    assert arraybridge.numpy(dtype=np.float32)(identity)(np.ones(2)).dtype == np.float32


def test_dtype_keeps_the_graph_inside_torch() -> None:
    torch = require("torch")
    x = torch.ones(2, dtype=torch.float64, requires_grad=True)
    arraybridge.torch(dtype="float32")(lambda x: x * 2)(x).sum().backward()
    assert x.grad.tolist() == [2.0, 2.0]
    assert x.grad.dtype == torch.float64


def test_a_filter_of_pyclesperanto_takes_what_its_error_advises() -> None:
    require("pyclesperanto")
    image = IMAGE.astype(np.float64)
    with pytest.raises(arraybridge.DtypeNotSupportedError, match="Pass dtype="):
        arraybridge.pyclesperanto(identity)(image)
    for x in (image, IMAGE > 2):
        result = arraybridge.pyclesperanto(dtype="float32", output_type="input")(identity)(x)
        assert result.dtype == np.float32
        assert result.tolist() == x.astype(np.float32).tolist()


def test_a_result_gets_back_a_dtype_that_its_framework_lacks() -> None:
    require("pyclesperanto")
    f = arraybridge.pyclesperanto(
        dtype="float32", output_type="input", dtype_conversion=DtypeConversion.PRESERVE_INPUT
    )(identity)
    result = f(IMAGE.astype(np.float64))
    assert result.dtype == np.float64
    assert result.tolist() == IMAGE.tolist()


@pytest.mark.parametrize("dtype", ["flaot32", object, "U3"])
def test_a_dtype_that_is_none_is_refused_at_decoration(dtype: Any) -> None:
    with pytest.raises(arraybridge.DtypeNotSupportedError, match="dtype="):
        arraybridge.torch(dtype=dtype)


def test_numpy_dtypes_of_conversions() -> None:
    assert DtypeConversion.UINT8.numpy_dtype is np.uint8
    assert DtypeConversion.FLOAT64.numpy_dtype is np.float64
    assert DtypeConversion.PRESERVE_INPUT.numpy_dtype is None
    assert DtypeConversion.NATIVE_OUTPUT.numpy_dtype is None


# -- scalars ------------------------------------------------------------------------------------------

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


# -- stream and device --------------------------------------------------------------------------------


def test_stream_false_stays_on_the_caller_s_stream(boxes: Any) -> None:
    entered: list[str] = []

    class Side(Streams):
        def stream(self, device: Any) -> Any:
            @contextlib.contextmanager
            def side() -> Iterator[None]:
                entered.append(str(device))
                yield

            return side()

    boxes.streams = Side()
    boxes.decorator(identity)(np.ones(2))
    assert entered == ["cpu"]
    boxes.decorator(stream=False)(identity)(np.ones(2))
    assert entered == ["cpu"]
    with pytest.raises(TypeError, match="stream='yes' must be True or False"):
        arraybridge.torch(stream="yes")  # type: ignore[call-overload]


def test_device_takes_the_frameworks_own() -> None:
    torch, jax = require("torch"), require("jax")
    on_torch = arraybridge.torch(device=torch.device("cpu"))(identity)
    assert arraybridge.device_of(on_torch(IMAGE)) == "cpu"
    on_jax = arraybridge.jax(device=jax.devices("cpu")[1])(identity)
    assert arraybridge.device_of(on_jax(IMAGE)) == "cpu:1"
    assert on_jax.device == "cpu:1"
    partial = functools.partial(on_jax)
    assert arraybridge.device_of(next(arraybridge.device_map(partial, [IMAGE]))) == "cpu:1"
    with pytest.raises(ValueError, match="is not a device"):
        arraybridge.torch(device=3)  # type: ignore[call-overload]
