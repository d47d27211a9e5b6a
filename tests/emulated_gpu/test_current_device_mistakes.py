"""Check that tests/gpu/test_current_device.py detects each method that stays on the current device."""

from __future__ import annotations

from functools import cache

import pytest

from tests.gpu import device_calls
from tests.gpu.device_calls import CALLS, Outcome
from tests.gpu.forked import results_of
from tests.gpu.test_current_device import is_right
from tests.helpers import require

pytestmark = pytest.mark.gpu

#: Methods of `CupyFramework` that must select the device. All others work with any current device.
#: For imports by DLPack, see `stay_on_the_current_device` in test_mistakes.py.
SELECTING = (
    *("cast", "copy", "from_host", "to_host"),
    *("batching.concatenate", "batching.empty", "batching.output_buffer", "batching.stack"),
    *("devices.default_device", "devices.select", "devices.to_device", "runtime.device_guard"),
    "interchange.import_from, from an unknown library by the CUDA array interface",
    *("interchange.copy_reason", "interchange.block_until_ready"),
    *(
        "memory.device_memory",
        "memory.free_cache",
        "memory.allocate_pinned",
        "memory.synchronize",
        "memory.usage",
    ),
    *("streams.handle", "streams.record_event", "streams.stream", "streams.take_stream", "streams.wait_for"),
)


@cache
def outcomes() -> dict[str, Outcome | str]:
    results = results_of("tests.emulated_gpu.wrong_device", "cupy")
    return {call: result if isinstance(result, str) else Outcome(*result) for call, result in results.items()}


@pytest.mark.parametrize("call", SELECTING)
def test_wrong_current_device_is_detected(call: str) -> None:
    require("cupy")
    assert call in CALLS
    assert device_calls.method_of(call) in device_calls.methods()
    assert not is_right(outcomes()[call], call, "cupy")
