"""Advice for objects that are not arrays, based on their class and contents, without imports of packages."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, ValuesView
from contextlib import suppress
from io import IOBase
from os import PathLike
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import numpy as np

from arraybridge.advice import Advice
from arraybridge.carriers.advice_steps import NO_NUMBERS, Check, Step, StepsOf, advice_by_steps, items, step
from arraybridge.carriers.advice_tables import STEPS_OF_TABLES
from arraybridge.host.buffers import MAX_RANK
from arraybridge.host.dtype_names import NUMERIC_KINDS
from arraybridge.interface.installation import packages_of
from arraybridge.outcome import ask

__all__ = ["advice_for_object", "has_method"]

_ANY_ARRAY = Advice(
    "Pass an array of numpy, cupy, torch, jax, tensorflow or pyclesperanto, or any object with __dlpack__,"
    " __array_interface__ or __cuda_array_interface__."
)


def advice_for_object(x: Any, check: Check) -> Advice:
    """Return the advice for ``x``, which is not an array.

    Args:
        x: The object.
        check: A function that raises the error for an object that cannot be converted.
    """
    packages = packages_of(type(x))
    for (package, attribute), advice in _BY_ATTRIBUTE.items():
        if package in packages and has_method(x, attribute):
            return advice
    advice = advice_by_steps(x, _steps_of, check)
    if advice.expressions:
        return advice
    if _is_ragged(x):
        return Advice("Its rows have different lengths. Pad them to one length, or pass each row.")
    for classes, text in _BY_CLASS:
        if ask(issubclass, type(x), classes):  # abstract classes raise for unhashable classes
            return Advice(text)
    return _advice_without_numbers(x) if packages.keys() & _HOLDERS else _advice_for_methods(x)


def _advice_without_numbers(x: Any) -> Advice:
    if ask(lambda: str(x.dtype).lower()) == "object":
        return Advice("It holds Python objects. Convert them with convert_tree(list(x), target).")
    return NO_NUMBERS


def _steps_of(x: Any) -> Iterator[Step]:
    package = next(package for package in packages_of(type(x)) if package in _STEPS)
    yield from _STEPS[package](x)


# -- by package ---------------------------------------------------------------------------------------


_SPARSE = "It is sparse. Pass {}."
_FUNCTION = "It is a function. Call it, and pass the array that it returns."
#: The advice for objects of a package whose class has an attribute.
_BY_ATTRIBUTE = {
    ("torch", "multiprocessing_context"): Advice("Convert its batches with prefetch(x, target)."),
    ("torch", "batch_sizes"): Advice("Pass its values, {}.", ("{x}.data",)),
    ("torch", "initialize_parameters"): Advice(
        "Call it once with a batch, which gives its parameters a shape."
    ),
    ("torch", "state_dict"): Advice(
        "Convert the arrays of its state with convert_tree(x.state_dict(), target)."
    ),
    ("torch", "__torch_function__"): Advice(  # torch.fx.Proxy
        "It is a value of torch.fx.symbolic_trace and has no memory. Convert in a function of a module, and"
        " call torch.fx.wrap with the name of the function in that module."
    ),
    ("tensorflow", "as_numpy_iterator"): Advice("Convert its elements with prefetch(x, target)."),
    ("keras", "get_weights"): Advice("Convert its weights with convert_tree(x.get_weights(), target)."),
    ("keras", "sparse"): Advice("It is symbolic. Convert the inputs and outputs of the model instead."),
    ("jax", "__setitem__"): Advice("Its value may change. Pass its current value, {}.", ("{x}[...]",)),
    ("equinox", "__class__"): Advice("Convert its arrays, as in jax.tree.map(arraybridge.to_numpy, x)."),
    ("pyopencl", "__class__"): Advice("Its memory is on an OpenCL device. Pass {}.", ("{x}.get()",)),
    ("numba", "copy_to_host"): Advice("Its memory is on a GPU. Pass {}.", ("{x}.copy_to_host()",)),
    ("numba", "items"): Advice("Convert the arrays inside it with convert_tree(dict(x), target)."),
    ("numba", "append"): Advice("If it holds numbers, pass {}.", ("np.array(list({x}))",)),
    ("dask", "map_blocks"): Advice(
        "It is lazy. Pass {}, or use arraybridge.dask.map_blocks.", ("{x}.compute()",)
    ),
    ("dask", "compute"): Advice("It is lazy. Pass {}.", ("{x}.compute()",)),
    ("polars", "over"): Advice(
        "An expression holds no data. Pass a column of a frame, such as frame['name']."
    ),
    ("datasets", "n_shards"): Advice("It is read row by row. Convert its rows with prefetch(x, target)."),
}


def _h5py(x: Any) -> Iterator[Step]:
    if hasattr(x, "items"):
        yield from items("datasets", x.items())
    elif type(x).__name__.endswith("View"):
        # The next steps are found for an array with one element.
        dtype = getattr(x, "read_dtype", None) or getattr(x, "dtype", None)
        dtype = dtype[0] if dtype is not None and getattr(x, "extract_field", False) else dtype
        element = np.full(1, "a") if dtype is None or dtype.kind in "OSU" else np.empty(1, dtype)
        yield Step("It reads the file when it is indexed. Pass {}.", "{x}[...]", element)


def _netcdf(x: Any) -> Iterator[Step]:
    # Its values are masked arrays, and np.asarray(x) would replace missing ones by the fill value.
    if has_method(x, "variables"):
        yield from items("variables", x.variables.items())
    elif getattr(x.dtype, "kind", "") in NUMERIC_KINDS:
        text = "It is read from the file as a masked array. Pass {}, with a value for missing elements."
        missing = "np.nan" if x.dtype.kind == "f" else "0"
        yield Step(text, f"np.ma.filled({{x}}[:], {missing})", np.empty(1, x.dtype))


def _numpy(x: Any) -> Iterator[Step]:
    """Yield the steps for a NumPy scalar, or for an ``.npz`` file, whose arrays are not read."""
    if isinstance(x, np.generic):
        scalar: Any = x
        yield from items("fields", ((name, scalar[name]) for name in x.dtype.names or ()))
        yield Step("Pass {}.", "np.asarray({x})", np.asarray(x))
    archive: Any = x
    for name in getattr(x, "files", ()):
        with archive.zip.open(f"{name}.npy") as file:
            is_old = np.lib.format.read_magic(file) == (1, 0)
            read: Any = np.lib.format.read_array_header_1_0 if is_old else np.lib.format.read_array_header_2_0
            yield from items("arrays", [(name, np.empty(1, read(file)[2]))])


def _astropy(x: Any) -> Iterable[Step]:
    if hasattr(x, "colnames"):
        return items("columns", ((name, x[name]) for name in x.colnames))
    if not hasattr(x, "fileinfo"):
        return ()
    # A FITS file, or one of its units.
    return items("units", enumerate(x)) if isinstance(x, list) else (step(x, "Pass its array, {}.", "data"),)


def _torchio(x: Any) -> Iterator[Step]:
    if has_method(x, "affine"):  # an image, which may not have been read yet
        yield Step("It is an image. Pass its array, {}.", "{x}.numpy()", np.broadcast_to(0.0, x.shape))
    else:
        yield from items("images", ((name, one) for name, one in x.items() if has_method(one, "affine")))


def _pydicom(x: Any) -> Iterator[Step]:
    if any(keyword in x for keyword in ("PixelData", "FloatPixelData", "DoubleFloatPixelData")):
        yield Step("Pass its pixels, {}.", "{x}.pixel_array", np.empty(1))


def _builtin(x: Any) -> Iterator[Step]:
    """Yield the steps for Python's numbers, and for lists, tuples, ranges and sets of numbers."""
    if issubclass(type(x), (set, frozenset)):
        numbers = list(_iterate_stored(x))
        if _is_in_memory(numbers) and _are_numbers(numbers):
            yield Step("Pass {}.", "np.asarray(list({x}))", np.asarray(numbers))
    elif _is_in_memory(x) and not isinstance(x, (np.ndarray, np.generic)):
        text = "" if _is_in_memory(x, arrays=False) else f"{_BY_TREE} Or pass all of them in one array, {{}}."
        if _are_numbers(x):
            yield Step(text, "np.asarray({x})", np.asarray(x))
        elif isinstance(x, int):  # above 64 bits
            yield Step("Pass {}.", "np.asarray({x}, np.float64)", np.asarray(x, np.float64))
    elif _is_buffer_of_numbers(x):
        buffer: Any = x
        yield Step("Pass {}.", "np.asarray({x})", np.asarray(memoryview(buffer)))


_STEPS: Mapping[str, StepsOf] = STEPS_OF_TABLES | {
    "xarray": lambda x: items("variables", x.data_vars.items()),
    "h5py": _h5py,
    "zarr": lambda x: items("arrays", x.arrays()),
    "netCDF4": _netcdf,
    "numpy": _numpy,
    "astropy": _astropy,
    "torchio": _torchio,
    "pydicom": _pydicom,
    "sparse": lambda x: (step(x, _SPARSE, "to_scipy_sparse()"), step(x, _SPARSE, "todense()")),
    "pint": lambda x: (step(x, "Its unit would be lost. Pass {}.", "magnitude"),),
    "builtins": _builtin,
}
#: The packages whose objects hold arrays. Objects without a step hold no numbers.
_HOLDERS = _STEPS.keys() - {"numpy", "astropy", "builtins"}


def _are_numbers(x: Any) -> bool:
    """Return whether NumPy reads an object as an array of numbers."""
    values = ask(np.asarray, x)
    return values is not None and values.dtype.kind in NUMERIC_KINDS


def _is_buffer_of_numbers(x: Any) -> bool:
    with suppress(TypeError, ValueError, BufferError):
        return _are_numbers(memoryview(x))
    return False


def _is_in_memory(x: Any, depth: int = 0, *, arrays: bool = True) -> bool:
    """Return whether nested lists, tuples and ranges hold only numbers, and NumPy arrays if ``arrays``.

    NumPy would call ``__array__`` of other objects, which may compute or download their values.
    """
    if issubclass(type(x), (list, tuple)):
        # The depth is limited because a list may contain itself.
        return depth < MAX_RANK and all(
            _is_in_memory(one, depth + 1, arrays=arrays) for one in _iterate_stored(x)
        )
    is_array = issubclass(type(x), (np.ndarray, np.generic))
    return issubclass(type(x), (range, int, float, complex)) or (arrays and is_array)


def _is_ragged(x: Any) -> bool:
    """Return whether nested lists hold only numbers, but NumPy cannot read them as an array."""
    is_numeric = issubclass(type(x), (list, tuple)) and _is_in_memory(x, arrays=False)
    return is_numeric and ask(np.asarray, x) is None


def _iterate_stored(x: Any) -> Iterator[Any]:
    """Iterate over the items that a list, tuple or set stores, even if a subclass overrides ``__iter__``."""
    base = next(cls for cls in (list, tuple, set, frozenset) if issubclass(type(x), cls))
    return base.__iter__(x)


# -- by class -----------------------------------------------------------------------------------------

_BY_TREE = "Convert the arrays inside it with convert_tree(x, target)."
_BY_CLASS: tuple[tuple[type | tuple[type, ...], str], ...] = (
    ((list, tuple, dict, range), _BY_TREE),
    ((set, frozenset), NO_NUMBERS.text),
    ((str, PathLike, IOBase), "To convert a file, read it first, as in np.load(x)."),
    (
        (Iterator, ValuesView),
        "Convert its arrays with convert_tree(list(x), target). For numbers, pass np.array(list(x)).",
    ),
    (type(None), "Pass an array. Functions without a return statement return None."),
    (type, "It is a class. Pass an instance of it."),
    ((FunctionType, MethodType, BuiltinFunctionType), _FUNCTION),
)


# -- by methods ---------------------------------------------------------------------------------------


def _advice_for_methods(x: Any) -> Advice:
    """Return the advice to call a method that may return an array; the error itself must not call it."""
    if type(type(x)).__name__ == "PyCPointerType":  # of ctypes
        return Advice("It is a pointer. Pass np.ctypeslib.as_array(x, shape), with the shape of its memory.")
    if type(x).__name__ == "PyCapsule":
        return Advice("If it is a DLPack capsule, pass the array whose __dlpack__() returned it.")
    with suppress(TypeError, ValueError, BufferError):
        memoryview(x).release()
        return Advice("Its elements are not numbers. Pass its bytes, {}.", ("np.frombuffer({x}, np.uint8)",))
    for name in ("to_numpy", "to_ndarray", "asarray", "numpy"):
        if _has_method_without_arguments(x, name):
            return Advice("If its values are numbers, pass {}.", (f"{{x}}.{name}()",))
    if _has_method_without_arguments(x, "to_dict"):
        return Advice("Convert the arrays inside it with convert_tree(x.to_dict(), target).")
    if has_method(x, "__array__"):
        text = "It can be read only by calling __array__, which may compute it. If it is numeric, pass {}."
        return Advice(text, ("np.asarray({x})",))
    if has_method(x, "__getitem__"):
        return Advice(
            "It supports no array protocol. If its values are numbers, pass {}.", ("np.asarray({x})",)
        )
    return Advice(_FUNCTION) if callable(x) else _ANY_ARRAY


def _has_method_without_arguments(x: Any, name: str) -> bool:
    return ask(lambda: inspect.signature(getattr(type(x), name)).bind(x)) is not None


def has_method(x: Any, name: str) -> bool:
    """Return whether the class of an object has a method; False if its metaclass raises."""
    return bool(ask(hasattr, type(x), name))
