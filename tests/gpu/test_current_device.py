"""Each device method while another card is current: the result is in place, the other stays closed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.helpers import require

pytestmark = pytest.mark.gpu

BEGIN = """
import json
import numpy as np
import cupy
import arraybridge as ab
from arraybridge.frameworks import cardmemory, registry
from arraybridge.types import Device

second = Device("gpu", 1)
own = registry.framework("cupy")
x = own.from_host(np.arange(6, dtype=np.float32).reshape(2, 3), second)
"""
END = """
index = result.device.id if isinstance(result, cupy.ndarray) else None
print(json.dumps([index, cupy.cuda.runtime.getDevice(), cardmemory.has_context(0)]))
"""
ARRAYS = {
    "from_host": "x",
    "copy": "own.copy(x)",
    "cast": "own.cast(x, 'float64')",
    "empty": "own.batching.empty((2, 3), 'float32', second)",
    "room": "own.batching.room(x, (4, 3))",
    "reshaped": "own.batching.reshaped(x, (6,), 'float32')",
    "to_device": "own.devices.to_device(x, second)",
    "adopt": "own.interchange.adopt(x, own, second)",
    "take_over": "own.streams.take_over(x)",
}
OTHERS = {
    "to_host": "own.to_host(x)",
    "settle": "own.interchange.settle(x)",
    "must_copy": "own.interchange.must_copy(x)",
    "card_memory": "own.memory.card_memory(second)",
    "mark": "own.streams.mark(second).wait()",
    "synchronize": "own.memory.synchronize()",
    "usage": "own.memory.usage()",
    "free_cache": "own.memory.free_cache(second)",
    "pinned_bytes": "own.memory.pinned_bytes(64)",
    "handle": "own.streams.handle(second)",
    "wait_for": "own.streams.wait_for(second, 1)",
}


def _two_cards() -> None:
    if require("cupy").cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")


def _run(program: str) -> list[object]:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    answer: list[object] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.mark.parametrize("call", ARRAYS.values(), ids=ARRAYS)
def test_the_result_is_on_the_array_s_card_alone(call: str) -> None:
    _two_cards()
    assert _run(f"{BEGIN}\nresult = {call}\n{END}") == [1, 0, False]


@pytest.mark.parametrize("call", OTHERS.values(), ids=OTHERS)
def test_no_other_card_is_opened(call: str) -> None:
    _two_cards()
    assert _run(f"{BEGIN}\n{call}\nresult = None\n{END}") == [None, 0, False]


def test_listing_devices_does_not_wake_the_driver() -> None:
    require("cupy")
    program = """
import json
import arraybridge as ab
from arraybridge.frameworks import cardmemory
names = [str(one) for one in ab.devices("cupy")]
print(json.dumps([bool(names), cardmemory.is_awake()]))
"""
    assert _run(program) == [True, False]
