"""A method that stays on the current card is noticed by what tests/gpu/test_current_device.py looks at."""

from __future__ import annotations

import pytest

from tests.gpu import test_current_device as current
from tests.helpers import require

pytestmark = pytest.mark.gpu

PLANT = """
from contextlib import nullcontext
import arraybridge.frameworks.cupy as module
module.on_card = lambda index: nullcontext()
"""
CALLS = {name: current.ARRAYS[name] for name in ("empty", "room", "cast")} | {
    name: current.OTHERS[name] for name in ("card_memory", "settle", "wait_for", "mark")
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_the_wrong_current_card_is_noticed(call: str) -> None:
    require("cupy")
    program = f"{current.BEGIN}\n{PLANT}\nresult = {call}\n{current.END}"
    # The program itself runs to its end: it is what it saw that is wrong.
    assert current._run(program) not in ([1, 0, False], [None, 0, False])
