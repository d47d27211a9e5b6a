"""How many functions of the package a call enters: a measure of a path that no busy machine disturbs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import arraybridge

_ROOT = str(Path(arraybridge.__file__).parent)


def functions_entered(call: Callable[[], Any]) -> list[str]:
    """Call it, and return the functions of the package that this thread entered, in order, as ``file:name``.

    Call it a few times before: the first calls decide, and fill caches.

        assert len(functions_entered(lambda: convert_memory(x, "numpy"))) <= 20
    """
    entered: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(_ROOT):
            entered.append(f"{Path(code.co_filename).name}:{code.co_name}")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return entered
