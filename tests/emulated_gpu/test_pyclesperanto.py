"""pyclesperanto's CUDA backend, simulated by a replacement with the same protocol; not tested on a real
GPU.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers import output_of

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("_two_gpus")]

SETUP = (
    "import sys",
    f"sys.path.insert(0, {str(Path(__file__).parent / 'replacement')!r})",
    "import numpy as np, cupy, arraybridge as ab, pyclesperanto as cle",
    "from arraybridge import convert_memory as to, explain",
    "host = np.arange(6, dtype=np.float32).reshape(2, 3)",
)


def test_pyclesperanto_shares_with_cupy_or_copies_once() -> None:
    said = output_of(
        *SETUP,
        "x = to(host, 'cupy', 1)",
        "image = to(x, 'pyclesperanto', copy=False)",
        "print(type(image) is cle.Array, ab.device_of(image), image.memory.data.ptr == x.data.ptr)",
        "back = to(image, 'cupy')",
        "print(back.data.ptr == x.data.ptr, explain(image, 'cupy').method, ab.to_numpy(image).tolist())",
        "y = to(host, 'cupy', 0).T",
        "print(explain(y, 'pyclesperanto').reason, explain(y, 'pyclesperanto').copies)",
        "print(to(y, 'pyclesperanto').get().tolist())",
        "images = [to(y.T, 'pyclesperanto', 1), to(y.T, 'pyclesperanto', device='opencl:1')]",
        "found = ab.framework('pyclesperanto').devices.available()",
        "print(*map(ab.device_of, images), [str(d) for d in found])",
        "try: to(cupy.ones(3), 'pyclesperanto')",
        "except ab.MemoryConversionError as error: print(error.reason)",
        "del x, image, images; ab.free_memory(); print(back.get().sum())",
    )
    assert said.splitlines() == [
        "True gpu:1 True",
        "True dlpack [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]",
        "it is not C-contiguous 1",
        "[[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]",
        "gpu:1 gpu:1 ['gpu:0', 'gpu:1']",
        "pyclesperanto has no dtype float64",
        "15.0",
    ]


def test_conversion_waits_for_queued_work() -> None:
    said = output_of(
        *SETUP,
        "stream = cupy.cuda.Stream(non_blocking=True); stream.use()",
        "x = cupy.zeros(4096, np.float32)",
        "for _ in range(4): x += 1",
        "print((to(x, 'pyclesperanto').get() == 4).all())",
        "image = to(host, 'pyclesperanto', 0)",
        "with cle._on(image.device):",
        "    for _ in range(4): image.memory += 1",
        "print((to(image, 'cupy').get() == host + 4).all())",
    )
    assert said.split() == ["True", "True"]
