"""Traces of CuPy's and PyTorch's own transfers to and from a GPU."""

from __future__ import annotations

import numpy as np
import pytest

from arraybridge import trace
from tests.helpers import require

pytestmark = pytest.mark.gpu
MIB = 1 << 20


def test_trace_records_cupy_transfers() -> None:
    cupy = require("cupy")
    x = np.ones((512, 512), np.float32)
    get = cupy.ndarray.get
    with trace(foreign=True) as log:
        y = cupy.asarray(x)
        cupy.asnumpy(y)
        y.get()
        cupy.array(x)
        cupy.asarray(y)
    names = ["cupy.asarray", "cupy.asnumpy", "cupy.ndarray.get", "cupy.array"]
    assert [(e.name, e.nbytes, e.file) for e in log.events] == [(name, MIB, __file__) for name in names]
    assert [e.device for e in log.events] == ["gpu:0", "cpu", "cpu", "gpu:0"]
    assert {e.reason for e in log.events} == {
        "gpu:0 is a different device from cpu",
        "cpu is a different device from gpu:0",
    }
    assert cupy.ndarray.get is get


def test_trace_records_torch_transfers() -> None:
    torch, cupy = require("torch"), require("cupy")
    x = torch.ones(512, 512)
    with trace(foreign=True) as log:
        y = x.cuda()
        y.cpu()
        y.to("cpu")
        y.cuda()
        torch.from_dlpack(cupy.from_dlpack(y))
    assert [(e.name, e.nbytes) for e in log.events] == [
        ("Tensor.cuda", MIB),
        ("Tensor.cpu", MIB),
        ("Tensor.to", MIB),
        ("cupy.from_dlpack", 0),
        ("torch.from_dlpack", 0),
    ]


@pytest.mark.filterwarnings("ignore:This function is deprecated")  # capsules are CuPy's
def test_trace_records_dlpack_imports_of_cupy() -> None:
    cupy = require("cupy")
    x = cupy.ones((512, 512), cupy.float32)
    from_dlpack = cupy.from_dlpack
    with trace(foreign=True) as log:
        shared = cupy.from_dlpack(x.__dlpack__())
        np.from_dlpack(x, device="cpu")
        cupy.from_dlpack(x)  # not a conversion
        with pytest.raises(TypeError, match="CPU arrays"):
            cupy.from_dlpack(np.ones(3))
    assert shared.data.ptr == x.data.ptr
    assert [(e.name, e.source, e.target, e.device, e.nbytes, e.reason) for e in log.events] == [
        ("cupy.from_dlpack", "capsule", "cupy", "gpu:0", 0, "both use the same memory"),
        ("np.from_dlpack", "cupy", "numpy", "cpu", MIB, "cpu is a different device from gpu:0"),
    ]
    assert {e.file for e in log.events} == {__file__}
    assert cupy.from_dlpack is from_dlpack
