"""What the emulated card says of itself: its own books, beside those that frameworks keep."""

from __future__ import annotations

import ctypes
import gc

import cupy

_card = ctypes.CDLL("libcudart.so.13")
for _name in ("used_bytes", "capacity", "queued_work"):
    getattr(_card, f"card_{_name}").restype = ctypes.c_size_t


def used(card: int = 0) -> int:
    """Bytes that are allocated on the card."""
    return int(_card.card_used_bytes(card))


def capacity() -> int:
    """Bytes of each card."""
    return int(_card.card_capacity())


def queued(card: int = 0) -> int:
    """Pieces of work that wait on all streams of the card."""
    return int(_card.card_queued_work(card))


def is_open(card: int = 0) -> bool:
    """Whether this process has a context on the card."""
    return bool(_card.card_is_open(card))


def is_awake() -> bool:
    """Whether the driver was initialized."""
    return bool(_card.card_is_awake())


def retained_contexts(card: int = 0) -> int:
    """How often the driver's interface retained the primary context of the card without releasing it."""
    return int(_card.card_retained_contexts(card))


def pushed_contexts() -> int:
    """How many contexts this thread has pushed and not popped."""
    return int(_card.card_pushed_contexts())


def fail_next_push() -> None:
    """Let the next cuCtxPushCurrent fail."""
    _card.card_fail_next_push()


def empty_pools() -> None:
    """Let CuPy give back what it caches, on both cards."""
    gc.collect()
    for card in range(2):
        with cupy.cuda.Device(card):
            cupy.cuda.Device(card).synchronize()
            cupy.get_default_memory_pool().free_all_blocks()
    cupy.get_default_pinned_memory_pool().free_all_blocks()
