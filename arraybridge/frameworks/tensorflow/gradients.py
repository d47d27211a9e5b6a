"""TensorFlow's half of gradients across frameworks."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import forwardprop_util, record
from tensorflow.python.framework import ops  # pyright: ignore[reportAttributeAccessIssue]

from arraybridge.errors import GradientError, MemoryConversionError, told
from arraybridge.frameworks.autodiff import (
    Autodiff,
    Body,
    Linear,
    Operation,
    Shape,
    Span,
    captured,
    draws_again,
    hidden,
    no_forward_mode,
    refusals,
)
from arraybridge.frameworks.holders import held_by_one, kept_among
from arraybridge.frameworks.tensorflow.buffers import is_shared
from arraybridge.frameworks.tensorflow.operations import (
    OF_KERAS,
    assigns,
    drawing_among,
    drawing_in,
    runs_python,
    watched_by,
)
from arraybridge.frameworks.within import captured_by, found_within

__all__ = ["TensorflowAutodiff"]

# There is no public question for whether a tape follows a tensor.
_no_tapes = pywrap_tfe.TFE_Py_TapeSetIsEmpty
_followed_how = pywrap_tfe.TFE_Py_TapeSetPossibleGradientTypes  # 0: not at all; forward accumulators count
_is_taped = pywrap_tfe.TFE_Py_TapeSetShouldRecordBackprop

_EAGER = tf.__internal__.EagerTensor
_NOT_FORETOLD = (
    *(TypeError, ValueError, NotImplementedError, AttributeError),
    *(MemoryConversionError, tf.errors.OpError),
)


class TensorflowAutodiff(Autodiff):
    def is_differentiated(self, x: Any) -> bool:
        if isinstance(x, _EAGER):
            return not _no_tapes() and _followed_how([x]) != 0
        if isinstance(x, tf.Variable):
            if _no_tapes():
                return False
            # One that is not trainable is followed where somebody watches it.
            return (x.trainable and _is_continuous(x)) or _followed_how([tf.convert_to_tensor(x)]) != 0
        return isinstance(x, tf.Tensor)  # inside a tf.function

    def stays_in_thread(self, x: Any) -> bool:
        return self.is_differentiated(x) and (
            # A tape that watches what is read sees this reading, and one that does not sees none.
            not isinstance(x, tf.Variable) or _followed_how([tf.convert_to_tensor(x)]) != 0
        )

    def is_smooth(self, x: Any) -> bool:
        return x.dtype.is_floating or x.dtype.is_complex

    def span(self, x: Any) -> Span | None:
        try:
            view = memoryview(x)
            start = np.asarray(view).__array_interface__["data"][0]
        except (TypeError, ValueError, BufferError, RuntimeError, tf.errors.OpError):
            return None  # on a card, or of a dtype that NumPy does not have
        return start, start + view.nbytes

    def conjugate(self, x: Any) -> Any:
        return tf.math.conj(x) if x.dtype.is_complex else x

    def prepare(self, x: Any) -> Any:
        return tf.convert_to_tensor(x) if isinstance(x, tf.Variable) else x

    def refuse_call(self, arrays: Sequence[Any], label: str) -> None:
        for x in arrays:
            if isinstance(x, (_EAGER, tf.Variable)):
                continue
            if not isinstance(x, tf.Tensor):
                raise GradientError(
                    f"{label}(): a {type(x).__name__} is no single array, and gradients cannot flow through"
                    " it; pass its parts, as x.values, or tf.convert_to_tensor(x)",
                    source_type="tensorflow",
                    reason=f"a {type(x).__name__}",
                )
            raise GradientError(
                f"{label}(): a function of another framework cannot become part of a tf.function, in which"
                " tensors have no values; call it outside, or inside by tf.py_function(fn, inp, Tout); for a"
                " jacobian pass experimental_use_pfor=False",
                source_type="tensorflow",
                reason="tf.function",
            )
        if forwardprop_util.pack_tangents([tf.convert_to_tensor(x) for x in arrays]).tangents:
            raise no_forward_mode(label)

    # -- as the caller -----------------------------------------------------------------------------

    def apply(self, operation: Operation, arrays: Sequence[Any]) -> list[Any]:
        operation.wanted = tuple(
            wanted and _followed_how([x]) != 0 for wanted, x in zip(operation.wanted, arrays, strict=True)
        )

        results = _through(*arrays, here=self, operation=operation)
        found = list(results) if isinstance(results, (list, tuple)) else [results]
        if any(operation.wanted) and sum(operation.smooth) > 1:
            found = [_arriving(y) if s else y for y, s in zip(found, operation.smooth, strict=True)]
        return found

    @contextmanager
    def noticing(self, label: str, function: Any, passed: Sequence[Any]) -> Iterator[None]:
        # TensorFlow gives the numbers of a tensor away in silence, to whoever reads them.
        if not _no_tapes() and (
            captured_by(function, _is_followed) is not None or found_within(passed, _is_followed) is not None
        ):
            what = "it captures a tensor that a tape follows, or is passed one inside of no container"
            raise captured("tensorflow", f"{label}(): {what} (its values are tf.stop_gradient(x))")
        # While a function of JAX is traced, so that no program is kept of one that is refused.
        with record.VariableWatcher() as watcher:
            try:
                yield
            finally:  # of a helper inside there may be one, whatever went wrong then
                refusals.count += bool(_smooth_among(watcher.watched_variables()))
        _refuse_read(watcher, label)

    def is_recording(self) -> bool:
        return not _no_tapes()

    def dense(self, cotangent: Any) -> Any:
        return tf.convert_to_tensor(cotangent)  # tf.gather gives slices

    def follows(self, arrays: Sequence[Any]) -> bool:
        return not _no_tapes() and _is_taped(list(arrays))

    # -- as the callee -----------------------------------------------------------------------------

    def linearise(self, body: Body, arrays: list[Any], wanted: tuple[bool, ...], label: str) -> Linear:
        arrays = _distinct(arrays)
        inputs = [x for x, w in zip(arrays, wanted, strict=True) if w]
        with _adding:
            waiting = list(_waiting)
        begin, own = ops.uid(), {id(x) for x in arrays}
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(inputs)
            with _constants(waiting, begin, own) as constants:
                leaves, spec = body(arrays)
                kept = kept_among(leaves)
                outputs = self._outputs(leaves)
            # What does not depend on an argument may be memory that TensorFlow was lent.
            kept |= {i for i, x in enumerate(leaves) if isinstance(x, _EAGER) and not _is_taped([x])}
            hiding = found_within((x for x in leaves if not isinstance(x, tf.Tensor)), _is_followed)
        if hiding is not None:
            raise hidden("tensorflow", label)
        kept |= {i for i, x in enumerate(leaves) if isinstance(x, _EAGER) and i not in kept and is_shared(x)}
        if waiting:  # what comes back as it is goes through no operation
            constants += [x for x in outputs if isinstance(x, _EAGER) and x._id < begin and id(x) not in own]
        linear = _Tape()
        linear.begin, linear.end = begin, ops.uid()
        linear.leaves, linear.spec, linear.inputs, linear.tape = leaves, spec, inputs, tape
        linear.outputs, linear.kept = outputs, kept
        variables = _smooth_among(tape.watched_variables())
        if variables or _is_taped(linear.outputs):
            raise _captured(label, variables)
        _refuse_earlier(waiting, constants, label)
        with _adding:
            _waiting.add(linear)
        return linear

    def _outputs(self, leaves: list[Any]) -> list[Any]:
        # Called where the tape of the function sees it.
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, (tf.Variable, tf.IndexedSlices)):
                leaves[i] = tf.convert_to_tensor(leaf)
        return [x for x in leaves if isinstance(x, tf.Tensor) and self.is_smooth(x)]

    def pulled(
        self, body: Body, count: int, takes: tuple[bool, ...], present: tuple[bool, ...], whole: bool = False
    ) -> Body:
        def pullback(arrays: list[Any]) -> tuple[list[Any], Any]:
            inputs = _distinct(arrays)[:count]
            taken = [x for x, t in zip(inputs, takes, strict=True) if t]
            # What is followed is asked for a further derivative.
            watching = watched_by(_refuse_python) if self.follows(arrays) else nullcontext()
            with watching, tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(taken)
                leaves, _ = body(inputs)
                outputs = [x for x, p in zip(self._outputs(leaves), present, strict=True) if p]
            found = _gradients(tape, outputs, taken, arrays[count:])
            if whole:
                found = [tf.zeros_like(x) if g is None else g for x, g in zip(taken, found, strict=True)]
            return found, None

        return pullback

    @contextmanager
    def repeatable(self, label: str) -> Iterator[None]:
        def watch(op_type: Any, inputs: Any, *_: Any, **__: Any) -> None:
            kind = _name_of(op_type)
            counts = assigns(kind) and inputs[-1].dtype.is_integer
            drawing = OF_KERAS if counts else drawing_in(kind)
            if drawing:
                raise _cannot_draw_again(label, drawing)

        with watched_by(watch):
            yield

    def foretell(
        self, body: Body, arrays: Sequence[Shape], wanted: tuple[bool, ...], label: str
    ) -> tuple[list[Any], Any, list[Shape]]:
        found: list[Any] = []

        def probe(*xs: Any) -> list[Any]:
            leaves, spec = body(list(xs))
            self._outputs(leaves)
            found[:] = [leaves, spec]
            return [x for x in leaves if isinstance(x, tf.Tensor)]

        specs = [tf.TensorSpec(shape, dtype) for shape, dtype in arrays]
        try:
            program = tf.function(probe, autograph=False).get_concrete_function(*specs)
        except _NOT_FORETOLD as error:
            raise _not_foretold(label, told(error)) from error
        drawing = drawing_among(op.node_def for op in program.graph.get_operations())
        if drawing and any(wanted):
            raise _cannot_draw_again(label, drawing)
        variables = _smooth_among(program.graph.trainable_variables)
        if any(wanted) and variables:
            raise _captured(label, variables)
        leaves, spec = found
        shapes: list[Shape] = []
        for x in leaves:
            if isinstance(x, tf.Tensor):
                if not x.shape.is_fully_defined():
                    raise _not_foretold(label, f"a result has the shape {x.shape}")
                shapes.append((tuple(x.shape), x.dtype.name))
        return leaves, spec, shapes

    def version(self, x: Any) -> _Value | None:
        return _Value(x) if isinstance(x, tf.Variable) else None

    def is_held(self, x: Any) -> bool:
        return sys.getrefcount(x) > held_by_one() or is_shared(x)


@tf.custom_gradient  # type: ignore[untyped-decorator]  # once for all: it takes signatures apart
def _through(*xs: Any, here: TensorflowAutodiff, operation: Operation) -> Any:
    """The results of an operation, the only one by itself, and what TensorFlow pulls back with."""
    with record.VariableWatcher() as watcher:  # for what a program of JAX reads by a callback
        results, linear = operation.linearise(xs)
    _refuse_read(watcher, operation.label)
    places = [(y.device, y.shape) for y in results]

    def pull(*cotangents: Any, variables: Sequence[Any] = ()) -> Any:
        with record.VariableWatcher() as watcher:
            gradients = pulled(*cotangents)
        if not _no_tapes():  # which differentiate this in turn
            _refuse_read(watcher, operation.label)
        # Counters are read, too, and TensorFlow asks for their gradients.
        return (gradients, [None] * len(variables)) if variables else gradients

    def pulled(*cotangents: Any) -> list[Any]:
        several = sum(operation.smooth) > 1
        given = [
            _at(c, *place) if s and c is not None and (not several or hasattr(c, _ARRIVED)) else None
            for c, s, place in zip(cotangents, operation.smooth, places, strict=True)
        ]
        here.refuse_call([*xs, *(c for c in given if c is not None)], operation.label)
        return here.pull_back(operation, xs, given, linear, xs)

    return results[0] if len(results) == 1 else results, pull


def _refuse_read(watcher: Any, label: str) -> None:
    if _smooth_among(watcher.watched_variables()):
        what = "it reads a trainable tf.Variable, of the framework that differentiates"
        raise captured("tensorflow", f"{label}(): {what}")


class _Value:
    """What a variable holds now, to be compared with later: nobody counts what is written to it."""

    def __init__(self, variable: Any) -> None:
        with tf.init_scope():  # for a value also while a graph is made, and beside the tapes
            self.value = variable.read_value()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Value) or self.value.shape != other.value.shape:
            return False
        return self.value.numpy().tobytes() == other.value.numpy().tobytes()

    __hash__ = None  # type: ignore[assignment]


def _refuse_python(op_type: Any, *_: Any, **__: Any) -> None:
    if runs_python(_name_of(op_type)):
        raise GradientError(  # TensorFlow gives None, or an error; of a sum, the other part
            "a function of TensorFlow runs tf.py_function, which TensorFlow can derive only once; use"
            " operations of TensorFlow, or give the function a rule of its own by tf.custom_gradient",
            target_type="tensorflow",
            reason="no second derivative of tf.py_function",
        )


def _name_of(op_type: Any) -> str:
    return op_type.decode() if isinstance(op_type, bytes) else str(op_type)


def _cannot_draw_again(label: str, kind: str) -> GradientError:
    instead = (
        "use tf.random.stateless_…, or keras.random.… with a number as seed, and pass another one each time"
    )
    return draws_again("tensorflow", label, f" ({kind})", instead)


def _captured(label: str, variables: Sequence[Any]) -> GradientError:
    what = f"the trainable tf.Variable {variables[0].name}" if variables else "a tensor that a tape follows"
    return captured("tensorflow", f"{label}(): it depends on {what}")


def _not_foretold(label: str, why: str) -> GradientError:
    return GradientError(
        f"{label}(): inside jax.jit its shapes have to be foretold, and that failed: {why}. Shapes and"
        " branches that depend on values, .numpy() and calls of further frameworks cannot be foretold; call"
        " the function outside of jax.jit",
        target_type="tensorflow",
        reason="shapes cannot be foretold",
    )


def _at(cotangent: Any, place: str, shape: Any) -> Any:
    """A cotangent where its result is, of its shape; TensorFlow's own operations take others, too."""
    cotangent = tf.convert_to_tensor(cotangent)
    if cotangent.shape != shape:
        cotangent = tf.broadcast_to(cotangent, shape)
    if cotangent.device in (place, ""):
        return cotangent
    with tf.device(place):
        return tf.identity(cotangent)


@tf.custom_gradient  # type: ignore[untyped-decorator]  # tf is Any here
def _arriving(y: Any) -> Any:
    """One of several results, whose cotangent is marked.

    Where a result is not used, a tape hands over zeros in its place; these are not marked. Zeros times an
    infinite derivative would be no number.
    """

    def pull(cotangent: Any) -> Any:
        found = tf.identity(cotangent)
        setattr(found, _ARRIVED, True)
        return found

    return y, pull


_ARRIVED = "_arraybridge_arrived"


def _distinct(arrays: list[Any]) -> list[Any]:
    """The same values as tensors of which no two are one object, which a tape could not tell apart."""
    seen: set[int] = set()
    found = []
    for x in arrays:
        new = tf.identity(x) if id(x) in seen else x
        seen.add(id(new))
        found.append(new)
    return found


def _gradients(tape: Any, outputs: list[Any], inputs: list[Any], cotangents: list[Any]) -> list[Any]:
    pairs = [(y, c) for y, c in zip(outputs, cotangents, strict=True) if c is not None]
    if not pairs or not inputs:
        return [None] * len(inputs)
    found = tape.gradient([y for y, _ in pairs], inputs, output_gradients=[c for _, c in pairs])
    return [None if g is None else tf.convert_to_tensor(g) for g in found]


#: The tapes of functions whose backward may still come.
_waiting: weakref.WeakSet[_Tape] = weakref.WeakSet()
#: Operations that need no gradient of what they are given, named by either.
_READING_VALUES = frozenset(
    name for kind in ("StopGradient", "ZerosLike", "OnesLike", "Shape") for name in (kind, kind.encode())
)
#: Held by who asks them: a tape is entered by one thread at a time.
_asking = threading.Lock()


#: Held while tapes are counted or added.
_adding = threading.Lock()


@contextmanager
def _constants(waiting: list[_Tape], begin: int, own: set[int]) -> Iterator[list[Any]]:
    """The tensors from before that something is computed of in here; none where no tape waits."""
    found: dict[int, Any] = {}

    def watch(kind: Any, given: Any, _: Any, made: Any, *__: Any, graph: Any = None, **___: Any) -> None:
        # What is traced is for a program, which is one operation here; through integers no gradient comes.
        if graph is not None or kind in _READING_VALUES or not any(map(_is_continuous, made or ())):
            return
        found.update(
            (x._id, x) for x in given if isinstance(x, _EAGER) and x._id < begin and id(x) not in own
        )

    constants: list[Any] = []
    if not waiting:
        yield constants
        return
    with watched_by(watch):
        yield constants
    constants += found.values()


def _is_followed(x: Any) -> bool:
    """Whether it is a tensor of numbers that a tape follows; variables are seen when they are read."""
    # A tf.experimental.Optional, and others, have theirs in a variant.
    return issubclass(type(x), _EAGER) and _may_hold_numbers(x.dtype) and _followed_how([x]) != 0


def _may_hold_numbers(dtype: Any) -> bool:
    return bool(dtype.is_floating or dtype.is_complex or dtype == tf.variant)


def _smooth_among(variables: Sequence[Any]) -> list[Any]:
    """Those that could get a gradient; a counter is trainable, too, if nobody says otherwise."""
    return [v for v in variables if v.dtype.is_floating or v.dtype.is_complex]


def _is_continuous(x: Any) -> bool:
    """Whether gradients come through its elements; a list of tensors, a variant, may have such."""
    return bool(x.dtype.is_floating or x.dtype.is_complex or x.dtype in (tf.variant, tf.resource))


def _refuse_earlier(waiting: list[_Tape], constants: list[Any], label: str) -> None:
    """Refuse what an earlier call computed of what is differentiated, which is a constant to a new tape."""
    for linear in waiting if constants else ():
        own = {id(x) for x in linear.inputs}
        made = [x for x in constants if linear.begin <= x._id < linear.end or id(x) in own]
        if not made:
            continue
        with _asking, linear.tape:
            followed = [x for x in made if pywrap_tfe.TFE_Py_TapeSetShouldRecordBackprop([x])]
        if followed and _has_gradient(linear, followed):
            what = "it reads a tensor that an earlier call computed of what is differentiated"
            raise captured("tensorflow", f"{label}(): {what} (its values are tf.stop_gradient(x))")


def _has_gradient(linear: _Tape, tensors: list[Any]) -> bool:
    """Whether there is any: a tape follows zeros and ones of the shape of something, too."""
    try:
        return any(g is not None for g in linear.tape.gradient(tensors, linear.inputs))
    except Exception:  # noqa: BLE001  # whatever a rule of the user's raises, there is a rule
        return True


class _Tape(Linear):
    """A function of TensorFlow at a point: its tape."""

    inputs: list[Any]
    outputs: list[Any]
    tape: Any
    #: Numbers of the first tensor that was made while it was open, and of the first one after it.
    begin: int
    end: int

    def pull(self, cotangents: list[Any]) -> list[Any]:
        return _gradients(self.tape, self.outputs, self.inputs, cotangents)


AUTODIFF = TensorflowAutodiff()
