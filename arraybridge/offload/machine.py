"""The card that `@gpu` runs functions on: finding it, measuring it, and running something there."""

from __future__ import annotations

import os
import platform
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from contextvars import Context
from typing import TYPE_CHECKING, Any

import numpy as np

from arraybridge.conversion.convert import convert_memory
from arraybridge.errors import FrameworkNotInstalledError
from arraybridge.frameworks import registry
from arraybridge.frameworks.base import Framework
from arraybridge.frameworks.cards import cards
from arraybridge.frameworks.facts import BUILT_IN
from arraybridge.frameworks.parts import Pool, Running
from arraybridge.frameworks.presence import is_imported
from arraybridge.offload.rates import LARGE, SMALL, Rates, measure_rates
from arraybridge.trees import source_of
from arraybridge.types import Device

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Card", "Machine"]


#: The card's free memory is asked for again after so many seconds, or where a call needs a good part of it.
FREE_FOR = 0.5
GOOD_PART = 0.25


class Card:
    """One card, as one framework sees it.

    Attributes:
        name: backend and device, ``"cupy gpu:0"``.
        backend: the framework that functions run in there.
        device: the card.
    """

    def __init__(
        self,
        framework: Framework,
        device: Device,
        clock: Callable[[], float] = time.perf_counter,
        folder: Path | None = None,
    ) -> None:
        self.framework = framework
        self.backend = framework.name
        self.device = device
        self.name = f"{framework.name} {device}"
        self.clock = clock
        self.folder = folder
        self._rates: Rates | None = None
        self._lock = threading.Lock()
        self._free = (-FREE_FOR, 0)  # when it was asked for, and what the answer was

    def __repr__(self) -> str:
        return f"<card {self.name}>"

    # -- arrays -----------------------------------------------------------------------------------

    def holds(self, x: Any) -> bool:
        """Whether the array, of whichever framework, lives on this card."""
        if type(x) is np.ndarray:
            return False
        owner, data = source_of(x)
        return owner.device_of(data) == self.device

    def put(self, x: Any) -> Any:
        """The array on the card, as one of the backend's; complete on return."""
        return convert_memory(x, self.backend, device=self.device)

    def run(self, fn: Callable[..., Any], *args: Any) -> Any:
        """``fn(*args)`` with this card as the backend's current one, on a stream of this thread."""
        with ExitStack() as stack:
            stack.enter_context(self.framework.selected(self.device))
            stack.enter_context((self.framework.running or Running()).wide())
            streams = self.framework.streams
            stream = None if streams is None else streams.stream(self.device)
            if stream is not None:
                stack.enter_context(stream)
            return fn(*args)

    def settle(self, x: Any) -> None:
        """Wait until an array of the backend is computed; raises what went wrong meanwhile."""
        if self.framework.owns(x):
            self.framework.settle(x)

    # -- what it costs ----------------------------------------------------------------------------

    @property
    def rates(self) -> Rates:
        """Transfer rates and launch time: from the cache, else measured now and kept there."""
        found = self._rates
        if found is None:
            with self._lock:
                if self._rates is None:
                    from arraybridge.offload import rates_file

                    key = self.key()
                    stored = rates_file.load_rates(self.folder, key)
                    # In a context of its own: what the user traces is not about this.
                    self._rates = stored or Context().run(self._measure)
                    if stored is None and not rates_file.store_rates(self.folder, key, self._rates):
                        import logging  # costs 2 ms, and hardly anybody meets this

                        log = logging.getLogger("arraybridge.offload")
                        log.info("the rates of %s could not be kept in %s", self.name, self.folder)
                found = self._rates
        return found

    def key(self) -> dict[str, str]:
        """What the rates hold for: this machine, this card, and these versions."""
        name, identity = _identity(self.framework, self.device)
        module = sys.modules.get(self.backend)
        return {
            "machine": platform.node(),
            "card": name,
            "identity": identity,
            "device": str(self.device),
            "backend": f"{self.backend} {getattr(module, '__version__', '')}".strip(),
            "python": platform.python_version(),
            "arraybridge": _own_version(),
        }

    def _measure(self) -> Rates:
        def launch(x: Any) -> None:
            self.settle(self.run(lambda a: a + a, x))

        free = self.free()
        large = LARGE if free is None else min(LARGE, max(free // 8, 64 << 10))
        arrays = {n: np.zeros(n, np.uint8) for n in (SMALL, large)}
        return measure_rates(
            lambda n: self.put(arrays[n]),
            lambda x: convert_memory(x, "numpy", copy=True),
            launch,
            self.clock,
            large,
        )

    def free(self) -> int | None:
        """Bytes that the backend could still take, its cache included; None where it cannot tell."""
        pool = self.framework.pool
        free = 0 if pool is None else pool.free_memory_of(self.device)
        if pool is None or not free:
            return None
        if pool.counts_cache_as_free:
            return free
        return free + sum(u.cached or 0 for u in pool.usage() if u.device == self.device)

    def room(self, nbytes: float) -> tuple[bool, int]:
        """Whether so many bytes fit, and the free bytes as they were last seen (0 where nobody can tell)."""
        asked, free = self._free
        now = self.clock()
        if now - asked >= FREE_FOR or (free and nbytes > GOOD_PART * free):
            free = self.free() or 0
            self._free = (now, free)
        return not free or nbytes <= free, free


def _identity(framework: Framework, device: Device) -> tuple[str, str]:
    """Name and physical identity of the card, as far as they are known."""
    for card in cards():
        if card.index == device.index:
            return card.name, card.uuid
    return (framework.pool or Pool()).card_of(device)[:2]


def _own_version() -> str:
    package = sys.modules.get("arraybridge")
    return str(getattr(package, "__version__", ""))


class Machine:
    """The cards of this process, each looked for once. Tests make one with a clock of their own."""

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        folder: Callable[[], Path | None] | None = None,
    ) -> None:
        self.clock = clock
        self.folder = folder
        self._lock = threading.RLock()
        self._found: dict[tuple[str | None, int], Card | str] = {}
        self._cards: dict[tuple[str, int], Card] = {}

    def _folder(self) -> Path | None:
        if self.folder is not None:
            return self.folder()
        from arraybridge.offload import rates_file

        return rates_file.cache_folder()

    def forget(self) -> None:
        """Look again at the next call."""
        # Without the lock: a framework is registered under a lock that whoever looks for cards will want.
        self._found.clear()
        self._cards.clear()

    @property
    def looked(self) -> bool:
        """Whether somebody has looked for a card already, so that doing so again costs nothing."""
        return bool(self._found)

    def find(self, backend: str | None, index: int) -> Card | str:
        """The card of that number in that framework (None: the first that has it).

        Returns:
            the card; or why there is none, in a sentence.
        """
        found = self._found.get((backend, index))
        if found is None:
            with self._lock:
                found = self._found.get((backend, index))
                if found is None:
                    found = self._found[backend, index] = self._find(backend, index)
        return found

    def _find(self, backend: str | None, index: int) -> Card | str:
        wanted = Device("gpu", index)
        reasons = []
        for name in _worth_asking(backend):
            framework = _usable(name)
            if isinstance(framework, str):
                reasons.append(framework)
                continue
            try:
                there = framework.devices()
            except RuntimeError as error:  # the driver refuses
                reasons.append(f"{name} finds no card ({error})")
                continue
            if wanted in there:
                known = self._cards.get((name, index))
                if known is None:
                    known = self._cards[name, index] = Card(framework, wanted, self.clock, self._folder())
                return known
            others = [str(d) for d in there if d.kind == "gpu"]
            if others:
                reasons.append(f"{name} has no {wanted} (it has {', '.join(others)})")
            else:
                reasons.append(framework.missing_device_reason().rstrip(".") or f"{name} has no GPU")
        if not reasons:
            return "this machine has no GPU, or no driver for one"
        return f"there is no {wanted} here: {'; '.join(reasons)}"

    def freest(self, backend: str | None) -> int:
        """The number of the card with the most free memory; 0 where there is none."""
        for name in _worth_asking(backend):
            framework = _usable(name)
            if not isinstance(framework, str):
                there = [d for d in framework.devices() if d.kind == "gpu"]
                if there:
                    return max(there, key=(framework.pool or Pool()).free_memory_of).index
        return 0


def _usable(name: str) -> Framework | str:
    if not registry.is_installed(name):
        return f"{name} is not installed"
    try:
        return registry.framework(name)
    except FrameworkNotInstalledError as error:
        return f"{name} does not work here ({error.reason})"


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
