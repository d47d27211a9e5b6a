"""Variables of Keras and Flax are sources: their value is converted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import arraybridge as ab
from tests.helpers import output_of, require

torch = require("torch")
VALUES = [1.0, 2.0, 3.0]


def keras_variable() -> Any:
    require("tensorflow")
    keras = pytest.importorskip("keras", reason="Keras is not installed")
    return keras.Variable(np.array(VALUES, np.float32))


def flax_variable(cls: str) -> Any:
    jnp = require("jax").numpy
    nnx = pytest.importorskip("flax.nnx", reason="Flax is not installed")
    return getattr(nnx, cls)(jnp.array(VALUES))


MAKERS = {
    "keras": keras_variable,
    "nnx.Param": lambda: flax_variable("Param"),
    "nnx.Variable": lambda: flax_variable("Variable"),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_the_value_of_a_variable_is_converted(kind: str) -> None:
    x = MAKERS[kind]()
    framework = ab.detect_memory_type(x)
    if kind != "keras":
        assert framework == "jax"
    for result in (ab.to_torch(x), ab.convert_tree({"a": [x]}, "torch")["a"][0]):
        assert (type(result), result.tolist()) == (torch.Tensor, VALUES)
    route = ab.explain(x, "torch")
    assert (route.source, route.nbytes) == (framework, 12)
    with ab.trace() as log:
        ab.to_torch(x)
    assert log.records == [route]
    assert str(ab.device_of(x)) == "cpu"
    assert ab.to_numpy(x, copy=True).tolist() == VALUES

    @ab.torch(output_type="input")
    def doubled(tensor: Any) -> Any:
        assert isinstance(tensor, torch.Tensor)
        return tensor * 2

    result = doubled(x)
    assert ab.detect_memory_type(result) == framework
    assert ab.to_numpy(result).tolist() == [2.0, 4.0, 6.0]
    assert ab.to_numpy(x).tolist() == VALUES


def test_a_variable_of_flax_without_an_array_is_left_alone() -> None:
    nnx = pytest.importorskip("flax.nnx", reason="Flax is not installed")
    x = nnx.Variable("text")
    assert ab.convert_tree([x], "torch")[0] is x
    with pytest.raises(ab.UnknownArrayError):
        ab.to_torch(x)


def test_a_variable_of_keras_over_jax() -> None:
    pytest.importorskip("keras", reason="Keras is not installed")
    require("jax")
    lines = (
        "import sys",
        # Keras, which TensorFlow has imported, reads the backend when it is imported.
        "for name in [*sys.modules]: name.partition('.')[0] == 'keras' and sys.modules.pop(name)",
        "import numpy as np, keras, arraybridge as ab",
        "x = keras.Variable(np.ones(3, 'f4'))",
        "print(ab.detect_memory_type(x), ab.to_torch(x).tolist())",
    )
    printed = output_of(*lines, env={"KERAS_BACKEND": "jax"}, imported=True)
    assert printed.split("\n")[-1] == "jax [1.0, 1.0, 1.0]"


def test_parameters_of_torch_and_variables_of_tensorflow() -> None:
    tf = require("tensorflow")
    assert ab.detect_memory_type(torch.nn.Parameter(torch.ones(2))) == "torch"
    assert ab.to_torch(tf.Variable([1.0, 2.0])).tolist() == [1.0, 2.0]
