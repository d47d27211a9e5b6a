"""stack_slices, unstack_slices and process_slices, in every framework."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import (
    ArrayNotSupportedError,
    DeviceNotFoundError,
    DtypeNotSupportedError,
    convert_memory,
    device_of,
    process_slices,
    stack_slices,
    unstack_slices,
)
from tests.decorators.cases import FRAMEWORKS, framework_of, values
from tests.helpers import require

STACK = np.arange(24, dtype=np.float32).reshape(4, 2, 3)


@pytest.mark.parametrize("target", FRAMEWORKS)
@pytest.mark.parametrize("source", FRAMEWORKS)
def test_stack_and_unstack(source: str, target: str) -> None:
    require(source)
    require(target)
    planes = unstack_slices(convert_memory(STACK, source), target)
    assert [framework_of(plane) for plane in planes] == [target] * 4
    assert [values(plane) for plane in planes] == STACK.tolist()
    whole = stack_slices([convert_memory(plane, source) for plane in STACK], target)
    assert framework_of(whole) == target
    assert values(whole) == STACK.tolist()


@pytest.mark.parametrize("dtype", ["int8", "uint32", "int32", "float32", "int64", "complex128"])
@pytest.mark.parametrize("target", FRAMEWORKS)
def test_every_value_of_a_dtype_survives(target: str, dtype: str) -> None:
    """Pyclesperanto's copy kernels compute in float32, which cannot represent 2**24 + 1."""
    require(target)
    if dtype in ("int64", "complex128") and target == "pyclesperanto":
        pytest.skip(f"pyclesperanto has no {dtype}")
    numbers = np.array([0, 1, 2**24 + 1, 2**31 - 1, 2**32 - 1, 2**40 + 1], np.int64).astype(dtype)
    stack = np.stack([numbers.reshape(2, 3), numbers[::-1].reshape(2, 3)])
    back = convert_memory(stack_slices(unstack_slices(stack, target), target), "numpy")
    assert back.dtype == stack.dtype
    assert back.tolist() == stack.tolist()


@pytest.mark.parametrize("target", FRAMEWORKS)
@pytest.mark.parametrize("shape", [(), (3,), (1, 2, 3)])
def test_slices_have_two_axes(target: str, shape: tuple[int, ...]) -> None:
    require(target)
    # pyclesperanto does not support 0-d and 4-D arrays.
    with pytest.raises((ValueError, ArrayNotSupportedError), match="axes"):
        stack_slices([np.ones(shape, np.float32)] * 2, target)
    wrong = np.ones((2, *shape, 4) if len(shape) == 3 else shape, np.float32)
    for refused in (lambda: unstack_slices(wrong, target), lambda: process_slices(wrong, lambda x: x)):
        with pytest.raises(ValueError, match="three axes"):
            refused()


def test_slices_from_several_frameworks_and_devices_are_stacked() -> None:
    require("torch")
    require("jax")
    planes = [STACK[0], convert_memory(STACK[1], "torch"), convert_memory(STACK[2], "jax")]
    assert values(stack_slices(planes, "torch")) == STACK[:3].tolist()
    require("pyclesperanto")
    last = len(arraybridge.framework("pyclesperanto").devices.available()) - 1
    planes = [convert_memory(STACK[i], "pyclesperanto", min(i, last)) for i in range(2)]
    whole = stack_slices(planes, "pyclesperanto")
    assert (device_of(whole), values(whole)) == ("opencl:0", STACK[:2].tolist())
    # gpu_id selects the device of the stack and its planes.
    assert device_of(stack_slices(list(STACK), "pyclesperanto", gpu_id=last)) == f"opencl:{last}"
    planes = unstack_slices(STACK, "pyclesperanto", gpu_id=last)
    assert {str(device_of(plane)) for plane in planes} == {f"opencl:{last}"}
    with pytest.raises(DeviceNotFoundError):
        stack_slices(list(STACK), "pyclesperanto", gpu_id=77)


def test_planes_of_numpy_and_torch_are_views() -> None:
    require("torch")
    stack = STACK.copy()
    for target in ("numpy", "torch"):
        unstack_slices(stack, target)[1][0, 0] = -1.0
        assert stack[1, 0, 0] == -1.0
        stack[...] = STACK


@pytest.mark.parametrize(
    ("slices", "target", "error", "message"),
    [
        ([], "numpy", ValueError, "no slices"),
        ([np.ones((2, 3)), np.ones((3, 2))], "numpy", ValueError, r"slice 1 has \(3, 2\)"),
        ([np.ones(2), np.ones(2, np.float32)], "numpy", TypeError, "slice 1 has float32"),
        ([np.ones(2)], "nunpy", ValueError, "numpy"),
        ([np.ones((2, 2))], "pyclesperanto", DtypeNotSupportedError, "float64"),
        ([STACK, STACK], "pyclesperanto", ArrayNotSupportedError, "axes"),
    ],
)
def test_slices_that_cannot_be_stacked_raise(
    slices: list[Any], target: str, error: type[Exception], message: str
) -> None:
    if target == "pyclesperanto":
        require(target)
    with pytest.raises(error, match=message):
        stack_slices(slices, target)


def test_process_slices_stacks_within_tuples_and_dicts() -> None:
    torch = require("torch")

    def analyse(plane: Any, factor: float, *, name: str) -> Any:
        return plane * factor, {"mask": torch.from_numpy(plane) > 3, "name": name}, float(plane.max()), None

    scaled, found, peaks, nothing = process_slices(STACK, analyse, 2.0, name="n")
    assert scaled.tolist() == (2 * STACK).tolist()
    assert isinstance(found["mask"], torch.Tensor)
    assert found["mask"].tolist() == (STACK > 3).tolist()
    assert found["name"] == ["n"] * 4
    assert peaks == [5.0, 11.0, 17.0, 23.0]
    assert nothing is None


def test_process_slices_rejects_results_that_differ_between_planes() -> None:
    with pytest.raises(ValueError, match="slice 1 has"):
        process_slices(STACK, lambda plane: plane[: int(plane[0, 0]) // 6 + 1])
    with pytest.raises(ValueError, match="is not an array"):
        process_slices(STACK, lambda plane: plane if plane[0, 0] else 3)
    with pytest.raises(ValueError, match=r"[Tt]uple|arity|node"):
        process_slices(STACK, lambda plane: (plane,) if plane[0, 0] else (plane, plane))
    with pytest.raises(ValueError, match="without planes"):
        process_slices(STACK[:0], lambda plane: plane)
