"""The cards that `gpu` runs functions on."""

from __future__ import annotations

import os
import platform
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np

from arraybridge.arrays import source_of
from arraybridge.conversion.convert import convert_memory
from arraybridge.errors import FrameworkNotInstalledError
from arraybridge.frameworks import registry
from arraybridge.frameworks.base import Framework
from arraybridge.frameworks.facts import BUILT_IN, is_imported
from arraybridge.machine import cards, driver
from arraybridge.types import Cache, Device

#: The free memory of a card is asked for again after so many seconds.
ASK_AGAIN = 0.5


class Card:
    """One card, as one framework sees it."""

    def __init__(self, framework: Framework, device: Device, clock: Callable[[], float]) -> None:
        self.framework, self.device, self.clock = framework, device, clock
        self.backend = framework.name
        self.name = f"{framework.name} {device}"
        self._free, self._asked = 0, -ASK_AGAIN

    def holds(self, x: Any) -> bool:
        """Whether the array, of whichever framework, lives on this card."""
        if type(x) is np.ndarray:
            return False
        owner, data = source_of(x)
        return owner.device_of(data) == self.device

    def put(self, x: Any) -> Any:
        """The array on the card, as one of the backend's; complete on return."""
        return convert_memory(x, self.backend, device=self.device)

    def run(self, fn: Callable[[], Any]) -> Any:
        """``fn()`` with this card as the backend's current one, on a stream of this thread."""
        with ExitStack() as stack:
            stack.enter_context(self.framework.selected(self.device))
            stack.enter_context(self.framework.wide())
            stack.enter_context(self.framework.streams.stream(self.device))
            return fn()

    def free(self) -> int:
        """Bytes that the backend could still take, its cache included; 0 where it cannot tell."""
        now = self.clock()
        if now - self._asked >= ASK_AGAIN:
            self._asked, self._free = now, self.framework.pool.free_memory_of(self.device)
        return self._free


class Cards:
    """The cards of this process, each looked for once. Tests make one with a clock of their own."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self._lock = threading.RLock()
        self._found: Cache[tuple[str | None, int], Card | str] = Cache()

    @property
    def looked(self) -> bool:
        """Whether somebody has looked for a card already, so that doing so again costs nothing."""
        return bool(self._found)

    def find(self, backend: str | None, index: int) -> Card | str:
        """The card of that number in that framework (None: the first that has it), or why there is none."""
        card = self._found.get((backend, index))
        if card is None:
            with self._lock:
                card = self._found[backend, index] = self._find(backend, index)
        return card

    def _find(self, backend: str | None, index: int) -> Card | str:
        device, reasons = Device("gpu", index), []
        for name in _worth_asking(backend):
            framework, devices, reason = _devices(name)
            if framework is not None and device in devices:
                return Card(framework, device, self.clock)
            numbers = ", ".join(str(d) for d in devices if d.kind == "gpu")
            reasons.append(f"{name} has no {device} (it has {numbers})" if numbers else reason)
        if not reasons:
            reason = driver().reason or "the driver shows none to this process (see CUDA_VISIBLE_DEVICES)"
            return f"there is no GPU here that a framework could use: {reason}"
        return f"there is no {device} here: {'; '.join(reasons)}"


def _devices(name: str) -> tuple[Framework | None, tuple[Device, ...], str]:
    """The framework and its devices, and why it has no card if it has none."""
    if not registry.is_installed(name):
        return None, (), f"{name} is not installed"
    try:
        framework = registry.framework(name)
        return framework, framework.devices(), framework.missing_device_reason() or f"{name} has no GPU"
    except FrameworkNotInstalledError as error:
        return None, (), f"{name} does not work here ({error.reason})"
    except RuntimeError as error:  # the driver refuses
        return None, (), f"{name} finds no card ({error})"


def _worth_asking(backend: str | None) -> list[str]:
    """The frameworks to ask for a card. Without a driver none is worth the seconds that its import takes."""
    names = registry.for_numpy_code() if backend is None else [backend]
    if _has_driver():
        return names
    return [name for name in names if name not in BUILT_IN or is_imported(name)]


def _has_driver() -> bool:
    if sys.platform == "darwin":
        return platform.machine() == "arm64"
    # An AMD card, or NVIDIA ones.
    return os.path.exists("/dev/kfd") or bool(cards())  # noqa: PTH110  # pathlib costs 3 ms to import
