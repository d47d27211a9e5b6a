"""An operation of one framework's that another one computes: how values cross over, and gradients back."""

from __future__ import annotations

import contextvars
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np

from arraybridge.errors import MemoryConversionError
from arraybridge.frameworks import hostmemory
from arraybridge.frameworks.autodiff import (
    LOST_CALL,
    Body,
    Linear,
    Shape,
    Span,
    draws_again,
    overlap,
    runs_again,
    writes_to_argument,
)
from arraybridge.frameworks.base import Framework
from arraybridge.frameworks.holders import kept_among
from arraybridge.frameworks.tokens import kept_by
from arraybridge.functions.convert import convert
from arraybridge.functions.crossing import Crossing, autodiff_of
from arraybridge.functions.draws import Drawn, again, first
from arraybridge.functions.inside import differentiating, may_be_written_to
from arraybridge.trees import ARRAY, Structure, is_array, kind_of, kinds, source_of

__all__ = ["Bridge", "Pullback", "as_inner", "may_run_again"]

#: Whether a function runs that its caller may run again, and the functions inside of it with it.
_may_repeat: contextvars.ContextVar[bool] = contextvars.ContextVar("may_repeat", default=False)
#: Held while a function that a program of JAX called draws random numbers that have to come again.
_drawing_here = threading.Lock()
#: Seconds to wait for it: whoever waits inside of who holds it goes on, and is at worst refused.
_PATIENCE = 10


class Bridge:
    """An operation of the caller that the callee computes; `Operation` says what each method does."""

    is_pullback = False
    repeats = False
    touches: Sequence[bool] = ()
    #: Of the call that it belongs to, where the caller traced its forward; see `Draws`.
    number = 0

    def __init__(
        self,
        body: Body,
        callee: Framework,
        caller: Framework,
        arrays: Sequence[Any],
        bring: Callable[[Any], Any],
        label: str,
        beside: Sequence[Any] = (),
    ) -> None:
        self.body, self.label = body, label
        #: Arrays of the callee that the body reads besides its arguments, whenever it runs.
        self.beside = beside
        self.common = Crossing(callee, caller, bring, label)
        #: Whether nothing can give it the random numbers that it drew before: its caller runs again.
        self.must_not_draw = runs_again.get()
        self.repeats = self.must_not_draw or _may_repeat.get()
        self.flips = self.common.there.transposes != self.common.here.transposes
        self.wanted = tuple(self.common.here.is_smooth(x) for x in arrays)
        self.smooth: tuple[bool, ...] = ()
        self.read_again: tuple[bool, ...] = ()
        #: The random numbers that the function drew when it ran, to draw them again; None without any.
        self.drawn: Drawn | None = None
        self._empty: list[Any] = []
        self._places: list[int] = []
        self._spec: Structure | None = None

    @property
    def quiet(self) -> bool:
        return self.common.there.random_state() is None

    # -- values -----------------------------------------------------------------------------------

    def run(self, arrays: Sequence[Any]) -> list[Any]:
        leaves, spec = self._drawing(self.body, self.common.entered(arrays))
        return self._results(leaves, spec, arrays, [], self._kept_among(leaves))

    def _kept_among(self, leaves: list[Any]) -> frozenset[int]:
        return frozenset() if self.common.callee.mutable else kept_among(leaves)

    def linearise(self, arrays: Sequence[Any]) -> tuple[list[Any], Linear | None]:
        linear = self._linear(arrays)
        leaves, linear.leaves = linear.leaves, []
        residuals = linear.residuals() if self.common.caller.mutable else None
        spans = [None] if residuals is None else [self.common.there.span(x) for x in residuals]
        return self._results(leaves, linear.spec, arrays, spans, linear.kept), linear

    def recall(self, number: int) -> None:
        """Nothing: only a pullback has a forward whose number this could be."""

    def again(self, arrays: Sequence[Any]) -> Linear:
        self.repeats = True
        run: Callable[[Any], Any] = self._linear
        if self.quiet:
            run = _running_again(run)
        linear: Linear = self.common.then(run, arrays)
        linear.leaves = []
        return linear

    def _linear(self, arrays: Sequence[Any]) -> Linear:
        common = self.common
        entered = common.entered(arrays)
        linear: Linear = self._drawing(common.there.linearise, self.body, entered, self.wanted, self.label)
        return linear

    def _drawing(self, run: Callable[..., Any], *args: Any) -> Any:
        """What ``run`` gives: the first time with whatever random numbers, then with the same ones."""
        there = self.common.there
        token = _may_repeat.set(self.repeats)
        try:
            with there.repeatable(self.label) if self.repeats else nullcontext():
                if self.drawn is not None:
                    return again(there, self.drawn, self.label, run, *args)
                result, self.drawn = first(there, self._watched, run, *args)
                if self.drawn is not None:
                    self.common.draws.remember(self.number, self.drawn)
                return result
        finally:
            _may_repeat.reset(token)

    def _watched(self, run: Callable[..., Any], *args: Any) -> Any:
        if not self.must_not_draw:
            return run(*args)
        return self._drawing_nothing("inside of another function", run, *args)

    def _drawing_nothing(self, where: str, run: Callable[..., Any], *args: Any) -> Any:
        with self.common.there.drawing() as drew:
            result = run(*args)
        if drew:
            raise draws_again(self.common.callee.name, self.label, f" {where}")
        return result

    def _results(
        self,
        leaves: list[Any],
        spec: Any,
        arrays: Sequence[Any],
        spans: Sequence[Span | None],
        kept: frozenset[int],
    ) -> list[Any]:
        common, found = self.common, self._laid_out(leaves, spec)
        owns, is_smooth = common.callee.owns, common.there.is_smooth
        self.smooth = tuple(owns(x) and is_smooth(x) for x in found)
        arguments = [common.here.span(x) for x in arrays]
        self._copy_state(found, arguments)
        if not common.caller.mutable:
            held = [i in kept and may_be_written_to(common.caller) for i in self._places]
            return [common.leave(common.callee.copy(x) if h else x) for x, h in zip(found, held, strict=True)]
        # Where results can be written to, they lie apart from the arguments and from one another.
        known = [*arguments, *map(common.there.span, self.beside)]
        results = common.apart(found, known, kept=[i in kept for i in self._places])
        self.read_again = tuple(overlap(common.here.span(x), spans) for x in results)
        return results

    def _copy_state(self, found: list[Any], arguments: list[Span | None]) -> None:
        """Put copies in place of what the function may write to later, in a call of which nobody tells.

        That is memory which it holds, and which is no argument: its state, as of batch normalisation. Where
        that has a graph, `linearise` did so.
        """
        callee, there = self.common.callee, self.common.there
        for i in range(len(found)):
            x, found[i] = found[i], None  # so that nobody holds it but `x`
            if callee.owns(x):
                state = callee.mutable and not callee.requires_grad(x)
                state = state and not overlap(there.span(x), arguments) and there.is_held(x)
                found[i] = callee.copy(x) if state else x
            else:  # of a third framework, as NumPy: nobody knows who holds it
                owner, held = source_of(x)
                found[i] = owner.copy(held) if owner.mutable and not owner.requires_grad(held) else x

    def _laid_out(self, leaves: list[Any], spec: Any) -> list[Any]:
        """The arrays among the leaves, NumPy's scalars too; `assemble` puts the rest around them again."""
        for i, x in enumerate(leaves):
            if isinstance(x, np.generic) and is_array(x):
                leaves[i] = self.common.here.scalar(x)
        self._places = [i for i, x in enumerate(leaves) if (kinds.get(type(x)) or kind_of(x)) == ARRAY]
        found = [leaves[i] for i in self._places]
        for i in self._places:
            leaves[i] = None
        self._empty, self._spec = leaves, spec
        self.smooth, self.read_again = (True,) * len(found), (False,) * len(found)
        return found

    def assemble(self, results: Sequence[Any]) -> Any:
        leaves = list(self._empty)
        for i, result in zip(self._places, results, strict=True):
            leaves[i] = result
        return leaves if self._spec is None else self._spec.filled(iter(leaves))

    # -- pullbacks --------------------------------------------------------------------------------

    def pull(
        self, linear: Linear, cotangents: Sequence[Any], known: Sequence[Any], noticing: bool = False
    ) -> list[Any]:
        result: list[Any] = self.common.then(self._pull, linear, cotangents, known, noticing)
        return result

    def _pull(
        self, linear: Linear, cotangents: Sequence[Any], known: Sequence[Any], noticing: bool
    ) -> list[Any]:
        common = self.common
        given = [
            None if cotangent is None else common.enter(cotangent)
            for cotangent, smooth in zip(cotangents, self.smooth, strict=True)
            if smooth
        ]
        spans = [common.here.span(x) for x in known]
        spans += [common.here.span(x) for x in cotangents if x is not None]
        spans += [common.there.span(x) for x in linear.residuals() or ()]
        # A rule of the user's may read what the caller differentiates, which counts for the next order.
        if noticing:
            with differentiating(common.caller.name), common.here.noticing(self.label, None, ()):
                gradients = linear.pull(given)
        else:
            gradients = linear.pull(given)
        found = iter(common.apart(gradients, spans, kept=[False] * len(gradients) if linear.fresh else None))
        return [next(found) if wanted else None for wanted in self.wanted]

    def pulled(
        self, linear: Linear | None, present: tuple[bool, ...], takes: tuple[bool, ...] | None = None
    ) -> Pullback:
        return Pullback(self, linear, present, self.wanted if takes is None else takes)

    def unloaded(self, linear: Linear) -> tuple[Any, list[Any]]:
        residuals = linear.residuals()
        if residuals is None:
            return linear, []
        rebuild, common = linear.rebuild(), self.common
        arrays: list[Any] = []
        places: list[int] = []
        for i, x in enumerate(residuals):
            if common.callee.owns(x):
                try:
                    arrays.append(convert(x, common.caller.name))
                except MemoryConversionError:
                    continue  # the caller has no such dtype: keys of jax.random, for one
                places.append(i)
                residuals[i] = None

        def loaded(tensors: Sequence[Any]) -> Linear:
            every = list(residuals)
            for i, tensor in zip(places, tensors, strict=True):
                every[i] = common.bring(tensor)
            return rebuild(every)

        return loaded, arrays

    # -- for callers that trace ---------------------------------------------------------------------

    def foretell(self, shapes: Sequence[Shape], needed: Sequence[bool]) -> list[Shape]:
        there = self.common.there
        for shape, dtype in shapes:
            self.common.callee.supports(dtype, shape)
        wanted = tuple(w and n for w, n in zip(self.wanted, needed, strict=True))
        leaves, spec, found = there.foretell(self.body, shapes, wanted, self.label)
        self.common.draws.checkpointed |= self.common.here.is_checkpointed()
        arrays, given = self._laid_out(leaves, spec), iter(found)
        owns = self.common.callee.owns
        self.smooth = tuple(owns(x) and there.is_smooth(x) for x in arrays)
        return [next(given) if owns(x) else _shape_of(x) for x in arrays]

    def next_call(self) -> int:
        return self.common.draws.next_call()

    def on_host(
        self, arrays: Sequence[np.ndarray], keep: bool, number: int, asked: Sequence[bool] = ()
    ) -> list[np.ndarray]:
        result: list[np.ndarray] = self.common.then(self._on_host, arrays, keep, number, asked)
        return result

    def _on_host(
        self, arrays: Sequence[np.ndarray], keep: bool, number: int, asked: Sequence[bool]
    ) -> list[np.ndarray]:
        leaves = self._of_call(arrays, keep, number, asked)
        return [self.common.to_numpy(leaves[i]) for i in self._places]

    def _of_call(
        self, arrays: Sequence[np.ndarray], keep: bool, number: int, asked: Sequence[bool]
    ) -> list[Any]:
        """The leaves of the results, with the random numbers of the call of this number."""
        common = self.common
        entered = [common.enter(hostmemory.writable_alias(x)) for x in arrays]
        before = list(map(common.there.version, entered))
        repeats = keep or self.is_pullback or common.draws.checkpointed
        token = _may_repeat.set(repeats or _may_repeat.get())
        try:
            # What was not foretold, behind a switch of the user's own, is noticed now.
            with common.there.repeatable(self.label) if repeats else nullcontext():
                found = self._drawn_of(entered, repeats, number, asked)
        finally:
            _may_repeat.reset(token)
        if before != list(map(common.there.version, entered)):
            raise writes_to_argument(common.callee.name, self.label, "x.clone()")
        return found

    def _drawn_of(self, entered: list[Any], repeats: bool, number: int, asked: Sequence[bool]) -> list[Any]:
        common = self.common
        if self.quiet:
            return self._leaves(entered, asked)
        if number == LOST_CALL:
            lost: list[Any] = self._drawing_nothing(
                "in a while_loop, or a function with a rule of its own, under jax.checkpoint",
                self._leaves,
                entered,
                asked,
            )
            return lost
        # Programs that run in several threads do not disturb one another; see `draws.again`.
        alone = repeats and _drawing_here.acquire(timeout=_PATIENCE)
        try:
            drawn = common.draws.of_call(number) or self.drawn
            if drawn is not None:
                leaves: list[Any] = again(common.there, drawn, self.label, self._leaves, entered, asked)
                return leaves
            leaves, drawn = first(common.there, self._watched, self._leaves, entered, asked)
            if drawn is not None:
                common.draws.remember(number, drawn)
            return leaves
        finally:
            if alone:
                _drawing_here.release()

    def _leaves(self, entered: list[Any], _asked: Sequence[bool]) -> list[Any]:
        return self.body(entered)[0]


def _shape_of(x: Any) -> Shape:
    owner, held = source_of(x)
    return owner.shape(held), owner.dtype_name(held)


def _running_again(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def run(arrays: Any) -> Any:
        token = runs_again.set(True)
        try:
            return function(arrays)
        finally:
            runs_again.reset(token)

    return run


def may_run_again() -> bool:
    """Whether what runs now is inside of a function that its caller may run again."""
    return runs_again.get() or _may_repeat.get()


@contextmanager
def as_inner(callee: Framework, label: str) -> Iterator[None]:
    """Around a call that may run again and that nobody differentiates: refuses what `Bridge` does."""
    there = autodiff_of(callee)
    with there.repeatable(label), there.drawing() if runs_again.get() else nullcontext() as drew:
        yield
    if drew:
        raise draws_again(callee.name, label, " inside of another function")


class Pullback(Bridge):
    """The pullback of an operation, as an operation of its arguments and of cotangents."""

    is_pullback = True
    repeats = True

    def __init__(
        self, outer: Bridge, linear: Linear | None, present: tuple[bool, ...], takes: tuple[bool, ...]
    ) -> None:
        self.outer, self.common, self.label, self.flips = outer, outer.common, outer.label, outer.flips
        self.drawn = outer.drawn
        self.must_not_draw = outer.must_not_draw
        self.hint: Linear | None = linear
        self.takes, self.present = takes, present
        self.body = self._pulled()
        #: What this differentiates with regard to, and what its forward does where that is a pullback, too.
        self.touches = [a or b for a, b in itertools.zip_longest(takes, outer.touches, fillvalue=False)]
        self.wanted = (*outer.wanted, *(True for p in present if p))
        self.smooth = self.read_again = ()

    def _pulled(self, *, whole: bool = False) -> Body:
        outer, there = self.outer, self.common.there
        given = outer.body, len(outer.wanted), self.takes, self.present
        # A plug-in need not know `whole` where JAX does not trace.
        body = there.pulled(*given, whole=True) if whole else there.pulled(*given)
        return _running_again(body) if self.quiet else body

    def recall(self, number: int) -> None:
        self.hint = kept_by(number)
        if number < 0:
            self.number, self.drawn = number, self.common.draws.of_call(number)

    def run(self, arrays: Sequence[Any]) -> list[Any]:
        if self.hint is not None:
            return self._hinted(arrays)
        found: list[Any] = self.common.then(self._computed, arrays)
        return found

    def _computed(self, arrays: Sequence[Any]) -> list[Any]:
        leaves, spec = self._drawing(self.body, self.common.entered(arrays))
        found = self._laid_out(leaves, spec)
        return self.common.apart(found, [self.common.here.span(x) for x in arrays])

    def linearise(self, arrays: Sequence[Any]) -> tuple[list[Any], Linear | None]:
        # Its own pullback is found out if somebody asks for it.
        return self.run(arrays), None

    def _hinted(self, arrays: Sequence[Any]) -> list[Any]:
        """The gradients, by what is linearised already."""
        hint, self.hint = self.hint, None
        if hint is None:
            return self.run(arrays)
        cotangents = self._cotangents(arrays)
        smooth = iter(cotangents)
        gradients = self.outer.pull(
            hint, [next(smooth) if s else None for s in self.outer.smooth], arrays, True
        )
        return self._laid_out(self._taken(gradients), None)

    def _cotangents(self, arrays: Sequence[Any]) -> list[Any]:
        """A cotangent, or None, for each smooth result."""
        given = iter(arrays[len(self.outer.wanted) :])
        return [next(given) if p else None for p in self.present]

    def _taken(self, gradients: Sequence[Any]) -> list[Any]:
        return [g for g, takes in zip(gradients, self.takes, strict=True) if takes]

    def foretell(self, shapes: Sequence[Shape], needed: Sequence[bool]) -> list[Shape]:
        count = sum(self.takes)
        self._empty, self._places, self._spec = [None] * count, list(range(count)), None
        self.smooth = self.read_again = (True,) * count
        # What calls this has an array for each gradient, and gives a cotangent for each.
        self.body = self._pulled(whole=True)
        return [shape for shape, takes in zip(shapes, self.takes, strict=False) if takes]

    def _leaves(self, entered: list[Any], asked: Sequence[bool]) -> list[Any]:
        # As `body`, but for that nobody differentiates it again.
        touches = tuple(a or b for a, b in itertools.zip_longest(asked, self.outer.touches, fillvalue=False))

        def run(arrays: list[Any]) -> Linear:
            return self.common.there.linearise(self.outer.body, arrays, touches, self.label)

        linear = (_running_again(run) if self.quiet else run)(entered[: len(asked)])
        return self._spread(linear.pull(self._cotangents(entered)), touches)

    def _spread(self, gradients: Sequence[Any], wanted: Sequence[bool]) -> list[Any]:
        """The gradients that were taken, of those that were wanted."""
        found = iter(gradients)
        return self._taken([next(found) if w else None for w in wanted])

    def _on_host(
        self, arrays: Sequence[np.ndarray], keep: bool, number: int, asked: Sequence[bool]
    ) -> list[np.ndarray]:
        common, linear = self.common, kept_by(number)
        asked = [t and a for t, a in zip(self.takes, asked, strict=True)]
        if linear is None:
            found = self._of_call(arrays, keep, min(number, 0), asked)
        else:
            entered = [common.enter(hostmemory.writable_alias(x)) for x in arrays]
            found = self._spread(linear.pull(self._cotangents(entered)), self.outer.wanted)
        likes = self._taken(arrays[: len(self.takes)])
        return [
            np.zeros_like(like) if x is None or not a else common.to_numpy(x)
            for x, like, a in zip(found, likes, self._taken(asked), strict=True)
        ]
