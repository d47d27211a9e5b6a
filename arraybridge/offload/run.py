"""What a function decorated with `gpu` does on each call: decide, run, measure, and come back."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

from arraybridge.conversion.convert import convert_memory
from arraybridge.errors import CannotSplitError, text_of
from arraybridge.memory.recognise import is_oom_error, let_go
from arraybridge.memory.recovery import run_with_oom_recovery
from arraybridge.offload.choice import CALIBRATION, RECHECK_LONGEST, Verdict
from arraybridge.offload.decision import Decider, staying
from arraybridge.offload.footprint import Footprint, Home, dtype_name, map_results, results, size
from arraybridge.offload.history import Entry
from arraybridge.offload.machine import Card
from arraybridge.trees import map_arrays

__all__ = ["Offload"]

#: Where results stay on the card, they are waited for, and measured, in one call out of so many.
SAMPLE_EVERY = 16


class _Inside(threading.local):
    on_card = False


_inside = _Inside()


class Offload(Decider):
    """Runs one function, each call on the CPU or on a card."""

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
            if verdict.recheck:
                entry.recheck_wait = min(2 * entry.recheck_wait, RECHECK_LONGEST)
                entry.recheck_at = entry.calls + entry.recheck_wait
            elif verdict.cpu is not None and verdict.card is not None:
                for name, times in entry.cards.items():
                    times.on_card = card is not None and card.name == name

    def _on_cpu(self, call: Footprint, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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
        self, card: Card, call: Footprint, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]
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
            let_go(error)  # whose variables hold the card's memory
            oom = is_oom_error(error) or isinstance(error, CannotSplitError)
            why = f"{type(error).__name__}: {text_of(error) or ''}".partition("\n")[0]
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
        call: Footprint,
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
        call: Footprint,
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
