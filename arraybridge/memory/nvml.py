"""What NVIDIA's management library tells of the cards, where ``nvidia-ml-py`` is installed.

It counts every card of the machine. Here they have the numbers that CUDA gives them in this process, which
`arraybridge.frameworks.cards` asks of the driver; so `memory_stats` and `devices` mean the same card.
"""

from __future__ import annotations

import threading
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

from arraybridge.frameworks import cards

__all__ = ["SeenCard", "asked", "cards_of", "library"]


class SeenCard(NamedTuple):
    """A card: its number as CUDA counts, and NVML's own handle for it."""

    number: int
    handle: Any
    uuid: str
    name: str


_lock = threading.Lock()
_library: ModuleType | None = None
_tried = False


def library() -> ModuleType | None:
    """The module, started once; None without nvidia-ml-py or without a driver."""
    global _library, _tried
    if not _tried:
        with _lock:
            if not _tried:
                try:
                    import pynvml
                except ImportError:
                    pass
                else:
                    try:
                        pynvml.nvmlInit()
                        _library = pynvml
                    except pynvml.NVMLError:
                        pass
                _tried = True
    return _library


def asked(library: ModuleType, question: str, *arguments: Any) -> Any:
    """An answer of NVML, or None for what the card or the driver does not tell."""
    try:
        return getattr(library, question)(*arguments)
    except library.NVMLError:
        return None


@cache
def cards_of(library: ModuleType) -> tuple[SeenCard, ...]:
    """The cards that CUDA shows to this process, in its order; without its driver all of them, in NVML's."""
    there = [_seen(library, i) for i in range(library.nvmlDeviceGetCount())]
    if cards.driver() is None:
        return tuple(there)
    found = []
    for card in cards.cards():
        seen = next((one for one in there if card.uuid and _is_same(one.uuid, card.uuid)), None)
        seen = seen or next((one for one in there if _pci(library, one) == card.pci), None)
        if seen is not None:  # a slice of a card (MIG) has an identity of its own, and its card's address
            found.append(SeenCard(card.index, seen.handle, card.uuid or seen.uuid, seen.name))
    return tuple(found)


def _seen(library: ModuleType, index: int) -> SeenCard:
    handle = library.nvmlDeviceGetHandleByIndex(index)
    uuid, name = library.nvmlDeviceGetUUID(handle), library.nvmlDeviceGetName(handle)
    return SeenCard(index, handle, _as_str(uuid), _as_str(name))


def _is_same(uuid: str, other: str) -> bool:
    return uuid.lower() == other.lower()


def _pci(library: ModuleType, card: SeenCard) -> str:
    address = asked(library, "nvmlDeviceGetPciInfo", card.handle)
    return "" if address is None else cards.pci_address(address.domain, address.bus, address.device)


def _as_str(text: str | bytes) -> str:
    return text.decode() if isinstance(text, bytes) else text
