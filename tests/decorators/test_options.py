"""Invalid options of the decorators."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import UnknownFrameworkError


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"gpuid": 0}, TypeError, r"no option 'gpuid' \(did you mean 'gpu_id'"),
        ({"output": "torch"}, TypeError, r"did you mean 'output_type'"),
        ({"output_type": "troch"}, UnknownFrameworkError, r"did you mean 'torch'"),
        ({"output_type": "inptu"}, UnknownFrameworkError, r"did you mean 'input'"),
        ({"output_type": 3}, TypeError, "^output_type expects a framework name, got int"),
        ({"output_type": None}, TypeError, "^output_type expects a framework name, got NoneType"),
        ({"input_type": "tochr"}, ValueError, r"^input_type='tochr' is not .*did you mean 'torch'\?"),
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
        ({"dtype_conversion": "uint9"}, ValueError, r"did you mean 'uint8'"),
        ({"slice_by_slice": "yes"}, TypeError, "slice_by_slice"),
        ({"contract": 3}, TypeError, "contract"),
        ({"grad": "detatch"}, ValueError, r"did you mean 'detach'"),
    ],
)
def test_invalid_options_raise_at_decoration(options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        arraybridge.torch(**options)


@pytest.mark.parametrize("dtype", ["flaot32", object, "U3"])
def test_invalid_dtype_raises_at_decoration(dtype: Any) -> None:
    with pytest.raises(arraybridge.DtypeNotSupportedError, match="dtype="):
        arraybridge.torch(dtype=dtype)


@pytest.mark.parametrize("value", [True, False])
def test_oom_recovery_accepts_booleans_of_numpy(value: bool) -> None:
    recovery = arraybridge.numpy(oom_recovery=np.bool_(value))
    assert recovery(abs)(np.array([-2])).tolist() == [2]


def test_numpy_true_turns_recovery_on() -> None:
    calls = []

    @arraybridge.numpy(oom_recovery=np.bool_(True), max_retries=1)
    def fails_once(x: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise MemoryError
        return x

    assert fails_once(np.array([3])).tolist() == [3]
    assert len(calls) == 2
