"""What a function decorated with `gpu` does on each call: decide, run, measure, and come back."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from arraybridge.conversion import trace
from arraybridge.conversion.convert import convert_memory
from arraybridge.conversion.trace import open_logs
from arraybridge.errors import CannotSplitError, told
from arraybridge.memory.recognise import is_oom_error, let_go
from arraybridge.memory.recovery import run_with_oom_recovery
from arraybridge.offload.choice import CALIBRATION, RECHECK_LONGEST, Verdict
from arraybridge.offload.decision import Decider, staying
from arraybridge.offload.footprint import Footprint, Home, dtype_name, results, size
from arraybridge.offload.history import Entry
from arraybridge.offload.machine import Card
from arraybridge.offload.trial import EQUAL, Rounding, Watch, aliasing, difference, widened
from arraybridge.trees import arrays_of, map_arrays

__all__ = ["Offload"]

#: Where results stay on the card, they are waited for, and measured, in one call out of so many.
SAMPLE_EVERY = 16


class _Inside(threading.local):
    #: Whether this thread runs a function whose place is decided: `gpu` functions that it calls run there.
    decided = False


_inside = _Inside()


@contextmanager
def _decided() -> Iterator[None]:
    before, _inside.decided = _inside.decided, True
    try:
        yield
    finally:
        _inside.decided = before


class Arguments(NamedTuple):
    """What a function is called with: self, which stays as it is, and all else."""

    own: tuple[Any, ...]
    batch: tuple[Any, ...]
    named: dict[str, Any]

    def mapped(self, convert: Callable[[Any], Any]) -> Arguments:
        """The same with other arrays."""
        batch = tuple([map_arrays(x, convert) for x in self.batch])
        return Arguments(self.own, batch, {name: map_arrays(x, convert) for name, x in self.named.items()})

    def arrays(self) -> list[Any]:
        return arrays_of([*self.batch, *self.named.values()])

    def call(self, fn: Callable[..., Any]) -> Any:
        return fn(*self.own, *self.batch, **self.named)


class Failure(NamedTuple):
    """Why a result cannot be had from the card; ``oom``: for want of memory, which other calls may have."""

    why: str
    oom: bool = False


class Offload(Decider):
    """Runs one function, each call on the CPU or on a card."""

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if _inside.decided:
            return self.fn(*args, **kwargs)
        call = self.look(args, kwargs, self.skip)
        if not call.arrays:
            return self.fn(*args, **kwargs)
        entry = self.entry(call)
        card, verdict = self.decide(call, entry)
        self._note(entry, card, verdict)
        given = Arguments(args[: self.skip], args[self.skip :], kwargs)
        span = trace.span("decision", self.label) if open_logs else None
        if span is not None:
            span.device, span.reason = "cpu" if card is None else str(card.device), verdict.why
            with span:
                return self._there(card, call, entry, given)
        if card is None:
            return self._on_cpu(call, entry, given)
        return self._there(card, call, entry, given)

    def _there(self, card: Card | None, call: Footprint, entry: Entry, given: Arguments) -> Any:
        """Run it where that was decided."""
        if card is None:
            return self._on_cpu(call, entry, given)
        if not entry.card(card.name).proven:
            result, complaint = self._trial(card, call, entry, given)
        else:
            result, complaint = self._on_card(card, call, entry, given), ""
            if isinstance(result, Failure):
                failure = result
                # Raises the function's own error where the card was not to blame.
                result = self._on_cpu(call, entry, given)
                complaint = self._failed(card, entry, failure)
        if complaint:
            warnings.warn(f"{self.label}() {complaint}", RuntimeWarning, stacklevel=4)
        return result

    def _note(self, entry: Entry, card: Card | None, verdict: Verdict) -> None:
        with self.history.lock:
            entry.calls += 1
            if verdict.recheck:
                entry.recheck_wait = min(2 * entry.recheck_wait, RECHECK_LONGEST)
                entry.recheck_at = entry.calls + entry.recheck_wait
            elif verdict.cpu is not None and verdict.card is not None:
                for name, times in entry.cards.items():
                    times.on_card = card is not None and card.name == name

    def _failed(self, card: Card, entry: Entry, failure: Failure) -> str:
        """Remember it, and say what it means."""
        why = failure.why
        if failure.oom:
            entry.card(card.name).oom_free = card.free() or 0
            return f"ran out of memory on {card.name} ({why}); this call was computed on the CPU"
        with self.history.lock:
            entry.family.blocked[card.backend] = f"it cannot run in {card.backend}: {why}"
        return f"cannot run in {card.backend} ({why}); such calls run on the CPU from now on"

    # -- on the CPU -------------------------------------------------------------------------------

    def _on_cpu(self, call: Footprint, entry: Entry, given: Arguments) -> Any:
        given = self._for_cpu(call, given)
        result = self._in_numpy(entry, given)
        return result if call.numpy_alone else Home(call.arrays[0])(result)

    def _for_cpu(self, call: Footprint, given: Arguments) -> Arguments:
        return given if call.numpy_alone else given.mapped(lambda x: convert_memory(x, "numpy"))

    def _in_numpy(self, entry: Entry, given: Arguments) -> Any:
        """What the function gives in NumPy, measured."""
        clock = self.machine.clock
        started = clock()
        result = given.call(self.fn)
        seconds = clock() - started
        arrays = results(result)
        with self.history.lock:
            entry.cpu.add(seconds)
            entry.both = any(times.count for times in entry.cards.values())
            entry.out = size(arrays)
            if entry.form is None:
                entry.form = tuple([(dtype_name(x), isinstance(x, np.generic)) for x in arrays])
                entry.family.in_place = entry.family.in_place or aliasing(result, given.arrays())
        return result

    # -- the trial --------------------------------------------------------------------------------

    def _trial(self, card: Card, call: Footprint, entry: Entry, given: Arguments) -> tuple[Any, str]:
        """The first run of a footprint on a card: in NumPy as well, which tells what is right.

        Returns:
            the result, and what there is to complain about, or ``""``.
        """
        resident = not call.numpy_alone and all(card.holds(x) for x in call.arrays)
        in_numpy = self._for_cpu(call, given)
        watch = Watch(self.fn, in_numpy.own, [*in_numpy.batch, *in_numpy.named.values()])
        with _decided():
            expected = self._in_numpy(entry, in_numpy)
        family = entry.family
        with self.history.lock:
            family.in_place = family.in_place or watch.changed()
            if watch.drew():
                family.blocked[""] = watch.drew()
        if "" in family.blocked or (family.in_place and not resident):
            return expected if call.numpy_alone else Home(call.arrays[0])(expected), ""
        found = self._on_card(card, call, entry, given)
        complaint = ""
        if isinstance(found, Failure):
            complaint = self._failed(card, entry, found)
        else:
            why = self._refutation(card, in_numpy, expected, found)
            if why:
                other = f"in {card.backend} {why}"
                with self.history.lock:
                    self.history.refuted[card.backend] = f"its trial failed: {other}"
                complaint = f"is not the same on the card: {other}; it runs on the CPU from now on"
            else:
                entry.card(card.name).proven = True
                if staying.get() or not call.numpy_alone:
                    return found, ""
        return expected if call.numpy_alone else Home(call.arrays[0])(expected), complaint

    def _refutation(self, card: Card, in_numpy: Arguments, expected: Any, found: Any) -> str:
        """How the result differs from NumPy's by more than rounding, or ``""``."""
        rounding = Rounding(in_numpy.arrays())
        why = difference(expected, found, rounding)
        if why or rounding.worst <= EQUAL:
            return why
        # Rounding, or another formula? In the widest precision the one fades, and the other does not.
        wide = in_numpy.mapped(widened)
        try:
            with _decided():
                expected = wide.call(self.fn)
                found = card.run(wide.mapped(card.put).call, self.fn)
        except Exception:  # noqa: BLE001  # an unknown function's, which need not take other dtypes than these
            return ""
        return difference(expected, found, Rounding(wide.arrays()))

    # -- on the card ------------------------------------------------------------------------------

    def _on_card(self, card: Card, call: Footprint, entry: Entry, given: Arguments) -> Any:
        """The result, or a `Failure`."""
        names, count, attempts = tuple(given.named), len(given.batch), 0
        home_on_card = card.holds(call.arrays[0])
        stays = home_on_card or staying.get()
        home = Home(call.arrays[0]) if home_on_card or not stays else None

        def attempt(*values: Any) -> Any:
            nonlocal attempts
            attempts += 1
            part = Arguments(given.own, values[:count], dict(zip(names, values[count:], strict=True)))
            # Only the first attempt is the whole call, with nothing cleaned up before.
            sampled = attempts == 1 and not (
                stays and entry.calls > CALIBRATION and entry.calls % SAMPLE_EVERY
            )
            return self._attempt(card, call, entry, home, sampled, part)

        axis = self.split_axis
        split = axis is not None and any(-len(s) <= axis < len(s) for s in call.shapes)
        try:
            result = run_with_oom_recovery(
                attempt,
                *given.batch,
                *given.named.values(),
                max_retries=1,
                gpu_id=card.device.index,
                split=split,
                split_axis=axis or 0,
            )
        except Exception as error:  # noqa: BLE001  # an unknown function's: the CPU tells whether it is its own
            let_go(error)  # whose variables hold the card's memory
            oom = is_oom_error(error) or isinstance(error, CannotSplitError)
            return Failure(told(error).partition("\n")[0], oom)
        dtypes = [dtype for dtype, _ in entry.form or ()]
        there = [dtype_name(x) for x in results(result)]
        if len(there) == len(dtypes) and there != dtypes and entry.card(card.name).proven:
            return Failure(f"it gives {', '.join(there)} there, and {', '.join(dtypes)} in NumPy")
        return result

    def _attempt(
        self, card: Card, call: Footprint, entry: Entry, home: Home | None, sampled: bool, given: Arguments
    ) -> Any:
        clock = card.clock
        started = clock()
        there = given.mapped(card.put)
        brought = clock()
        with _decided():
            result = card.run(there.call, self.fn)
        computed, out = brought, (0, 0)
        if sampled:  # what stays on the card is waited for, and measured, now and then
            arrays = results(result)
            for x in arrays:
                card.settle(x)
            computed, out = clock(), size(arrays)
        if home is not None:
            result = home(result, [is_scalar for _, is_scalar in entry.form or ()])
        if sampled:
            moving = brought - started + clock() - computed
            with self.history.lock:
                entry.out = out
                expected = self._moves(call, entry, card)[0].card
                times = entry.card(card.name)
                times.add(computed - brought)
                entry.both = entry.cpu.count > 0
                if expected > 0:
                    times.add_transfer(moving / (expected / times.ratio))
        return result
