"""What a function decorated with `@gpu` does on each call: decide, run, measure, and come back."""

from __future__ import annotations

import threading
import traceback
import warnings
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from arraybridge.conversion.convert import convert_memory
from arraybridge.frameworks import registry
from arraybridge.memory.oom import CannotSplitError, is_oom_error, run_with_oom_recovery
from arraybridge.offload.calls import Call, Home, dtype_name, map_results, results, size
from arraybridge.offload.costs import (
    CALIBRATION,
    TRIAL_LONGEST,
    Entry,
    History,
    Moves,
    Verdict,
    choose,
)
from arraybridge.offload.machine import Card, Machine
from arraybridge.placement import card_meant, default_device, running_on
from arraybridge.show import format_bytes, format_seconds
from arraybridge.trees import map_arrays
from arraybridge.types import Device, GpuId

__all__ = ["Decision", "Offload", "machine", "staying"]

#: Below both of these nobody looks for a card: importing a framework takes longer than many such calls.
LOOK_BYTES, LOOK_SECONDS = 1 << 20, 1e-3
#: Where results stay on the card, they are waited for, and measured, in one call out of so many.
SAMPLE_EVERY = 16

#: The cards of this process. (Tests hand an `Offload` one with a clock of their own.)
machine = Machine()
registry.on_register.append(machine.forget)

#: Whether results stay on the card, in this thread or task.
staying: ContextVar[bool] = ContextVar("arraybridge_stay_on_gpu", default=False)


class _Inside(threading.local):
    on_card = False


_inside = _Inside()


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


class Offload:
    """Runs one function, each call on the CPU or on a card."""

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        backend: str | None = None,
        gpu_id: GpuId = None,
        split_axis: int | None = None,
        label: str = "",
        is_method: bool = False,
        cards: Machine | None = None,
    ) -> None:
        self.fn = fn
        self.backend = backend
        self.gpu_id: GpuId = gpu_id
        self.split_axis = split_axis
        self.label = label or getattr(fn, "__qualname__", type(fn).__qualname__)
        self.skip = 1 if is_method else 0  # self stays as it is, also where it is an array
        self.machine = cards or machine
        self.history = History()
        self._auto: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        # The cards of this process stay here.
        return {name: value for name, value in self.__dict__.items() if name not in ("machine", "_auto")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.machine, self._auto = machine, None

    # -- looking ----------------------------------------------------------------------------------

    def look(self, args: tuple[Any, ...], kwargs: dict[str, Any], skip: int) -> Call:
        call = Call()
        for value in args[skip:] if skip else args:
            call.add(value)
        if kwargs:
            for name, value in kwargs.items():
                call.extras.append(name)
                call.add(value)
        return call

    def entry(self, call: Call, *, keep: bool = True) -> Entry:
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
        chosen = (running_on.get() if self.gpu_id is None else None) or default_device.get()
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

    def decide(self, call: Call, entry: Entry) -> tuple[Card | None, Verdict]:
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
        blocked = entry.family.blocked
        if blocked:
            why = blocked.get("") or blocked.get(card.backend)
            if why is not None:
                return None, Verdict(False, why)
        verdict = self._weigh(call, entry, card)
        return (card if verdict.on_card else None), verdict

    def _weigh(self, call: Call, entry: Entry, card: Card) -> Verdict:
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

    def _moves(self, call: Call, entry: Entry, card: Card) -> tuple[Moves, int, int]:
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
        if card is None:
            where, backend = Device("cpu"), "numpy"
        else:
            where, backend = card.device, card.backend
        return Decision(card is not None, where, backend, tuple(reasons), verdict.cpu, verdict.card)

    # -- running ----------------------------------------------------------------------------------

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if _inside.on_card:  # called by a function that runs on the card: so does this one
            return self.fn(*args, **kwargs)
        call = self.look(args, kwargs, self.skip)
        if not call.arrays:
            return self.fn(*args, **kwargs)
        entry = self.entry(call)
        card, verdict = self.decide(call, entry)
        self._note(entry, card, verdict)
        if card is None:
            return self._on_cpu(call, entry, args, kwargs)
        return self._on_card(card, call, entry, args, kwargs)

    def _note(self, entry: Entry, card: Card | None, verdict: Verdict) -> None:
        with self.history.lock:
            entry.calls += 1
            if verdict.trial:
                entry.trial_wait = min(2 * entry.trial_wait, TRIAL_LONGEST)
                entry.trial_at = entry.calls + entry.trial_wait
            elif verdict.cpu is not None and verdict.card is not None:
                for name, times in entry.cards.items():
                    times.on_card = card is not None and card.name == name

    def _on_cpu(self, call: Call, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        clock = self.machine.clock
        if not call.numpy_alone:
            args, kwargs = self._mapped(args, kwargs, lambda x: convert_memory(x, "numpy"))
        started = clock()
        result = self.fn(*args, **kwargs)
        seconds = clock() - started
        arrays = results(result)
        with self.history.lock:
            entry.cpu.add(seconds)
            entry.both = any(times.count for times in entry.cards.values())
            entry.out = size(arrays)
            family = entry.family
            if family.result is None:
                family.result = tuple(dtype_name(x) for x in arrays)
                why = self._works_in_place(result, arrays, args, kwargs)
                if why:
                    family.blocked[""] = why
        return result if call.numpy_alone else map_results(result, Home(call.arrays[0]))

    def _works_in_place(
        self, result: Any, arrays: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> str:
        """Why what the function does would be lost on a copy of its arguments, or ``""``."""
        if result is None:
            return "it returns nothing, so that it works on its arguments in place"
        given = [x for value in (*args, *kwargs.values()) for x in results(value)]
        if any(x is y for x in arrays for y in given):
            return "it returns its own argument, which it may have changed in place"
        return ""

    def _mapped(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], convert: Callable[[Any], Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with their arrays converted."""
        skip = self.skip
        new = (*args[:skip], *[map_arrays(x, convert) for x in args[skip:]])
        return new, {name: map_arrays(x, convert) for name, x in kwargs.items()} if kwargs else kwargs

    # -- on the card ------------------------------------------------------------------------------

    def _on_card(
        self, card: Card, call: Call, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        own, batch, names = args[: self.skip], args[self.skip :], tuple(kwargs)
        count, attempts = len(batch), 0
        home_on_card = card.holds(call.arrays[0])
        stays = home_on_card or staying.get()
        home = Home(call.arrays[0]) if home_on_card or not stays else _as_it_is

        def attempt(*values: Any) -> Any:
            nonlocal attempts
            attempts += 1
            named = dict(zip(names, values[count:], strict=True))
            # Only the first attempt is the whole call, with nothing cleaned up before.
            sample = entry if attempts == 1 else None
            return self._attempt(card, call, sample, home, stays, (*own, *values[:count]), named)

        axis = self.split_axis
        split = axis is not None and any(-len(s) <= axis < len(s) for s in call.shapes)
        try:
            result = run_with_oom_recovery(
                attempt,
                *batch,
                *kwargs.values(),
                max_retries=1,
                gpu_id=card.device.index,
                split=split,
                split_axis=axis or 0,
            )
        except Exception as error:  # noqa: BLE001  # an unknown function's: the CPU tells whether it is its own
            traceback.clear_frames(error.__traceback__)  # whose variables hold the card's memory
            oom = is_oom_error(error) or isinstance(error, CannotSplitError)
            why = f"{type(error).__name__}: {error}".partition("\n")[0]
        else:
            expected = entry.family.result
            given = tuple([dtype_name(x) for x in results(result)])
            if expected is None or given == expected or len(given) != len(expected):
                return result
            oom, why = False, f"it gives {', '.join(given)} there, and {', '.join(expected)} in NumPy"
        return self._instead(card, call, entry, args, kwargs, oom, why)

    def _attempt(
        self,
        card: Card,
        call: Call,
        entry: Entry | None,
        home: Callable[[Any], Any],
        stays: bool,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        clock = card.clock
        started = clock()
        args, kwargs = self._mapped(args, kwargs, card.put)
        brought = clock()
        _inside.on_card = True
        try:
            result = card.run(self.fn, args, kwargs)
        finally:
            _inside.on_card = False
        # What stays on the card is waited for, and measured, now and then.
        if entry is None or (stays and entry.calls > CALIBRATION and entry.calls % SAMPLE_EVERY):
            return map_results(result, home)
        arrays = results(result)
        for x in arrays:
            card.settle(x)
        computed = clock()
        out = size(arrays)
        result = map_results(result, home)
        seconds, moving = computed - brought, brought - started + clock() - computed
        with self.history.lock:
            entry.out = out
            expected = self._moves(call, entry, card)[0].card
            times = entry.card(card.name)
            times.add(seconds)
            entry.both = entry.cpu.count > 0
            if expected > 0:
                times.add_transfer(moving / (expected / times.ratio))
        return result

    def _instead(
        self,
        card: Card,
        call: Call,
        entry: Entry,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        oom: bool,
        why: str,
    ) -> Any:
        """The call on the CPU, after it failed on the card."""
        if oom:
            entry.card(card.name).oom_free = card.free() or 0
        # Raises the function's own error where the card was not to blame.
        result = self._on_cpu(call, entry, args, kwargs)
        if oom:
            what = f"ran out of memory on {card.name} ({why}); this call was computed on the CPU"
        else:
            what = f"cannot run in {card.backend} ({why}); such calls run on the CPU from now on"
            with self.history.lock:
                entry.family.blocked[card.backend] = f"it cannot run in {card.backend}: {why}"
        warnings.warn(f"{self.label}() {what}", RuntimeWarning, stacklevel=5)
        return result


def _as_it_is(x: Any) -> Any:
    return x
