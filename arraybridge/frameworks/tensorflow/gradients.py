"""Gradients across frameworks, for TensorFlow code that calls other frameworks and vice versa."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python import pywrap_tfe

from arraybridge.errors import GradientError, MemoryConversionError
from arraybridge.interface import autodiff

# A private name: no public function returns whether a tape watches a tensor (TensorFlow 2.21, no issue
# found). 0 means that none does.
_tapes_following = pywrap_tfe.TFE_Py_TapeSetPossibleGradientTypes


class TensorflowAutodiff(autodiff.Autodiff):
    """TensorFlow's gradients, computed by ``tf.GradientTape``."""

    # A tape also watches a variable that is only read with `numpy()`.
    constant_advice = "compute w.numpy() outside of the function, and use its result"
    argument_advice = 'tf.Variable(to_tensorflow(w, grad="detach"))'

    def is_tracked(self, x: Any) -> bool:
        if not isinstance(x, (tf.Tensor, tf.Variable)):
            return False  # ragged and sparse tensors cannot be converted
        return _follows([_tensor(x)])

    def prepare(self, x: Any) -> Any:
        return _tensor(x)

    def plain_value(self, x: Any) -> Any:
        # Unwrap objects such as keras.Variable, because a tape would watch the tensor in them.
        return tf.convert_to_tensor(x) if hasattr(x, "__tf_tensor__") else x

    def span(self, x: Any) -> autodiff.Extent:
        try:
            view = memoryview(x)
            start = np.asarray(view).__array_interface__["data"][0]
        except (TypeError, ValueError, BufferError, RuntimeError, tf.errors.OpError):
            return 0, 0  # the tensor is on a GPU, or NumPy does not support its dtype
        return start, start + view.nbytes

    def apply(self, operation: autodiff.Operation, arrays: list[Any]) -> list[Any]:
        if not tf.executing_eagerly():
            raise GradientError(
                "a function of another framework cannot become part of a tf.function, in which tensors have"
                " no values.",
                reason="tf.function",
                advice="Call it outside of tf.function, or inside with tf.py_function(fn, inp, Tout). For a"
                " Jacobian, pass experimental_use_pfor=False.",
                place=f"{operation.label}()",
            )
        # Variables are replaced with their values. For ragged and sparse tensors, the later conversion to
        # the framework of the called function raises an error.
        tensors = [_tensor(x) if isinstance(x, tf.Variable) else x for x in arrays]
        results = _apply(*tensors, operation=operation)
        return list(results) if isinstance(results, (list, tuple)) else [results]

    def linearize(
        self, body: autodiff.Body, arrays: list[Any], active: Sequence[bool], label: str
    ) -> tuple[list[Any], autodiff.Linear]:
        # A tape cannot distinguish two arguments that are the same object.
        if len(set(map(id, arrays))) < len(arrays):
            arrays = [tf.identity(x) for x in arrays]
        inputs = autodiff.select(arrays, active)
        inner = _follows(arrays)
        with tf.GradientTape(persistent=True) as tape:  # a backward pass may retain the graph
            tape.watch(inputs)
            results = [_tensor(y) for y in body(arrays)]
        captured = _describe_captured(tape.watched_variables())
        if not inner and _follows(results):
            captured = "a tensor that a tape watches"

        def pull(cotangents: list[Any]) -> list[Any]:
            pairs = [(y, c) for y, c in zip(results, cotangents, strict=True) if c is not None]
            gradients = tape.gradient(
                [y for y, _ in pairs],
                inputs,
                output_gradients=[c for _, c in pairs],
                unconnected_gradients="zero",
            )
            # Gradients are copied, because a tf.custom_gradient may keep a reference to its result. A second
            # tape would show which gradients depend on a cotangent, but needs 2 to 3 times the memory. The
            # gradients are copied one at a time, so that at most one of them is in memory twice.
            return [_copy(_tensor(gradients.pop(0))) for _ in range(len(gradients))]

        return results, autodiff.Linear(pull, captured)

    def predict(
        self, body: autodiff.Body, shapes: list[autodiff.Shape], label: str
    ) -> tuple[list[autodiff.Shape], str, bool]:
        try:
            program = _trace(body, list(itertools.starmap(tf.TensorSpec, shapes)))
        except _NOT_TRACED as error:
            raise autodiff.unpredictable_shapes_error(label, error) from error
        if not all(y.shape.is_fully_defined() for y in program.outputs):
            raise autodiff.unpredictable_shapes_error(label, "the shape of a result depends on values")
        _check_draws_nothing(program, label)
        results = [(tuple(y.shape), y.dtype.name) for y in program.outputs]
        return results, _describe_captured(program.trainable_variables), False

    def check_repeatable(self, body: autodiff.Body, arrays: list[Any], label: str) -> None:
        if tf.executing_eagerly():  # otherwise, `predict` traces and checks the whole program
            try:
                program = _trace(body, [tf.TensorSpec(x.shape, x.dtype) for x in arrays])
            except _NOT_TRACED:  # without a program, there is nothing to check
                return
            _check_draws_nothing(program, label)


#: Errors raised by functions that cannot run without values.
_NOT_TRACED = (
    NotImplementedError,
    AttributeError,
    TypeError,
    ValueError,
    MemoryConversionError,
    tf.errors.OpError,
)


def _trace(body: autodiff.Body, specs: list[tf.TensorSpec]) -> Any:
    """Trace ``body`` for arguments with these shapes and dtypes, and return the concrete function."""

    def results(*arrays: Any) -> list[Any]:
        return [_tensor(y) for y in body(list(arrays))]

    return tf.function(results, autograph=False).get_concrete_function(*specs)


def _follows(tensors: list[Any]) -> bool:
    return not tf.executing_eagerly() or _tapes_following(tensors) != 0


def _tensor(x: Any) -> tf.Tensor:
    """Return ``x``, which may be a tensor, a variable or an ``IndexedSlices`` gradient, as a tensor."""
    # tf.convert_to_tensor is slow for tensors.
    return x if isinstance(x, tf.Tensor) else tf.convert_to_tensor(x)


def _copy(x: tf.Tensor) -> tf.Tensor:
    """Return a copy of a tensor, or the tensor itself if it may be differentiated again."""
    # tf.identity shares memory (tensorflow/tensorflow#11186), and DeepCopy has no derivative.
    return x if _follows([x]) else tf.raw_ops.DeepCopy(x=x)


def _broadcast(x: tf.Tensor, shape: tf.TensorShape) -> tf.Tensor:
    """Broadcast a cotangent to the shape of the result, because ``output_gradients=`` accepts scalars."""
    return x if x.shape == shape else tf.broadcast_to(x, shape)


def _describe_captured(variables: Sequence[Any]) -> str:
    """Return a description of the first differentiable variable; ``""`` if there is none."""
    names = [v.name for v in variables if AUTODIFF.is_differentiable(v)]
    if not names:
        return ""
    return f"the trainable tf.Variable {names[0]}"


def _check_draws_nothing(program: Any, label: str) -> None:
    """Raise an error if a traced function draws random numbers without a seed among its arguments."""
    if any("Random" in o.type and o.op_def.is_stateful for o in program.graph.get_operations()):
        raise GradientError(
            "it draws random numbers, and would draw different ones when it runs again (inside jax.jit, or"
            " for a second derivative).",
            reason="random numbers",
            advice="Pass the random numbers as an argument, or pass a seed for tf.random.stateless_*.",
            place=f"{label}()",
        )


#: TensorFlow reads the signature at each call (2.21, _eager_mode_decorator in python/ops/custom_gradient.py).
#: Computing it each time would take a sixth of the call's time.
_SIGNATURE = inspect.signature(lambda *cotangents, variables=(): None)  # noqa: ARG005


@tf.custom_gradient  # type: ignore[untyped-decorator]  # tf is Any here
def _apply(*arrays: Any, operation: autodiff.Operation) -> Any:
    """Return the results of an operation of another framework, and its gradient function."""
    results, linear = operation.linearize(arrays)
    shapes = [y.shape if AUTODIFF.is_differentiable(y) else None for y in results]

    def backward(*cotangents: Any, variables: Sequence[Any] = ()) -> Any:
        pairs = zip(cotangents, shapes, strict=True)
        dense = [None if shape is None else _broadcast(_tensor(c), shape) for c, shape in pairs]
        gradients = operation.gradients(arrays, dense, linear)
        return (gradients, [None] * len(variables)) if variables else gradients

    backward.__signature__ = _SIGNATURE  # type: ignore[attr-defined]
    return (results[0] if len(results) == 1 else results), backward


AUTODIFF = TensorflowAutodiff()
