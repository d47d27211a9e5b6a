"""The decorators on every kind of function, and the attributes of decorated functions."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import MemoryType, UnknownFrameworkError, memory_types
from tests.decorators.cases import IMAGE, identity
from tests.helpers import require


def test_name_docstring_signature_and_hints_are_preserved() -> None:
    def segment(image: np.ndarray, sigma: float = 1.0, *, mask: Any = None) -> np.ndarray:
        """Finds the cells."""
        return image

    wrapped = arraybridge.torch(gpu_id=0)(segment)
    assert wrapped.__name__ == "segment"
    assert wrapped.__qualname__ == segment.__qualname__
    assert wrapped.__module__ == __name__
    assert wrapped.__doc__ == "Finds the cells."
    assert wrapped.__wrapped__ is segment
    assert inspect.signature(wrapped) == inspect.signature(segment)
    assert typing.get_type_hints(wrapped) == typing.get_type_hints(segment)
    assert inspect.isfunction(wrapped)


def test_memory_types_are_readable() -> None:
    def read(f: Any) -> tuple[str, str, str]:
        return f.input_memory_type, f.output_memory_type, f.execution_memory_type

    assert read(arraybridge.torch(identity)) == ("torch", "torch", "torch")
    both = arraybridge.jax(input_type=MemoryType.NUMPY, output_type=MemoryType.NUMPY, gpu_id=1)(identity)
    assert read(both) == ("numpy", "numpy", "jax")
    assert type(both.input_memory_type) is str
    assert (both.gpu_id, both.device) == (1, None)
    assert arraybridge.jax(device="cpu:1")(identity).device == "cpu:1"


def test_memory_types_declares_without_converting() -> None:
    torch = require("torch")

    @memory_types("numpy", MemoryType.TORCH, contract=lambda r: r is not None)
    def f(x: Any) -> Any:
        """Says."""
        return x

    assert (f.input_memory_type, f.output_memory_type) == ("numpy", "torch")
    assert f.__doc__ == "Says."
    tensor = torch.ones(2)
    assert f(tensor) is tensor
    assert f(IMAGE) is IMAGE
    with pytest.raises(ValueError, match="contract"):
        f(None)
    with pytest.raises(UnknownFrameworkError, match="torch"):
        memory_types("numpy", "troch")
    with pytest.raises(TypeError, match="contract"):
        memory_types("numpy", "torch", contract="yes")  # type: ignore[arg-type]
    for decorator, name in ((arraybridge.torch(), "torch"), (arraybridge.gpu(), "gpu")):
        with pytest.raises(
            TypeError, match=rf"^@{name} expected a function, got nothing\. Write @{name} or "
        ):
            decorator()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="expected a function, got int"):
        memory_types("numpy", "torch")(3)  # type: ignore[call-overload]


def weighted(self: Any, x: Any) -> Any:
    return x * self.weight


class Model:
    weight = 2.0
    bare = arraybridge.torch(weighted)
    called = arraybridge.torch(output_type="input")(weighted)
    class_inside = arraybridge.torch(output_type="numpy")(classmethod(weighted))
    class_outside = classmethod(arraybridge.torch(output_type="numpy")(weighted))
    static_inside = arraybridge.torch(output_type="numpy")(staticmethod(lambda x: x * 3))
    static_outside = staticmethod(arraybridge.torch(output_type="numpy")(lambda x: x * 3))
    __call__ = arraybridge.torch(output_type="numpy")(weighted)


def test_all_kinds_of_methods() -> None:
    torch = require("torch")
    x, model = np.ones(1), Model()
    assert isinstance(model.bare(x), torch.Tensor)
    assert Model.bare(model, x).tolist() == [2.0]
    assert model.called.execution_memory_type == "torch"
    for run in (model.called, model.class_inside, Model.class_inside, Model.class_outside, model):
        assert run(x).tolist() == [2.0]
    for run in (model.static_inside, Model.static_inside, model.static_outside):
        assert run(x).tolist() == [3.0]


def test_generators_raise_and_coroutines_raise_with_recovery() -> None:
    def generator(x: Any) -> Iterator[Any]:
        yield x

    async def asynchronous(x: Any) -> AsyncIterator[Any]:
        yield x

    async def coroutine(x: Any) -> Any:
        return x

    for fn in (generator, asynchronous):
        for refusing in (arraybridge.numpy, arraybridge.torch(gpu_id=0), memory_types("numpy", "numpy")):
            with pytest.raises(ValueError, match=f"{fn.__name__} is a generator"):
                refusing(fn)
    for option in ({"oom_recovery": True}, {"slice_by_slice": True}):
        with pytest.raises(ValueError, match="is a coroutine"):
            arraybridge.numpy(**option)(coroutine)


def test_partials_and_callable_objects() -> None:
    torch = require("torch")

    def scale(x: Any, factor: float) -> Any:
        """Scales."""
        return x * factor

    by_three = arraybridge.torch(output_type="numpy")(functools.partial(scale, factor=3))
    assert by_three(np.ones(1)).tolist() == [3.0]
    assert by_three.__name__ == "scale"
    assert by_three.__doc__ == "Scales."
    assert list(inspect.signature(by_three).parameters) == ["x", "factor"]

    layer = torch.nn.Linear(3, 1, bias=False)
    run = arraybridge.torch(output_type="numpy", grad="detach")(layer)
    assert run(IMAGE).shape == (2, 1)
    assert run.__name__ == "Linear"
    assert run.__wrapped__ is layer
    bound = arraybridge.torch(output_type="numpy")(Model().bare.__wrapped__.__get__(Model()))
    assert bound(np.ones(1)).tolist() == [2.0]
    assert arraybridge.numpy(len)([1, 2]) == 2
    assert arraybridge.numpy(np.add)(IMAGE, IMAGE).tolist() == (IMAGE * 2).tolist()


@pytest.mark.parametrize(
    ("what", "advice"),
    [
        (3, "options by keyword"),
        (None, "expected a function, got NoneType"),
        (int, "Decorate the methods of the class"),
        (property(identity), "Put @property above"),
    ],
)
def test_non_callables_raise(what: Any, advice: str) -> None:
    for decorate in (arraybridge.torch, arraybridge.torch(), memory_types("numpy", "torch")):
        with pytest.raises(TypeError, match=advice):
            decorate(what)
    with pytest.raises(TypeError, match="not both"):
        arraybridge.torch(identity, gpu_id=0)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="one function"):
        arraybridge.torch(identity, identity)  # type: ignore[call-overload]
    with pytest.raises(AttributeError, match=r"arraybridge\.torch is a decorator.*torch\.zeros"):
        arraybridge.torch.zeros  # type: ignore[attr-defined]  # noqa: B018


def test_gpu_lists_its_options_for_an_unknown_one():
    with pytest.raises(TypeError, match=r"no option 'device'.*gpu_id=0"):
        arraybridge.gpu(device=0)  # type: ignore[call-overload]
