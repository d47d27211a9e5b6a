"""Large arrays to a card and back through pinned buffers, on machines where that has proven faster.

A driver copies pageable memory in small steps through pinned buffers of its own. A `StagingRing` does the
same with several threads. Whether that wins depends on the card, the bus, the processor and the driver, so
nothing is taken for granted: the framework's plain call is used until a trial in this very process has shown
that the ring delivers the same bytes, and clearly sooner.
"""

from __future__ import annotations

import logging
import math
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any, Literal

import numpy as np

from arraybridge.conversion.ring import BUFFERS, CHUNK, StagingRing, as_bytes, fetched, pinning_of, sent
from arraybridge.errors import told, warn
from arraybridge.frameworks import hostmemory
from arraybridge.frameworks.base import CPU, Framework, is_c_contiguous, refusals
from arraybridge.options import staging_allowed
from arraybridge.types import Device

__all__ = ["fetch", "fetch_own", "fetch_through", "prove", "send", "send_own", "send_through"]

Way = Literal["to the card", "to the host"]
WAYS: tuple[Way, ...] = ("to the card", "to the host")

#: Below this size the plain call is faster anywhere.
STAGE_FROM = 1 << 20
#: Bytes that the plain call moves before a ring is made. At some 8 GB/s that took 65 ms, about as long as it
#: takes to lock the buffers and try them: whoever moves less never waits for that, and nobody waits for it
#: longer than for what was moved before. Buffers that `free_memory` let go come back after as much again.
MAKE_AFTER = 512 << 20
#: Sizes that the trial moves. A ring that wins with the last may lose with the first, where little overlaps.
TRIAL_SIZES = (1 << 20, 4 << 20, 32 << 20)
#: How often the trial measures each; the shortest time counts.
ROUNDS = 3
#: How many times faster than the plain call the ring has to be, so that noise decides nothing.
FASTER = 1.2

_log = logging.getLogger("arraybridge.conversion")


# -- the rings of this process -------------------------------------------------------------------------


# Guards what stands in this section; never held while a framework is asked for anything.
_lock = threading.Lock()
# Held while buffers are made, so that two threads do not make them twice.
_making = threading.Lock()
_rings: dict[object, StagingRing] = {}
# Those among them, and those that were let go while somebody still used them.
_alive: weakref.WeakSet[StagingRing] = weakref.WeakSet()


def _kind(owner: Framework) -> object:
    """Frameworks that share cards share one ring, since memory that one of them pinned is so for all."""
    return owner if owner.dlpack_device is None else owner.dlpack_device


def _ring(owner: Framework, device: Device) -> StagingRing | None:
    """The ring for that card, made if need be; None while another one that was let go is still in use."""
    kind = _kind(owner)
    with _making:
        with _lock:
            known = _rings.get(kind)
            if known is not None:
                return known
            if any(_kind(one.owner) == kind for one in list(_alive)):
                return None
        with owner.selected(device):
            made = StagingRing(owner, CHUNK, BUFFERS)
        with _lock:
            _rings[kind] = made
            _alive.add(made)
        return made


def drop(name: str | None) -> int:
    """Let the buffers go that this framework locked (None: all), once nobody uses them.

    Returns their bytes, those of a transfer under way included, and but for those that the framework itself
    counts when it frees its caches.
    """
    freed = 0
    with _lock:
        for kind, ring in list(_rings.items()):
            if name in (None, ring.owner.name):
                del _rings[kind]
                if not pinning_of(ring.owner).is_counted:
                    freed += ring.nbytes
    return freed


# -- what has been proven ------------------------------------------------------------------------------


@dataclass(slots=True)
class _Proof:
    """What is known of the ring for one framework and card.

    Attributes:
        moved: bytes that went by the plain call since there was a ring last.
        state: ``"open"``, ``"running"`` while a thread tries it, or ``"closed"``.
        least: for each way on which the ring won, the size from which on it is used.
    """

    moved: int = 0
    state: Literal["open", "running", "closed"] = "open"
    least: dict[Way, int] = field(default_factory=dict)

    def rules_out(self, nbytes: int, way: Way) -> bool:
        """Whether it is settled that an array of this size goes by the plain call."""
        return self.state == "closed" and nbytes < self.least.get(way, nbytes + 1)


_proofs: dict[tuple[Framework, Device], _Proof] = {}


def _proof(owner: Framework, device: Device) -> _Proof:
    return _proofs.setdefault((owner, device), _Proof())


def _proven(owner: Framework, device: Device, nbytes: int, way: Way) -> StagingRing | None:
    """The ring, where this transfer is to go through it; or None, and the transfer is counted."""
    with _lock:
        proof = _proof(owner, device)
        if proof.state == "running" or proof.rules_out(nbytes, way):
            return None
        ring = _rings.get(_kind(owner))
        if proof.state == "closed" and ring is not None:
            return ring
        if proof.moved < MAKE_AFTER:
            proof.moved += nbytes
            return None
    if prove(owner, device) is None or proof.rules_out(nbytes, way):
        return None
    with _lock:
        proof.moved = 0
    try:
        return _ring(owner, device)
    except _errors(owner) as error:
        _log.info("%s on %s: no staging buffers now (%s)", owner.name, device, _short(error))
        return None


def prove(owner: Framework, device: Device) -> dict[Way, int] | None:
    """Try the ring against the plain call, once for each framework and card.

    Takes some 100 ms the first time, and 32 MiB of the card. The outcome is logged at INFO to
    ``arraybridge.conversion``.

    Returns:
        for each way on which the ring won, the size in bytes from which on it is used; None where it could
        not be tried now.
    """
    with _lock:
        proof = _proof(owner, device)
        if proof.state == "closed":
            return dict(proof.least)
        if proof.state == "running" or owner.pinning is None:
            return None
        proof.state = "running"
    least: dict[Way, int] | None = None
    figures: list[_Figure] = []
    trouble = ""
    try:
        ring = _ring(owner, device)
        if ring is not None and ring.lock.acquire(blocking=False):
            try:
                figures = _measure(ring, owner, device)
            finally:
                ring.lock.release()
            least = _least(figures)
    except _errors(owner) as error:
        trouble, least = _short(error), {}
    finally:
        with _lock:
            proof.state = "open" if least is None else "closed"
            proof.least = dict(least or {})
            proof.moved = 0
            alike = [one for (other, _), one in _proofs.items() if _kind(other) == _kind(owner)]
            if not any(one.least or one.state == "running" for one in alike):
                _rings.pop(_kind(owner), None)  # of use to nobody
    if least is not None:
        _tell(owner, device, least, figures, trouble)
    return least


@dataclass(slots=True)
class _Figure:
    """What the trial found for one way and size: whether the bytes arrived, and the seconds it took."""

    way: Way
    size: int
    right: bool
    plain: float
    staged: float


def _measure(ring: StagingRing, owner: Framework, device: Device) -> list[_Figure]:
    """Move a pattern in both ways, by the plain call and through the ring, each as a user's array would go.

    The caller holds the lock of the ring.
    """
    pattern = np.arange(max(TRIAL_SIZES) // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    figures = []
    for size in TRIAL_SIZES:
        part = pattern.view(np.uint8)[:size]
        # Each transfer that is checked has values of its own, since what an earlier one left behind in the
        # same memory would make one that moves nothing look right.
        pattern += np.uint64(0x5851F42D4C957F2D)
        right = np.array_equal(owner.to_host(sent(ring, owner, part, device)), part)
        plain, staged = partial(owner.from_host, part, device), partial(sent, ring, owner, part, device)
        figures.append(_race("to the card", size, right, plain, staged))
        pattern += np.uint64(0x5851F42D4C957F2D)
        there = owner.from_host(part, device)
        right = np.array_equal(fetched(ring, owner, there), part)
        plain, staged = partial(owner.to_host, there), partial(fetched, ring, owner, there)
        figures.append(_race("to the host", size, right, plain, staged))
    return figures


def _race(
    way: Way, size: int, right: bool, plain: Callable[[], object], staged: Callable[[], object]
) -> _Figure:
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS if right else 0):
        for call, spent in zip((plain, staged), seconds, strict=True):
            started = perf_counter()
            call()
            spent.append(perf_counter() - started)
    return _Figure(way, size, right, min(seconds[0], default=0.0), min(seconds[1], default=0.0))


def _least(figures: list[_Figure]) -> dict[Way, int]:
    """For each way, the smallest size from which on the ring won with all; a wrong byte loses the way."""
    least: dict[Way, int] = {}
    for way in WAYS:
        tried = [one for one in figures if one.way == way]
        if not all(one.right for one in tried):
            continue
        for one in reversed(tried):
            if one.plain < FASTER * one.staged:
                break
            least[way] = one.size
    return least


def _tell(
    owner: Framework, device: Device, least: dict[Way, int], figures: list[_Figure], trouble: str
) -> None:
    """Log what was measured and decided, and warn of wrong bytes."""
    for way in WAYS:
        rates = [
            f"{one.size >> 20} MiB in {one.staged * 1e3:.2f} ms, plain {one.plain * 1e3:.2f} ms"
            if one.right
            else f"{one.size >> 20} MiB arrived wrong"
            for one in figures
            if one.way == way
        ]
        decided = f"used from {least[way] >> 20} MiB on" if way in least else "not used"
        why = trouble or "; ".join(rates)
        _log.info("%s on %s, %s: staging buffers are %s (%s)", owner.name, device, way, decided, why)
    wrong = [way for way in WAYS if not all(one.right for one in figures if one.way == way)]
    if wrong:
        warn(
            f"{owner.name} on {device}: in a trial the staging buffers delivered wrong bytes"
            f" {' and '.join(wrong)}. They are not used that way, and no array of yours went through them;"
            " please report it.",
            RuntimeWarning,
        )


def _errors(owner: Framework) -> tuple[type[Exception], ...]:
    """What the ring may meet: no memory, no more threads, and whatever the framework raises."""
    return (MemoryError, *refusals(owner))


def _short(error: Exception) -> str:
    return told(error).partition("\n")[0]


# -- one array -----------------------------------------------------------------------------------------


def send(target: Framework, memory: np.ndarray, device: Device) -> Any:
    """What ``target.from_host(memory, device)`` returns, for a card, by whichever way is faster here."""

    def plain() -> Any:
        return target.from_host(memory, device)

    dtype = memory.dtype
    if (
        memory.nbytes < STAGE_FROM
        or not memory.flags.c_contiguous
        or not dtype.isnative
        or (target.dtypes is not None and dtype.name not in target.dtypes)
    ):
        return plain()
    return _send(target, as_bytes(memory), memory.shape, dtype.name, device, plain)


def send_own(owner: Framework, x: Any, device: Device) -> Any:
    """What ``owner.to_device(x, device)`` returns, for its own array in host memory and a card."""

    def plain() -> Any:
        return owner.to_device(x, device)

    memory = None
    if owner.nbytes(x) >= STAGE_FROM and pinning_of(owner).can_stage(x):
        memory = pinning_of(owner).own_bytes(x)
    if memory is None:
        return plain()
    return _send(owner, memory, owner.shape(x), owner.dtype_name(x), device, plain)


def fetch(source: Framework, x: Any) -> np.ndarray:
    """What ``source.to_host(x)`` returns, for an array on a card, by whichever way is faster here."""

    def plain() -> np.ndarray:
        return source.to_host(x)

    def make() -> tuple[np.ndarray, np.ndarray]:
        result = hostmemory.packed(source.shape(x), hostmemory.np_dtype(source.dtype_name(x)))
        return result, as_bytes(result)

    result: np.ndarray = _fetch(source, x, make, plain)
    return result


def fetch_own(owner: Framework, x: Any) -> Any:
    """What ``owner.to_device(x, CPU)`` returns, for its own array on a card."""

    def plain() -> Any:
        return owner.to_device(x, CPU)

    def make() -> tuple[Any, np.ndarray] | None:
        result = owner.empty(owner.shape(x), owner.dtype_name(x), CPU)
        memory = pinning_of(owner).own_bytes(result)
        if memory is None:
            return None
        hostmemory.ask_for_huge_pages(memory)
        return result, memory

    return _fetch(owner, x, make, plain)


def _send(
    target: Framework,
    memory: np.ndarray,
    shape: tuple[int, ...],
    dtype: str,
    device: Device,
    plain: Callable[[], Any],
) -> Any:
    """Send packed bytes (uint8, 1-D) through the ring where it has proven itself, else as ``plain`` does."""
    way: Way = "to the card"
    if not _is_worth_a_look(target, device, memory.size, way) or not _is_pageable(target, memory, device):
        return plain()
    ring = _proven(target, device, memory.size, way)
    # Where another thread's array is in the ring, the plain call beside it beats waiting.
    if ring is None or not ring.lock.acquire(blocking=False):
        return plain()
    try:
        result = target.empty(shape, dtype, device)
        try:
            ring.send(memory, result, pinning_of(target))
        except _errors(target) as error:
            del result
            _give_up(target, device, way, error)
        else:
            return result
    finally:
        ring.lock.release()
    return plain()


def _fetch(
    source: Framework, x: Any, make: Callable[[], tuple[Any, np.ndarray] | None], plain: Callable[[], Any]
) -> Any:
    """Fetch an array through the ring where that has proven itself, else as ``plain`` does.

    ``make`` returns the result without its values, and its bytes (uint8, 1-D); or None.
    """
    way: Way = "to the host"
    nbytes, device = source.nbytes(x), source.device_of(x)
    may = _is_worth_a_look(source, device, nbytes, way) and _is_packed(source, x)
    if not may or not pinning_of(source).can_stage(x):
        return plain()
    ring = _proven(source, device, nbytes, way)
    if ring is None or not ring.lock.acquire(blocking=False):
        return plain()
    try:
        made = make()
        if made is not None:
            try:
                ring.fetch(x, made[1], pinning_of(source))
            except _errors(source) as error:
                del made
                _give_up(source, device, way, error)
            else:
                return made[0]
    finally:
        ring.lock.release()
    return plain()


def _is_worth_a_look(owner: Framework, device: Device, nbytes: int, way: Way) -> bool:
    if owner.pinning is None or nbytes < STAGE_FROM or not staging_allowed():
        return False
    known = _proofs.get((owner, device))
    return known is None or not known.rules_out(nbytes, way)


def _is_packed(source: Framework, x: Any) -> bool:
    shape = source.shape(x)
    return is_c_contiguous(shape, source.strides(x), source.nbytes(x) // math.prod(shape))


def _is_pageable(owner: Framework, memory: np.ndarray, device: Device) -> bool:
    """Whether the card cannot read this memory at full speed as it is."""
    try:
        with owner.selected(device):
            return not pinning_of(owner).is_pinned(memory)
    except _errors(owner):
        return False  # it cannot tell: the plain call takes anything


def _give_up(owner: Framework, device: Device, way: Way, error: Exception) -> None:
    with _lock:
        _proof(owner, device).least.pop(way, None)
    _log.warning(
        "%s on %s, %s: the staging buffers failed and are not used any more (%s)",
        owner.name,
        device,
        way,
        _short(error),
    )


# -- through the ring, whatever it has proven ----------------------------------------------------------


def send_through(source: np.ndarray, owner: Framework, device: Device) -> Any:
    """A packed host array on a card of ``owner``, by way of the ring; complete on return.

    Args:
        source: C-contiguous host memory, of a dtype that ``owner`` has.
        owner: torch or cupy.
        device: its card.

    Raises:
        ValueError: there is no card.
    """
    ring = _ring_now(owner, device)
    with ring.lock:
        return sent(ring, owner, source, device)


def fetch_through(x: Any, owner: Framework, target: np.ndarray) -> np.ndarray:
    """Copy a packed array from a card into ``target``, packed host memory.

    It is fastest where ``target`` was written to before, so that the system has its pages ready.

    Raises:
        ValueError: there is no card.
    """
    ring = _ring_now(owner, owner.device_of(x))
    with ring.lock:
        ring.fetch(x, as_bytes(target), pinning_of(owner))
    return target


def _ring_now(owner: Framework, device: Device) -> StagingRing:
    ring = _ring(owner, device)
    if ring is None:
        raise RuntimeError("the staging buffers that were let go last are still in use")
    return ring
