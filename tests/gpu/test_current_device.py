"""Every device method, with the array on the second GPU while the first is current.

The result is on the second GPU, the first one is still current, and it was opened only if CuPy made that
necessary.
"""

from __future__ import annotations

from functools import cache

import pytest

from tests.gpu import device_calls
from tests.gpu.device_calls import CALLS, ERRORS, Outcome
from tests.gpu.forked import results_of
from tests.helpers import require, require_two_gpus

pytestmark = pytest.mark.gpu


@cache
def outcomes(framework: str) -> dict[str, Outcome | str]:
    """Return the outcome of each call, or the traceback of its exception."""
    results = results_of("tests.gpu.device_calls", framework)
    return {call: result if isinstance(result, str) else Outcome(*result) for call, result in results.items()}


def is_right(outcome: Outcome | str, call: str, framework: str) -> bool:
    """Return whether the outcome is as expected."""
    if isinstance(outcome, str):
        return False
    expected = device_calls.expected(call, framework)
    result = outcome.result[:1] if expected == device_calls.ANY_VALUES and outcome.result else outcome.result
    may_open = framework == "cupy" and call in device_calls.THROUGH_FROM_DLPACK
    in_place = (outcome.current, outcome.pushed) == (0, 0) and (may_open or not outcome.first_is_open)
    return in_place and (outcome.kernel_is_missing or result == expected)


def test_every_device_method_is_listed() -> None:
    """Check that each method is in `CALLS`, or in `WITHOUT_DEVICE` if it has nothing to do with devices."""
    called = {device_calls.method_of(call) for call in CALLS}
    assert called | device_calls.WITHOUT_DEVICE == device_calls.methods()
    assert not called & device_calls.WITHOUT_DEVICE
    assert device_calls.component_names() == set(device_calls.COMPONENTS)


@pytest.mark.parametrize("call", [*CALLS, *ERRORS])
@pytest.mark.parametrize("framework", ["cupy", "torch"])
def test_methods_ignore_the_current_device(framework: str, call: str) -> None:
    require_two_gpus()
    require(framework)
    if call == "interchange.import_from, from PyTorch":
        require("torch")
    outcome = outcomes(framework)[call]
    assert is_right(outcome, call, framework), outcome
    if isinstance(outcome, Outcome) and outcome.kernel_is_missing:
        pytest.skip("the emulated GPU cannot run machine code of PyTorch")
