"""Contexts that a process opens, and whether it can still fork; each case runs in a fresh process."""

from __future__ import annotations

import pytest

from tests.helpers import output_of, require

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("_two_gpus")]

IMPORTS = (
    "import os, threading, numpy as np, cupy, arraybridge as ab",
    "from arraybridge import hardware",
    "from arraybridge import cuda_driver",
    "from tests.emulated_gpu import accounting",
    "opened = lambda: map(accounting.is_open, range(2))",
)


CASES: dict[str, tuple[str, list[str]]] = {
    "work on the second GPU opens only this GPU": (
        """
x = ab.convert_memory(np.arange(6.0), 'cupy', 1)
print(*opened())
f = ab.cupy(gpu_id=1)(lambda x: x + 1)
print(ab.to_numpy(f(x)).sum(), f(np.zeros(3)).device.id)
y = ab.convert_memory(x, 'cupy', copy=True)
print(ab.memory_stats()['gpu:1'].holdings[0].used > 0, cupy.cuda.runtime.getDevice())
ab.pinned(np.ones(8)); ab.framework('cupy').memory.synchronize(); ab.free_memory()
print(*opened())
from tests.gpu.test_ordering import ForeignDlpack, ForeignInterface
for protocol in (ForeignInterface, ForeignDlpack):  # arrays of other libraries on that GPU
    y = ab.convert_memory(protocol(x), 'cupy')
    print(ab.device_of(y), ab.to_numpy(y).sum())
""",
        ["False True", "21.0 1", "True 0", "False True", "gpu:1 15.0", "gpu:1 15.0"],
    ),
    "PyTorch arrays on the second GPU open only this GPU": (
        """
import torch
x = torch.empty(8, device='cuda:1')
y = ab.to_cupy(x)
print(ab.device_of(y), ab.device_of(ab.to_torch(y)))
del x, y
print(*opened())
""",
        ["gpu:1 gpu:1", "False True"],
    ),
    "auto opens only the selected GPU": (
        """
ab.convert_memory(np.zeros(3), 'cupy', gpu_id='auto')
print(*opened())
x = ab.convert_memory(np.zeros(1 << 20), 'cupy', 0)
print(ab.convert_memory(np.zeros(3), 'cupy', gpu_id='auto').device.id)
print(*opened())
""",
        ["True False", "1", "True True"],
    ),
    "who lends to no stream of each thread is waited for": (
        """
from tests.gpu.test_ordering import ForeignDlpack, StreamlessFramework
class Refusing(ForeignDlpack):
    def __dlpack__(self, stream=None, **options):
        if stream == 2: raise BufferError('per-thread default stream is not supported')
        return super().__dlpack__(stream=stream)
lender, cupys, queue = StreamlessFramework(), ab.framework('cupy'), cupy.cuda.Stream(non_blocking=True)
class Queues(type(cupys.streams)):
    def handle(self, device): return queue.ptr
lender.streams = Queues()
x = cupy.zeros(4096)
with queue: x += 3
y = cupys.interchange.import_from(Refusing(x), lender, ab.Device('gpu', 0))
print((y.get() == 3).all())
""",
        ["True"],
    ),
    "streams of threads that have ended are used again": (
        """
gpus = hardware.gpus()
print(cuda_driver.is_driver_initialized(), len(gpus), hardware.free_memory(1) == gpus[1].total)
seen = set()
@ab.cupy(gpu_id=0)
def f(x):
    seen.add(cupy.cuda.get_current_stream().ptr)
    return cupy.empty(1 << 18) + 1
for _ in range(20):
    thread = threading.Thread(target=f, args=(np.zeros(3),))
    thread.start(); thread.join()
print(len(seen), accounting.used() < 8 << 20)
""",
        ["False 2 True", "1 True"],
    ),
}


def test_context_is_released_if_it_cannot_be_made_current() -> None:
    printed = output_of(
        *IMPORTS,
        "contexts = lambda: (accounting.retained_contexts(1), accounting.pushed_contexts())",
        "with cuda_driver.primary_context(1): print(*contexts())",
        "accounting.fail_next_push()",
        "try:",
        "    with cuda_driver.primary_context(1): print('not raised')",
        "except RuntimeError as error: print(error)",
        "print(*contexts(), cupy.cuda.runtime.getDevice())",
        "print(ab.to_numpy(ab.convert_memory(np.ones(3), 'cupy', 1)).sum(), *opened())",
    )
    assert printed.splitlines() == [
        "1 1",
        "the CUDA driver cannot make GPU 1 the current device",
        "1 0 0",
        "3.0 False True",
    ]


@pytest.mark.parametrize("case", CASES)
def test_contexts_in_a_fresh_process(case: str) -> None:
    code, expected = CASES[case]
    if "torch" in code:
        require("torch")
    env = {"CUPY_CUDA_PER_THREAD_DEFAULT_STREAM": "1"} if "each thread" in case else None
    assert output_of(*IMPORTS, code, env=env).splitlines() == expected
