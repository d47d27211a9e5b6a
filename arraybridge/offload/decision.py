"""Where a call of a `gpu` function runs, and why."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from arraybridge.frameworks import registry
from arraybridge.functions.wrap import label_of, takes_self
from arraybridge.offload.choice import Moves, Verdict, choose
from arraybridge.offload.footprint import Footprint, size
from arraybridge.offload.history import Entry, History
from arraybridge.offload.machine import Card, Machine
from arraybridge.placement import card_meant, chosen_device, placement, worker_device
from arraybridge.show import format_bytes, format_seconds
from arraybridge.types import Device, GpuId

__all__ = ["Decider", "Decision", "machine", "staying"]

#: Below both of these nobody looks for a card: importing a framework takes longer than many such calls.
LOOK_BYTES, LOOK_SECONDS = 1 << 20, 1e-3

#: The cards of this process. (Tests hand an `Offload` one with a clock of their own.)
machine = Machine()
registry.on_register.append(machine.forget)

#: Whether results stay on the card, in this thread or task.
staying: ContextVar[bool] = ContextVar("arraybridge_stay_on_gpu", default=False)


@dataclass(frozen=True, slots=True)
class Decision:
    """Where a call of a `gpu` function would run, and why. Prints as plain sentences.

    Attributes:
        on_gpu: whether it would run on a card.
        device: where.
        backend: the framework that it would run in.
        reasons: sentences; the first one is what decided.
        cpu_seconds: expected time on the CPU, with transfers; None where nothing is known.
        gpu_seconds: expected time on the card, with transfers; None where nothing is known.
    """

    on_gpu: bool
    device: Device
    backend: str
    reasons: tuple[str, ...]
    cpu_seconds: float | None = None
    gpu_seconds: float | None = None

    def __str__(self) -> str:
        where = f"on {self.device} in {self.backend}" if self.on_gpu else "on the CPU in NumPy"
        return "\n".join([f"It would run {where}.", *self.reasons])


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")


class Decider:
    """Decides for one function, call by call, from what is known of it and of the machine."""

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        backend: str | None = None,
        gpu_id: GpuId = None,
        split_axis: int | None = None,
        cards: Machine | None = None,
    ) -> None:
        self.fn = fn
        self.backend = backend
        self.gpu_id: GpuId = gpu_id
        self.split_axis = split_axis
        self.label = label_of(fn)
        self.skip = 1 if takes_self(fn) else 0  # self stays as it is, also where it is an array
        self.machine = cards or machine
        self.history = History()
        self._auto: int | None = None
        placed = placement(fn)
        #: Why a card is of no use: the function has a place of its own.
        self.elsewhere = "" if placed is None else f"its own decorator says where it runs: {placed}"

    def __getstate__(self) -> dict[str, Any]:
        # The cards of this process stay here.
        return {name: value for name, value in self.__dict__.items() if name not in ("machine", "_auto")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.machine, self._auto = machine, None

    # -- looking ----------------------------------------------------------------------------------

    def look(self, args: tuple[Any, ...], kwargs: dict[str, Any], skip: int) -> Footprint:
        call = Footprint()
        for value in args[skip:] if skip else args:
            call.add(value)
        if kwargs:
            for name, value in kwargs.items():
                call.extras.append(name)
                call.add(value)
        return call

    def entry(self, call: Footprint, *, keep: bool = True) -> Entry:
        dtypes, shapes, extras = tuple(call.dtypes), tuple(call.shapes), tuple(call.extras)
        key = (dtypes, shapes, extras)
        found = self.history.entries.get(key)
        if found is None:
            ranks = tuple([len(s) for s in shapes])
            words = tuple([x for x in extras if type(x) is not int])
            found = self.history.entry(key, (dtypes, ranks, words), call.nbytes, keep=keep)
        return found

    def card(self) -> Card | str:
        """The card to run on, or why there is none."""
        # None where nobody chose one; a worker of device_map has a device of its own.
        chosen = (worker_device.get() if self.gpu_id is None else None) or chosen_device()
        if chosen is not None and chosen.kind == "cpu":
            return "the default device is the CPU"
        index = card_meant(self.gpu_id)
        if index is None:
            index = 0 if chosen is None else chosen.index
        elif isinstance(index, str):  # "auto"
            if self._auto is None:
                self._auto = self.machine.freest(self.backend)
            index = self._auto
        return self.machine.find(self.backend, index)

    def decide(self, call: Footprint, entry: Entry) -> tuple[Card | None, Verdict]:
        """Where the call runs. Changes nothing but what is known of the machine."""
        if (
            not self.machine.looked
            and not call.on_gpu
            and call.nbytes < LOOK_BYTES
            and (entry.cpu.seconds or 0.0) < LOOK_SECONDS
        ):
            return None, Verdict(
                False,
                f"it takes {format_bytes(call.nbytes)} in, too little to look for a card"
                f" (under {format_bytes(LOOK_BYTES)}, and under {format_seconds(LOOK_SECONDS)} on the CPU)",
            )
        card = self.card()
        if isinstance(card, str):
            return None, Verdict(False, card)
        family = entry.family
        why = self.elsewhere or self.history.refuted.get(card.backend) or family.blocked.get(card.backend)
        why = why or family.blocked.get("")
        if why:
            return None, Verdict(False, why)
        if family.in_place:
            here = not call.numpy_alone and all(card.holds(x) for x in call.arrays)
            return card if here else None, Verdict(here, family.in_place)
        verdict = self._weigh(call, entry, card)
        return (card if verdict.on_card else None), verdict

    def _weigh(self, call: Footprint, entry: Entry, card: Card) -> Verdict:
        times = entry.card(card.name)
        moves, away, out = self._moves(call, entry, card)
        verdict = choose(entry, times, card.name, moves, card.rates.launch)
        if not verdict.on_card:
            return verdict
        needed = away + call.nbytes + out  # as much again as the arguments, for what is computed on the way
        fits, free = card.room(needed)
        if not fits:
            why = (
                f"the call needs about {format_bytes(needed)}, and {card.name} has {format_bytes(free)} free"
            )
            return Verdict(False, why, verdict.cpu, verdict.card)
        before = times.oom_free
        if before is not None and not (before and card.room(1.5 * before)[0]):
            return Verdict(False, f"it ran out of memory on {card.name} before", verdict.cpu, verdict.card)
        return verdict

    def _moves(self, call: Footprint, entry: Entry, card: Card) -> tuple[Moves, int, int]:
        """What has to be moved; the bytes that are not on the card yet, and those of the result."""
        arrays = call.arrays
        if call.numpy_alone:
            away, away_count, home_on_card = call.nbytes, len(arrays), False
        else:
            elsewhere = [x for x in arrays if not card.holds(x)]
            away_count, away = size(elsewhere)
            home_on_card = card.holds(arrays[0])
        # Until the function has run, its result is taken to be as large as its arguments.
        out_count, out = entry.out or (1, call.nbytes)
        rates = card.rates
        to_card = rates.to_card.seconds(away_count, away)
        from_card = 0.0 if home_on_card or staying.get() else rates.to_host.seconds(out_count, out)
        to_host = rates.to_host.seconds(len(arrays) - away_count, call.nbytes - away)
        back = rates.to_card.seconds(out_count, out) if home_on_card else 0.0
        ratio = entry.card(card.name).ratio
        return Moves((to_host + back) * ratio, (to_card + from_card) * ratio, not away_count), away, out

    def explain(self, *args: Any, **kwargs: Any) -> Decision:
        """Where the call would run, and why; the function is not called.

        A card that nobody has used yet is measured first, where the call itself would do so.
        """
        # Whether self comes along does not matter: it is no array, and what is none is not looked at.
        call = self.look(args, kwargs, 0)
        if not call.arrays:
            return Decision(False, Device("cpu"), "numpy", ("It takes no arrays.",))
        entry = self.entry(call, keep=False)
        card, verdict = self.decide(call, entry)
        reasons = [_sentence(verdict.why)]
        if entry.cpu.seconds is not None:
            took = format_seconds(entry.cpu.seconds)
            reasons.append(f"On the CPU it takes {took} (runs so far: {entry.cpu.count}).")
        for name, times in list(entry.cards.items()):
            if times.seconds is not None:
                took = format_seconds(times.seconds)
                reasons.append(f"On {name} it takes {took} without transfers (runs so far: {times.count}).")
        if verdict.card is not None and verdict.cpu is not None:
            cpu, there = format_seconds(verdict.cpu), format_seconds(verdict.card)
            reasons.append(f"With transfers, {cpu} are expected on the CPU and {there} on the card.")
        if card is not None and not entry.card(card.name).proven:
            reasons.append(
                "The first run with such arrays on the card is a trial: it is computed on the CPU as well,"
                " and the results are compared."
            )
        if card is None:
            where, backend = Device("cpu"), "numpy"
        else:
            where, backend = card.device, card.backend
        return Decision(card is not None, where, backend, tuple(reasons), verdict.cpu, verdict.card)
