"""Advice for objects that are not arrays, based on their class and contents, without imports of packages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, ValuesView
from io import IOBase
from os import PathLike
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import numpy as np

from arraybridge.advice import Advice, literal
from arraybridge.frameworks.advice_checks import NO_NUMBERS, NUMBER_KINDS, can_evaluate, gives_numbers
from arraybridge.frameworks.host_memory import MAX_RANK

__all__ = ["advice_for_object", "has_method"]

_EMPTY_GROUP = Advice("this group contains no array of numbers; pass an array from another group")
_ANY_ARRAY = Advice(
    "pass an array of numpy, cupy, torch, jax, tensorflow or pyclesperanto, or any object with"
    " __dlpack__, __array_interface__ or __cuda_array_interface__"
)


def advice_for_object(x: Any) -> Advice:
    """Return the advice for ``x``, which is not an array."""
    for cls in type(x).__mro__:
        find = _BY_PACKAGE.get(str(cls.__module__).partition(".")[0])
        if find is not None:
            try:
                return find(x)
            except Exception:  # noqa: BLE001  # the object may be unusable, such as a closed file
                break
    return _of_other(x)


def _of_other(x: Any) -> Advice:
    """Return the advice for an object, based on its class or its methods."""
    for classes, find in _BY_CLASS:
        if issubclass(type(x), classes):
            return find(x)
    if type(x).__name__ == "PyCapsule":
        return Advice("if it is a DLPack capsule, pass the array whose __dlpack__() returned it")
    if _is_buffer(x):
        return _of_buffer(x)
    if has_method(x, "__array__"):
        return _of_array_like(x)
    return _ANY_ARRAY


def _item(names: Iterable[Any], after: str = "", what: str = "one of its columns") -> Advice:
    """Return the advice to pass the first of these numeric items; `NO_NUMBERS` if there are none."""
    for name in names:
        return Advice(
            f"it holds several arrays; pass {what}, {{}}", (f"{{x}}[{literal(repr(name))}]{after}",)
        )
    return NO_NUMBERS


# -- by package ---------------------------------------------------------------------------------------


def _of_pandas(x: Any) -> Advice:
    from arraybridge.frameworks.pandas_advice import advice_for_pandas

    return advice_for_pandas(x)


def _of_polars(x: Any) -> Advice:
    from arraybridge.frameworks.polars_advice import advice_for_polars

    return advice_for_polars(x)


def _of_xarray(x: Any) -> Advice:
    names = [name for name, one in x.data_vars.items() if one.dtype.kind in NUMBER_KINDS]
    return _item(names, what="one of its variables")


_LAZY_VIEW = Advice("it reads the file when it is indexed; pass {}", ("{x}[...]",))


def _of_h5py(x: Any) -> Advice:
    if type(x).__name__ == "FieldsView":
        if x.read_dtype.names and not x.extract_field:
            return _item(x.read_dtype.names, what="one of its fields").about("{x}[...]")
        return _LAZY_VIEW
    if type(x).__name__ == "AsStrView":
        return Advice(
            "it holds text; pass integers that identify the strings, {}",
            ("np.unique({x}[...], return_inverse=True)[1]",),
        )
    if type(x).__name__ == "AsTypeView":
        return _LAZY_VIEW
    names = [name for name, one in x.items() if _is_dataset_of_numbers(one)]
    return _item(names, what="one of its datasets") if names else _EMPTY_GROUP


def _is_dataset_of_numbers(x: Any) -> bool:
    return hasattr(x, "dtype") and x.dtype.kind in NUMBER_KINDS and x.shape is not None


def _of_zarr(x: Any) -> Advice:
    names = [name for name, one in x.arrays() if one.dtype.kind in NUMBER_KINDS]
    return _item(names, what="one of its arrays") if names else _EMPTY_GROUP


def _of_torch(x: Any) -> Advice:
    if has_method(x, "state_dict"):
        return Advice("convert the arrays of its state with convert_tree(x.state_dict(), target)")
    if has_method(x, "batch_sampler") or type(x).__name__ == "DataLoader":
        return Advice("convert its batches with prefetch(x, target)")
    return _of_other(x)


def _of_tensorflow(x: Any) -> Advice:
    if has_method(x, "as_numpy_iterator"):
        return Advice("convert its elements with prefetch(x, target)")
    return _of_other(x)


def _of_keras(x: Any) -> Advice:
    if has_method(x, "get_weights"):
        return Advice("convert its weights with convert_tree(x.get_weights(), target)")
    if type(x).__name__ == "KerasTensor":
        return Advice("it is symbolic and has no values; convert the inputs and outputs of the model instead")
    return _of_array_like(x)


def _of_pydicom(x: Any) -> Advice:
    if any(keyword in x for keyword in ("PixelData", "FloatPixelData", "DoubleFloatPixelData")):
        return Advice("pass its pixels, {}", ("{x}.pixel_array",))
    return Advice("it has no pixels; pass a dataset with pixels")


def _of_datasets(x: Any) -> Advice:
    kind = type(x).__name__
    if isinstance(x, dict):
        return _of_container(x)
    if kind == "IterableColumn":
        return Advice("it is read row by row; convert its rows one at a time")
    if kind == "Column":
        if hasattr(x.source, "with_format"):
            return _of_formatted(x.source, x.column_name, "{x}.source", "{x}.column_name")
        of_field = Advice("pass {}", ("np.array({x}[:])",))
        return of_field if gives_numbers(lambda: x[:]) else Advice("it holds no numbers")
    find = _of_formatted if hasattr(x, "num_rows") else _of_row_by_row
    numbers = ("int", "uint", "float", "bool")
    features = x.features or {}
    for name in sorted(features, key=lambda name: not _dtype_of(features[name]).startswith(numbers)):
        advice = find(x, name, "{x}", literal(repr(name)))
        if advice.expressions:
            return advice._replace(text="it holds several arrays; pass one of its columns, {}")
    return NO_NUMBERS


def _of_formatted(x: Any, name: str, subject: str, key: str) -> Advice:
    """Return the advice for a column of a data set that is stored in the Arrow format."""
    from arraybridge.frameworks.arrow_advice import advice_for_values, converts

    column = x.with_format("arrow")[name]
    arrow = f'{subject}.with_format("arrow")[{key}]'
    if converts(column):
        return Advice("pass {}", (arrow,))
    if gives_numbers(lambda: x.with_format("numpy")[name][:]):
        return Advice("pass {}", (f'{subject}.with_format("numpy")[{key}][:]',))
    return advice_for_values(column).about(arrow)


def _of_row_by_row(x: Any, name: str, subject: str, key: str) -> Advice:
    """Return the advice for a column of a data set that is read row by row."""
    feature = x.features[name]
    while getattr(feature, "length", 0) > 0:  # a column of fixed-length lists
        feature = feature.feature
    dtype = _dtype_of(feature)
    if not dtype.startswith(("int", "uint", "float", "bool")):
        return Advice("it holds no numbers")
    return Advice("pass {}", (f'np.array(list({subject}[{key}]), "{dtype}")',))


def _dtype_of(feature: Any) -> str:
    """Return the dtype of a feature of a data set; ``""`` for lists and structs."""
    return str(getattr(feature, "dtype", ""))


def _of_astropy(x: Any) -> Advice:
    if hasattr(x, "colnames"):
        return _item(name for name in x.colnames if x[name].dtype.kind in NUMBER_KINDS)
    return _of_array_like(x)


def _of_pyarrow(x: Any) -> Advice:
    from arraybridge.frameworks.arrow_advice import advice_for_table, advice_for_values

    if hasattr(x, "schema") and hasattr(x, "columns"):
        return advice_for_table(x)
    if hasattr(x, "type") and hasattr(x, "null_count"):
        return advice_for_values(x)
    if hasattr(x, "as_py") and gives_numbers(x.as_py):
        return Advice("convert it to an array with {}", ("np.asarray({x}.as_py())",))
    return _of_array_like(x) if has_method(x, "__array__") else _ANY_ARRAY


def _always(text: str, *expressions: str) -> Callable[[Any], Advice]:
    advice = Advice(text, expressions)

    def find(_: Any) -> Advice:
        return advice

    return find


#: The advice for objects by the top-level module of their class, or of its first base class in this table.
_BY_PACKAGE: dict[str, Callable[[Any], Advice]] = {
    "pandas": _of_pandas,
    "polars": _of_polars,
    "xarray": _of_xarray,
    "h5py": _of_h5py,
    "zarr": _of_zarr,
    "keras": _of_keras,
    "torch": _of_torch,
    "tensorflow": _of_tensorflow,
    "pydicom": _of_pydicom,
    "datasets": _of_datasets,
    "astropy": _of_astropy,
    "pyarrow": _of_pyarrow,
    "sparse": _always("it is sparse; pass {}", "{x}.todense()"),
    "pyopencl": _always("its memory is on an OpenCL device; pass {}", "{x}.get()"),
    "numba": _always("its memory is on a GPU; pass {}", "{x}.copy_to_host()"),
    "dask": _always(
        "it is lazy; pass {}, or process its blocks with arraybridge.dask.map_blocks(fn, x)", "{x}.compute()"
    ),
    "pint": _always("its unit would be lost; pass {}", "{x}.magnitude"),
}


# -- by class -----------------------------------------------------------------------------------------


def _of_container(x: Any) -> Advice:
    if type(x).__name__ == "PackedSequence":  # a PyTorch named tuple
        return Advice("pass its values, {}", ("{x}.data",))
    by_item = "convert the arrays inside it with convert_tree(x, target)"
    if issubclass(type(x), dict) or not _is_in_memory(x) or not gives_numbers(lambda: np.asarray(x)):
        return Advice(by_item)
    if _holds_only_numbers(x):
        return Advice("convert it to an array with {}", ("np.asarray({x})",))
    return Advice(f"convert it to one array with {{}}, or {by_item}", ("np.asarray({x})",))


def _is_in_memory(x: Any, depth: int = 0) -> bool:
    """Return whether nested lists, tuples and ranges hold only numbers and NumPy arrays.

    NumPy would call ``__array__`` of other objects, which may compute or download their values.
    """
    if issubclass(type(x), (list, tuple)):
        # The depth is limited because a list may contain itself.
        return depth < MAX_RANK and all(_is_in_memory(item, depth + 1) for item in _stored_items(x))
    return issubclass(type(x), (range, int, float, complex, np.ndarray, np.generic))


def _holds_only_numbers(x: Any) -> bool:
    """Return whether nested lists, tuples and ranges hold only Python numbers, without arrays."""
    if issubclass(type(x), (list, tuple)):
        return all(map(_holds_only_numbers, _stored_items(x)))
    return issubclass(type(x), (range, int, float, complex))


def _stored_items(x: Any) -> Iterator[Any]:
    """Iterate over the items that a list, tuple or set stores, even if a subclass overrides ``__iter__``."""
    base = next(cls for cls in (list, tuple, set, frozenset) if issubclass(type(x), cls))
    return base.__iter__(x)


def _of_set(x: Any) -> Advice:
    items = list(_stored_items(x))
    if not all(map(_is_in_memory, items)) or not gives_numbers(lambda: np.asarray(items)):
        return NO_NUMBERS
    # Python's complex numbers cannot be sorted.
    ordered = "sorted" if can_evaluate(lambda: sorted(items)) else "list"
    return Advice("convert its elements to an array with {}", (f"np.asarray({ordered}({{x}}))",))


def _of_scalar(x: Any) -> Advice:
    if isinstance(x, np.void) and x.dtype.names:
        return Advice("convert its fields one at a time: {}", (f"{{x}}[{literal(repr(x.dtype.names[0]))}]",))
    if isinstance(x, (np.datetime64, np.timedelta64)):
        return Advice(
            "it is not a number; pass {}, which counts time units", ('np.asarray({x}).astype("int64")',)
        )
    if isinstance(x, np.generic) and not gives_numbers(lambda: np.float64(x)):
        return Advice(
            "it is not a number; pass its bytes, {}", ("np.frombuffer(np.asarray({x}).tobytes(), np.uint8)",)
        )
    if isinstance(x, (np.str_, np.bytes_)):
        return Advice("its text represents a number: pass {}", ("np.float64({x})",))
    if gives_numbers(lambda: np.asarray(x)):
        return Advice("convert it to an array with {}", ("np.asarray({x})",))
    return Advice("convert it to an array with {}, which rounds it", ("np.asarray({x}, np.float64)",))


_BY_CLASS: tuple[tuple[type | tuple[type, ...], Callable[[Any], Advice]], ...] = (
    ((list, tuple, dict, range), _of_container),
    ((int, float, complex, np.generic), _of_scalar),
    ((set, frozenset), _of_set),
    ((str, PathLike, IOBase), _always("to convert a file, read it first, as in np.load(x)")),
    (
        (Iterator, ValuesView),
        _always(
            "convert its arrays one at a time, or all of them with convert_tree(list(x), target); for"
            " numbers, pass np.array(list(x))"
        ),
    ),
    (type(None), _always("pass an array; functions without a return statement return None")),
    (type, _always("it is a class; pass an instance of it")),
    (
        (FunctionType, MethodType, BuiltinFunctionType),
        _always("it is a function; call it, and pass the array that it returns"),
    ),
)


def _is_buffer(x: Any) -> bool:
    try:
        memoryview(x)
    except (TypeError, ValueError, BufferError):
        return False
    return True


def _of_buffer(x: Any) -> Advice:
    if gives_numbers(lambda: np.asarray(memoryview(x))):
        return Advice("convert it to an array with {}", ("np.asarray({x})",))
    return Advice("its elements are not numbers; pass its bytes, {}", ("np.frombuffer({x}, np.uint8)",))


def _of_array_like(x: Any) -> Advice:
    """Return the advice for an object that NumPy can read only through ``__array__`` or as a sequence."""
    if has_method(x, "__array__") or isinstance(x, list) or has_method(x, "__getitem__"):
        # Creating the error must not call __array__, which may compute or download the values.
        text = "it supports no array protocol; if its values are numbers, pass {}"
        if has_method(x, "__array__"):
            text = "it can be read only by calling __array__, which may compute it; if it is numeric, pass {}"
        return Advice(text, ("np.asarray({x})",))
    return _ANY_ARRAY


def has_method(x: Any, name: str) -> bool:
    """Return whether the class of an object has a method; False if its metaclass raises."""
    try:
        return hasattr(type(x), name)
    except Exception:  # noqa: BLE001  # third-party metaclasses may raise anything
        return False
