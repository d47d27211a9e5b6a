"""Which cards a process opens, and whether it may still be forked: each question in a fresh process."""

from __future__ import annotations

import pytest

from tests.helpers import asked, require

pytestmark = pytest.mark.gpu

OPEN = "print(books.is_open(0), books.is_open(1))"
IMPORTS = ("import numpy as np, cupy, arraybridge", "from tests.card import books")


@pytest.mark.parametrize(
    "question",
    [
        "arraybridge.devices()",
        "arraybridge.gpu_available(); arraybridge.device_info()",
        "arraybridge.least_used_gpu()",
        "arraybridge.memory_stats(); arraybridge.gpu_utilization()",
        "arraybridge.free_memory()",
        "arraybridge.convert_memory(np.zeros(3), 'numpy', 'numpy')",
        "arraybridge.set_device('gpu:1'); arraybridge.get_device()",
        "list(arraybridge.device_map(np.sum, [np.ones(3)] * 2, ['cpu']))",
        "arraybridge.Pipeline(np.negative, np.abs)(np.ones(4))",
    ],
)
def test_a_question_opens_no_card_and_wakes_no_driver(question: str) -> None:
    said = asked(
        *IMPORTS,
        "from arraybridge.frameworks import driver",
        question,
        OPEN,
        "print(driver.is_awake())",
        "import os",
        "child = os.fork()",
        "if not child: print(cupy.asarray(np.ones(3)).get().sum(), flush=True); os._exit(0)",
        "os.waitpid(child, 0)",
    )
    assert said.splitlines() == ["False False", "False", "3.0"]


def test_the_second_card_alone_is_opened_for_work_on_it() -> None:
    said = asked(
        *IMPORTS,
        "x = arraybridge.convert_memory(np.arange(6.0), 'cupy', 1)",
        OPEN,
        "f = arraybridge.cupy(gpu_id=1)(lambda x: x + 1)",
        "print(arraybridge.to_numpy(f(x)).sum(), f(np.zeros(3)).device.id)",
        "y = arraybridge.convert_memory(x, 'cupy', copy=True)",
        "print(arraybridge.memory_stats()['gpu:1'].holdings[0].used > 0, cupy.cuda.runtime.getDevice())",
        "arraybridge.free_memory()",
        OPEN,
    )
    assert said.splitlines() == ["False True", "21.0 1", "True 0", "False True"]


@pytest.mark.parametrize("protocol", ["ForeignInterface", "ForeignDlpack"])
def test_what_others_have_on_the_second_card_opens_no_other(protocol: str) -> None:
    said = asked(
        *IMPORTS,
        f"from tests.gpu.test_ordering import {protocol}",
        "x = arraybridge.convert_memory(np.arange(6.0), 'cupy', 1)",
        f"y = arraybridge.convert_memory({protocol}(x), 'cupy')",
        "print(arraybridge.device_of(y), arraybridge.to_numpy(y).sum())",
        OPEN,
    )
    assert said.splitlines() == ["gpu:1 15.0", "False True"]


def test_what_torch_has_on_the_second_card_opens_no_other() -> None:
    require("torch")
    said = asked(
        *IMPORTS,
        "import torch",
        "x = torch.empty(8, device='cuda:1')",
        OPEN,
        "y = arraybridge.to_cupy(x)",
        "print(arraybridge.device_of(y), arraybridge.device_of(arraybridge.to_torch(y)))",
        "del x, y",
        OPEN,
    )
    assert said.splitlines() == ["False True", "gpu:1 gpu:1", "False True"]


def test_a_question_of_torch_opens_no_card_and_auto_one() -> None:
    require("torch")
    said = asked(
        *IMPORTS,
        "import torch",
        "from arraybridge.frameworks import driver",
        "arraybridge.devices('torch'); arraybridge.free_memory(); arraybridge.memory_stats()",
        "list(arraybridge.device_map(np.sum, [np.ones(3)] * 2, ['cpu']))",
        "with arraybridge.memory_peak(): arraybridge.Pipeline(np.negative, np.abs)(np.ones(4))",
        "print(driver.is_awake())",
        OPEN,
        "x = arraybridge.convert_memory(np.zeros(3), 'torch', gpu_id='auto')",
        "print(x.device)",
        OPEN,
    )
    assert said.splitlines() == ["False", "False False", "cuda:0", "True False"]


@pytest.mark.parametrize(
    "work", ["arraybridge.pinned(np.ones(8))", "arraybridge.framework('cupy').pool.synchronize()"]
)
def test_pinning_and_waiting_open_no_other_card(work: str) -> None:
    said = asked(*IMPORTS, "x = arraybridge.convert_memory(np.ones(6), 'cupy', 1)", work, OPEN)
    assert said == "False True"


def test_torch_lends_to_cupys_stream_of_each_thread() -> None:
    require("torch")
    said = asked(
        "import os",
        "os.environ['CUPY_CUDA_PER_THREAD_DEFAULT_STREAM'] = '1'",
        *IMPORTS,
        "import torch",
        "x = torch.empty(4096, device='cuda:0')",
        "x.copy_(torch.full((4096,), 3.0).pin_memory(), non_blocking=True)",
        "y = arraybridge.convert_memory(x, 'cupy', copy=False)",
        "print((y.get() == 3).all())",
    )
    assert said == "True"


def test_auto_opens_the_card_that_it_takes_and_no_other() -> None:
    said = asked(
        *IMPORTS,
        "x = arraybridge.convert_memory(np.zeros(1 << 20), 'cupy', 0)",
        "y = arraybridge.convert_memory(np.zeros(3), 'cupy', gpu_id='auto')",
        "print(y.device.id)",
        OPEN,
    )
    assert said.splitlines() == ["1", "True True"]
    said = asked(*IMPORTS, "arraybridge.convert_memory(np.zeros(3), 'cupy', gpu_id='auto')", OPEN)
    assert said == "True False"


def test_the_cards_are_those_of_cuda() -> None:
    said = asked(
        *IMPORTS,
        "from arraybridge import machine",
        "from arraybridge.frameworks import driver",
        "told = machine.cards()",
        "print(driver.is_awake(), len(told), machine.free_memory(1) == told[1].total)",
        "facts = cupy.cuda.runtime.getDeviceProperties(1)",
        "print(told[1].pci == machine.pci_address(0, facts['pciBusID'], facts['pciDeviceID']))",
    )
    assert said.splitlines() == ["False 2 True", "True"]


def test_streams_of_threads_that_have_ended_are_used_again() -> None:
    said = asked(
        *IMPORTS,
        "import threading",
        "seen = set()",
        "@arraybridge.cupy(gpu_id=0)",
        "def f(x):",
        "    seen.add(cupy.cuda.get_current_stream().ptr)",
        "    return cupy.empty(1 << 18) + 1",
        "for _ in range(20):",
        "    thread = threading.Thread(target=f, args=(np.zeros(3),))",
        "    thread.start(); thread.join()",
        "print(len(seen), books.used() < 8 << 20)",
    )
    assert said == "1 True"
