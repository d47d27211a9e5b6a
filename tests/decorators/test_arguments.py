"""Conversion of arguments to the framework of a decorated function."""

from __future__ import annotations

import asyncio
import functools
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, make_dataclass
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge import (
    ArrayNotSupportedError,
    DtypeNotSupportedError,
    SourceMismatchError,
    UnknownArrayError,
    convert_tree,
    device_of,
    fixed,
    split_and_retry,
)
from arraybridge.testing import inject_oom
from tests.decorators.cases import FRAMEWORKS, HOST, IMAGE, decorator, framework_of, identity, image, values
from tests.helpers import require


@pytest.mark.parametrize("output", ["its own", "input", "numpy", "jax"])
@pytest.mark.parametrize("target", FRAMEWORKS)
@pytest.mark.parametrize("source", FRAMEWORKS)
def test_arrays_are_converted_as_requested(source: str, target: str, output: str) -> None:
    require(source)
    require(target)
    require("jax")
    seen = []

    def double(x: Any) -> Any:
        seen.append(framework_of(x))
        return x + x

    options = {} if output == "its own" else {"output_type": output}
    brought = image(source)
    result = decorator(target)(**options)(double)(brought)
    assert seen == [target]
    assert framework_of(result) == {"its own": target, "input": source}.get(output, output)
    assert values(result) == [[0.0, 2.0, 4.0], [6.0, 8.0, 10.0]]
    if output == "input":
        assert device_of(result) == device_of(brought)


def test_native_arrays_pass_through_unchanged() -> None:
    torch = require("torch")
    seen = []
    tensor = torch.ones(3)

    @arraybridge.torch
    def keep(x: Any) -> Any:
        seen.append(x)
        return x

    assert keep(tensor) is tensor
    assert seen[0] is tensor
    shared = keep(IMAGE)
    assert shared.data_ptr() == IMAGE.__array_interface__["data"][0]


def test_containers_are_traversed_and_not_modified() -> None:
    torch = require("torch")
    a = np.ones(1)
    tree = {"z": a, "a": [a, 1]}
    seen = arraybridge.torch(lambda x, *, y: (x, y["a"][0]))(tree["z"], y=tree)
    assert [type(x) for x in seen] == [torch.Tensor] * 2
    assert tree["z"] is tree["a"][0] is a
    log: list[str] = []
    arraybridge.torch(lambda x, into: into.append("seen"))(a, log)
    assert log == ["seen"], "a container without arrays must be passed unchanged"


def test_non_arrays_pass_unchanged() -> None:
    torch = require("torch")
    model = torch.nn.Linear(2, 2)
    plain = (1, 2.5, 1j, "text", b"b", None, True, [])
    for value in (*plain, print, identity, model, np.ndarray, np.float32(3)):
        assert arraybridge.numpy(identity)(value) is value
        assert arraybridge.torch(lambda *, x: x)(x=value) is value or type(value) is np.float32


def torch_model() -> Any:
    return require("torch").nn.Linear(2, 2)


def equinox_model() -> Any:
    jax = require("jax")
    equinox = pytest.importorskip("equinox", reason="Equinox is not installed")
    return equinox.nn.Linear(2, 2, key=jax.random.key(0))


def flax_model() -> Any:
    require("jax")
    nnx = pytest.importorskip("flax.nnx", reason="Flax is not installed")
    return nnx.Linear(2, 2, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("make", [torch_model, equinox_model, flax_model])
def test_models_pass_unchanged_and_never_provide_the_first_array(make: Callable[[], Any]) -> None:
    torch = require("torch")
    model = make()

    @arraybridge.torch(output_type="input")
    def double(given: Any, x: Any) -> Any:
        assert given is model
        assert isinstance(x, torch.Tensor)
        return x * 2

    result = double(model, np.ones(2))
    assert type(result) is np.ndarray
    assert result.tolist() == [2.0, 2.0]
    assert arraybridge.convert_tree({"model": model}, "numpy", copy=True)["model"] is model
    assert arraybridge.numpy(input_type="numpy", strict=True)(lambda given, x: given)(model, IMAGE) is model


def second_device(name: str) -> tuple[str, Any]:
    """Return a second host device if there is one, as a device string and as the framework's object."""
    require(name)
    words = "cpu" if name == "torch" else "cpu:1"
    if arraybridge.Device.parse(words) not in arraybridge.framework(name).devices.available():
        pytest.skip(f"{name} has no {words} here")
    return words, arraybridge.Device.parse(words).native(name)


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("name", ["jax", "tensorflow", "torch"])
def test_device_applies_to_all_arrays_or_to_new_ones(name: str, native: bool) -> None:
    words, own = second_device(name)
    module = require(name)
    make = module.numpy.zeros if name == "jax" else module.zeros
    run = decorator(name)(device=own if native else words)(
        lambda *xs, **named: [*xs, *named.values()] or [make(3)]
    )
    for _ in range(2):
        assert [device_of(x) for x in run(IMAGE, y=image(name))] == [words] * 2
        assert [device_of(x) for x in run()] == [words]
    assert run.device == words
    assert device_of(next(arraybridge.device_map(functools.partial(run), [IMAGE]))[0]) == words


def test_strict_rejects_arrays_of_undeclared_types() -> None:
    torch = require("torch")

    @arraybridge.torch(input_type="numpy", strict=True, output_type="numpy")
    def double(picture: Any) -> Any:
        return picture * 2

    for _ in range(3):
        arraybridge.torch(identity)(torch.ones(2))  # adds a plan to the cache
        assert double(np.ones(2)).tolist() == [2.0, 2.0]
        with pytest.raises(SourceMismatchError, match=r"double\(\), argument 'picture'.*numpy.*torch"):
            double(torch.ones(2))
        with pytest.raises(SourceMismatchError, match=r"argument 'picture'\['a'\]\[0\]: "):
            double(picture={"a": [torch.ones(2)]})
    assert arraybridge.torch(input_type="numpy")(identity)(torch.ones(2)).tolist() == [1.0, 1.0]


class Table:
    """An object like those of pandas, xarray and h5py, which can be converted to an array without being
    one.
    """

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return np.ones((2, 2), dtype)


CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "alone": ((Table(),), {}, "argument 'x'"),
    "with others": ((1, Table()), {}, r"argument \*rest\[0\]"),
    "by keyword": ((1,), {"image": Table()}, "argument 'image'"),
    "in a container": (({"a": [Table()]},), {}, "argument 'x'"),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_tables_raise_without_an_array_and_always_with_strict(name: str, call: str) -> None:
    require(name)
    args, kwargs, where = CALLS[call]
    ran: list[Any] = []
    f = decorator(name)(lambda x, *rest, **named: ran.append(x))
    with pytest.raises(
        UnknownArrayError, match=rf"{where}: .*Table: it is not an array\. .*np\.asarray\(x\)"
    ):
        f(*args, **kwargs)
    assert not ran
    assert arraybridge.numpy(identity)(IMAGE, *args, **kwargs) is IMAGE
    with pytest.raises(UnknownArrayError, match="is not an array"):
        arraybridge.numpy(input_type="numpy", strict=True)(identity)(IMAGE, *args, **kwargs)


class SimpleObject:
    def __init__(self, weight: Any) -> None:
        self.weight = weight


class Named(Mapping[str, Any]):
    """A mapping that cannot be rebuilt from a dict."""

    def __init__(self, name: str, items: dict[str, Any]) -> None:
        self.name, self.items_by_name = name, items

    def __getitem__(self, key: str) -> Any:
        return self.items_by_name[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.items_by_name)

    def __len__(self) -> int:
        return len(self.items_by_name)


class Callee(Named):
    def __call__(self) -> None:
        return None


class Broken(Named):
    def __getitem__(self, key: str) -> Any:
        raise LookupError(key)


class Rows(Sequence[Any]):
    def __init__(self, name: str, *rows: Any) -> None:
        self.rows = rows

    def __getitem__(self, index: Any) -> Any:
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)


class Sealed(list[Any]):
    """A list that cannot be rebuilt."""

    def __copy__(self) -> Any:
        raise TypeError("sealed")


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("Named", lambda x: Named("a", {"x": x})),
        ("Named", lambda x: {"a": [Named("a", {"x": (1, {"y": x})})]}),
        ("Rows", lambda x: Rows("a", 1, x)),
        ("Named", lambda x: Named("a", {"x": Rows("b", [x])})),
        ("dict_values", lambda x: {"x": x}.values()),
        ("Sealed", lambda x: Sealed([x])),
        ("set", lambda _: {require("torch").ones(2)}),
        ("frozenset", lambda _: [frozenset({require("torch").ones(2)})]),
    ],
)
def test_strict_rejects_arrays_in_untraversed_collections(name: str, make: Callable[[Any], Any]) -> None:
    require("torch")
    options = {"input_type": "numpy", "output_type": "numpy"}
    value = make(np.ones(2))
    assert arraybridge.torch(**options)(lambda value, _: None)(value, IMAGE) is None
    f = arraybridge.torch(strict=True, **options)(lambda x, value: None)
    message = rf"argument 'value': Cannot convert arrays inside a {name}, because it is not traversed"
    with pytest.raises(ArrayNotSupportedError, match=message):
        f(IMAGE, value)
    with pytest.raises(ArrayNotSupportedError, match=message):
        f(x=IMAGE, value=value)


@pytest.mark.parametrize("others", [(), (IMAGE,)], ids=["alone", "with an array"])
def test_arrays_in_containers_that_cannot_be_rebuilt_stay(others: tuple[Any, ...]) -> None:
    """With a CUDA build of PyTorch, a call queries the stream of its first array."""
    require("torch")
    sealed = Sealed([np.ones(2)])
    f = arraybridge.torch(
        lambda *args: [type(x).__module__.partition(".")[0] for x in (args[0][0], *args[1:])]
    )
    assert f(sealed, *others) == ["numpy", *("torch" for _ in others)]


@pytest.mark.parametrize(
    "value",
    [
        Named("a", {"x": 1, "y": "text"}),
        Callee("model", {"weight": np.ones(2)}),
        Broken("a", {"x": np.ones(2)}),
        SimpleObject(np.ones(2)),
        {1, 2},
        frozenset("ab"),
        range(3),
        iter([np.ones(2)]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_strict_passes_objects_without_arrays_as_items(value: Any) -> None:
    f = arraybridge.numpy(input_type="numpy", strict=True)(lambda value, _: value)
    assert f(value, IMAGE) is value


@pytest.mark.parametrize("source", HOST)
@pytest.mark.parametrize("target", FRAMEWORKS)
@pytest.mark.parametrize("dtype", ["float64", "int16", "bool", "float32"])
def test_dtype_casts_arguments(source: str, target: str, dtype: str) -> None:
    require(source)
    require(target)
    seen: list[str] = []

    @decorator(target)(dtype="float32", output_type="numpy")
    def f(image: Any, *, others: Any, scalar: Any) -> Any:
        seen.extend(arraybridge.framework(target).dtype_name(x) for x in (image, others[0]))
        assert scalar == 2.5
        assert type(scalar) is np.float64
        return image

    x = arraybridge.convert_memory(IMAGE.astype(dtype), source)
    result = f(x, others=[x], scalar=np.float64(2.5))
    assert seen == ["float32"] * 2
    assert result.dtype == np.float32
    assert result.tolist() == IMAGE.astype(dtype).astype(np.float32).tolist()


def test_dtype_preserves_the_torch_graph() -> None:
    torch = require("torch")
    x = torch.ones(2, dtype=torch.float64, requires_grad=True)
    arraybridge.torch(dtype="float32")(lambda x: x * 2)(x).sum().backward()
    assert x.grad.tolist() == [2.0, 2.0]
    assert x.grad.dtype == torch.float64


@pytest.mark.parametrize(
    ("dtype", "advice"),
    [
        ("float64", r'@pyclesperanto\(dtype="float32"\)\.'),
        ("int64", r"""\(dtype="int32"\) \(or one of 'int16', 'int8', 'uint16', 'uint32', 'uint8'\)"""),
        ("complex64", "has no complex dtype"),
    ],
)
def test_cast_advice_is_a_decorator_option_and_keeps_the_kind(dtype: str, advice: str) -> None:
    require("pyclesperanto")
    with pytest.raises(DtypeNotSupportedError, match=rf"argument 'x': .* no dtype {dtype}.*{advice}"):
        arraybridge.pyclesperanto(identity)(np.zeros((2, 2), dtype))


def test_errors_name_function_argument_and_leaf() -> None:
    require("torch")
    masked = np.ma.masked_equal(np.array([1.0, -1.0]), -1.0)

    @arraybridge.torch
    def segment(picture: Any, *more: Any, **options: Any) -> Any:
        return picture

    with pytest.raises(ArrayNotSupportedError, match=r"segment\(\), argument 'picture': .*mask") as caught:
        segment(masked)
    assert caught.value.source_type == "numpy"
    assert caught.value.target_type == "torch"
    with pytest.raises(ArrayNotSupportedError, match=r"argument \*more\[1\]: .*mask"):
        segment(IMAGE, 1, masked)
    with pytest.raises(ArrayNotSupportedError, match=r"argument 'side'\['a'\]\[1\]: .*mask"):
        segment(IMAGE, side={"a": [1, masked]})
    with pytest.raises(DtypeNotSupportedError, match=r"segment\(\), argument 'picture': .*object"):
        segment(np.array(["a", None], object))


class _Holder:
    @arraybridge.torch
    def method(this, x):  # noqa: N805  # the name of the first parameter does not matter
        return type(this).__name__, type(x).__module__

    @staticmethod
    @arraybridge.torch
    def static_above(self):  # noqa: PLW0211
        return type(self).__module__

    @arraybridge.torch
    @staticmethod
    def static_below(self):  # noqa: PLW0211
        return type(self).__module__

    @classmethod
    @arraybridge.torch
    def of_class(kind, x):  # noqa: N804
        return kind.__name__, type(x).__module__

    def nested(self, x):
        @arraybridge.torch
        def inner(self):
            return type(self).__module__

        return inner(x)


def test_first_parameter_is_self_only_in_a_class_body():
    pytest.importorskip("torch", reason="the functions run on PyTorch")

    @arraybridge.torch
    def plain(cls):
        return type(cls).__module__

    x = np.ones(2)
    assert plain(x) == "torch"
    assert arraybridge.torch(lambda self: type(self).__module__)(x) == "torch"
    holder = _Holder()
    assert holder.method(x) == ("_Holder", "torch")
    assert holder.static_above(x) == holder.static_below(x) == "torch"
    assert holder.of_class(x) == ("_Holder", "torch")
    assert holder.nested(x) == "torch"


def module_of(x):
    return type(x).__module__


class _Statics:
    @arraybridge.torch(
        output_type="numpy",
    )
    @staticmethod
    def over_several_lines(x):
        return module_of(x)

    @arraybridge.torch
    # A comment between the decorators.
    @staticmethod
    def below_a_comment(x):
        return module_of(x)

    inside = arraybridge.torch(staticmethod(lambda x: module_of(x)))
    outside = staticmethod(arraybridge.torch(lambda x: module_of(x)))
    in_flow = staticmethod(arraybridge.torch(grad="flow")(lambda x: (x * 2).sum()))
    in_planes = staticmethod(arraybridge.torch(slice_by_slice=True)(lambda x: x.sum()))
    split = staticmethod(arraybridge.torch(oom_recovery="split")(lambda x: [module_of(x)] * len(x)))


@pytest.mark.parametrize("name", ["over_several_lines", "below_a_comment", "inside", "outside"])
def test_arrays_are_converted_in_static_methods(name: str) -> None:
    require("torch")
    x = np.ones(2)
    assert getattr(_Statics, name)(x) == getattr(_Statics(), name)(x) == "torch"


def test_static_methods_with_options_have_no_self() -> None:
    require("torch")
    jax = require("jax")
    assert _Statics.split(np.ones((4, 2))) == ["torch"] * 4
    assert _Statics.in_planes(np.ones((2, 3, 4))).tolist() == [12.0, 12.0]
    assert jax.grad(_Statics.in_flow)(jax.numpy.ones(2)).tolist() == [2.0, 2.0]


_WITHOUT_SOURCE = """
import arraybridge
class Made:
    @staticmethod
    @arraybridge.torch
    def static(x):
        return type(x).__module__
    @arraybridge.torch
    def method(self, x):
        return type(self).__name__, type(x).__module__
    @property
    @arraybridge.torch
    def name(self):
        return type(self).__name__
"""


def test_methods_of_classes_without_source_code() -> None:
    require("torch")
    scope: dict[str, Any] = {}
    exec(_WITHOUT_SOURCE, scope)  # noqa: S102  # a class whose source no module has
    made = scope["Made"]
    assert made.static(np.ones(2)) == "torch"
    assert made().method(np.ones(2)) == made.method(made(), np.ones(2)) == ("Made", "torch")
    assert made().name == "Made"


@dataclass
class _Weighted:
    """A container whose arrays stay unchanged while it is ``self``."""

    weight: Any

    @functools.lru_cache  # noqa: B019  # a decorator above ours calls the function unbound
    @arraybridge.torch(oom_recovery="split", output_type="numpy")
    def kinds(self, factor):
        return type(self.weight).__name__

    @arraybridge.torch(output_type="numpy")
    def apply(self, x):
        return type(self.weight).__name__, (x * 2)

    @staticmethod
    @arraybridge.torch(output_type="numpy")
    def combine(one, other):
        return type(one.weight).__name__, type(other.weight).__name__

    def __hash__(self) -> int:
        return 1


class _Heavier(_Weighted):
    pass


@pytest.mark.parametrize("cls", [_Weighted, _Heavier])
def test_self_is_not_converted_although_it_is_a_container(cls: type[_Weighted]) -> None:
    require("torch")
    one = cls(np.ones(2))
    kind, doubled = one.apply(np.ones(2))
    assert kind == "ndarray"
    assert doubled.tolist() == [2.0, 2.0]
    assert one.kinds(2) == "ndarray"
    assert cls.combine(one, cls(np.ones(3))) == ("Tensor", "Tensor")


@dataclass
class _Keywords:
    """A container with methods whose first parameter callers may pass by keyword."""

    weight: Any

    @arraybridge.torch
    def plain(self, x):
        return type(self.weight).__name__, type(x).__name__

    @arraybridge.torch(output_type="input", dtype="float32")
    def renamed(model, x):  # noqa: N805
        return type(model.weight).__name__, type(x).__name__

    @arraybridge.torch(oom_recovery="split")
    def split(self, x):
        return type(self.weight).__name__, type(x).__name__

    @arraybridge.jax(grad="flow")
    def differentiated(self, x):
        return type(self.weight).__name__, "Tensor" if "Array" in type(x).__name__ else ""

    @arraybridge.numpy(output_type="torch")
    async def awaited(self, x):
        return type(self.weight).__name__, "Tensor" if type(x) is np.ndarray else ""

    @arraybridge.gpu
    def offloaded(self, x):
        return type(self.weight).__name__, "Tensor" if type(x) is np.ndarray else ""

    @staticmethod
    @arraybridge.torch
    def static(self, x):  # noqa: PLW0211
        return type(self.weight).__name__, type(x).__name__

    @classmethod
    @arraybridge.torch
    def of_class(cls, x):
        return cls, type(x).__name__


def test_self_is_not_converted_if_it_is_passed_by_keyword() -> None:
    for name in ("torch", "jax"):
        require(name)
    one = _Keywords(np.ones(2))
    x = np.ones(2)
    for _ in range(2):
        for method in ("plain", "split", "differentiated", "offloaded"):
            assert getattr(_Keywords, method)(self=one, x=x) == ("ndarray", "Tensor"), method
            assert getattr(_Keywords, method)(x=x, self=one) == ("ndarray", "Tensor"), method
        assert _Keywords.renamed(model=one, x=x) == ("ndarray", "Tensor")
        assert asyncio.run(_Keywords.awaited(x=x, self=one)) == ("ndarray", "Tensor")
        assert _Keywords.of_class(x=x) == (_Keywords, "Tensor")
        # The first parameter of a static method is an argument, whatever its name.
        assert _Keywords.static(x=x, self=one) == ("Tensor", "Tensor")
    again = pickle.loads(pickle.dumps(_Keywords.plain))
    assert again(self=one, x=x) == ("ndarray", "Tensor")


class _Renamed(_Weighted):
    @arraybridge.torch(output_type="numpy")
    def own(self, x):
        return type(self.weight).__name__, type(x).__name__

    @staticmethod
    @arraybridge.torch
    def __kind(one):
        return type(one.weight).__name__

    def kind(self):
        return self.__kind(self)


_Renamed.__module__ = "elsewhere"
_Reused = make_dataclass("_Reused", ["weight"], namespace={"own": _Renamed.own})


class _Shadowing(_Weighted):
    pass


_Shadowing.__qualname__ = "_Weighted"


def test_self_is_recognized_in_renamed_classes_and_reused_methods() -> None:
    require("torch")
    for cls in (_Renamed, _Reused):
        assert cls(np.ones(2)).own(np.ones(2)) == ("ndarray", "Tensor")
    assert _Renamed(np.ones(2)).kind() == "Tensor"
    one = _Shadowing(np.ones(2))
    assert _Shadowing.combine(one, one) == ("Tensor", "Tensor")


class _ComparedByValue(type):
    """A metaclass with equality but without a hash, so that its classes cannot be dictionary keys."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(cls, other: object) -> bool:
        return cls is other


def test_self_is_recognized_in_classes_without_a_hash() -> None:
    class Model(list, metaclass=_ComparedByValue):  # a list, which would be converted as an argument
        @arraybridge.numpy
        def add(self, x):
            return self[0] + x if type(self) is Model else None

    assert Model([np.array([1.0, 2.0])]).add(np.array([3.0, 4.0])).tolist() == [4.0, 6.0]
    assert Model([np.array([1.0, 2.0])]).add(np.array([5.0, 6.0])).tolist() == [6.0, 8.0]


class _WithoutHash(metaclass=_ComparedByValue):
    """An object whose class cannot be a dictionary key."""


class _ProducerWithoutHash(_WithoutHash):
    def __dlpack__(self, **options: Any) -> Any:
        return np.arange(3.0).__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


@pytest.mark.parametrize(
    "options",
    [
        *({}, {"output_type": "input"}, {"output_type": "numpy"}, {"device": "cpu"}),
        *({"oom_recovery": True}, {"oom_recovery": "split"}, {"slice_by_slice": True}, {"grad": "detach"}),
        *({"strict": True, "input_type": "numpy"}, {"dtype_conversion": "uint8"}),
    ],
)
def test_arguments_and_results_of_unhashable_classes_pass_through(options: dict[str, Any]) -> None:
    require("torch")
    one = _WithoutHash()
    decorated = arraybridge.torch(**options)(lambda *given, **named: (given, named, one))
    x = np.ones(2, "uint8")
    for args in ((one, x), (x, one), ([one, x],), ({"a": one}, x)):
        for _ in range(2):
            given, named, returned = decorated(*args, named=one)
            assert named["named"] is one
            assert returned is one
            values = [*given[0].values(), given[1]] if isinstance(given[0], dict) else [*given]
            values = values[0] if isinstance(values[0], list) else values
            assert sum(value is one for value in values) == 1
    only = arraybridge.torch(**options)(lambda given: one)
    assert only(x) is only(x) is one


def test_unhashable_classes_elsewhere() -> None:
    torch = require("torch")
    one = _WithoutHash()
    x = np.ones(2)
    assert arraybridge.gpu(lambda *given: given[0])(one, x) is one
    assert arraybridge.jax(grad="flow")(lambda *given: given[0])(one, x) is one
    converted = arraybridge.convert_tree([one, {"a": one}, x], "torch")
    assert converted[0] is converted[1]["a"] is one
    assert type(converted[2]) is torch.Tensor
    for call in (arraybridge.detect_memory_type, arraybridge.device_of, arraybridge.to_torch):
        with pytest.raises(UnknownArrayError, match="_WithoutHash"):
            call(one)
    for _ in range(2):
        producer = _ProducerWithoutHash()
        assert arraybridge.to_torch(producer).tolist() == [0, 1, 2]
        assert arraybridge.convert_tree([producer], "torch")[0].tolist() == [0, 1, 2]
        assert arraybridge.torch(lambda y: y.tolist())(producer) == [0, 1, 2]


def test_functions_made_in_a_comprehension_have_no_self() -> None:
    torch = require("torch")
    assert all(isinstance(f(np.ones(2)), torch.Tensor) for f in _FROM_COMPREHENSION.values())


_FROM_COMPREHENSION = {name: arraybridge.torch(lambda x: x.clone()) for name in ("a", "b")}


class Unbound:
    """A proxy without its object, such as Flask's ``request`` outside of a request."""

    @property
    def __class__(self) -> Any:
        raise RuntimeError("outside of a request")

    @__class__.setter
    def __class__(self, _: Any) -> None:
        raise RuntimeError("outside of a request")


class Closed:
    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)


def by_splitting(x: Any, other: Any) -> Any:
    with inject_oom("numpy", above_rows=2):
        f = arraybridge.numpy(lambda x, other: (x * 2, fixed(other), [other] * len(x)))
        doubled, same, rows = split_and_retry(f, (x, other))
    assert doubled.tolist() == (x * 2).tolist()
    assert all(row is other for row in rows)
    return same


def by_pipeline(x: Any, other: Any) -> Any:
    result = arraybridge.Pipeline(lambda batch: batch | {"y": batch["x"]}, microbatches=2)(
        {"x": x, "other": other}
    )
    return result["other"]


BYSTANDER_CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "tree": lambda x, other: convert_tree({"x": x, "other": other}, "torch")["other"],
    "argument": lambda x, other: arraybridge.torch(lambda x, other: other)(x, other),
    "keyword": lambda x, other: arraybridge.torch(lambda x, other: other)(x=x, other=other),
    "strict": lambda x, other: arraybridge.torch(input_type="numpy", strict=True)(lambda x, o: o)(x, other),
    "result": lambda x, other: arraybridge.torch(output_type="input")(lambda x: [other])(x)[0],
    "gpu": lambda x, other: arraybridge.gpu(lambda x, other: other)(x, other),
    "flow": lambda x, other: arraybridge.torch(grad="flow")(lambda x, other: [other])(x, other)[0],
    "split": by_splitting,
    "pipeline": by_pipeline,
    "device_map": lambda x, other: next(arraybridge.device_map(lambda one: one[1], [(x, other)], ["cpu"])),
    "prefetch": lambda x, other: next(iter(arraybridge.prefetch([(x, other)], "torch")))[1],
}


@pytest.mark.parametrize("kind", [Unbound, Closed])
@pytest.mark.parametrize("call", BYSTANDER_CALLS)
def test_objects_with_a_failing_class_attribute_pass(call: str, kind: Any) -> None:
    require("torch")
    other = kind()
    assert BYSTANDER_CALLS[call](np.arange(4.0), other) is other
