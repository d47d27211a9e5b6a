"""What is read where an array is meant; objects that carry one, what a carrier is, and those of the library.

Carriers are asked only of what no framework owns. None of their packages is imported here: one whose object
comes is there already.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, ClassVar

import numpy as np

from arraybridge.errors import Advice, ArrayNotSupportedError, MemoryConversionError, told, warn
from arraybridge.frameworks import hostmemory, registry
from arraybridge.frameworks.base import Framework
from arraybridge.frameworks.foreign import foreign_framework, is_foreign_array, unknown_array
from arraybridge.frameworks.numpy import NumpyFramework
from arraybridge.reasons import Cause, Reason, as_cause
from arraybridge.types import empty_caches, new_cache, remember

__all__ = ["Carrier", "carrier_of", "chunks", "is_array", "register_carrier", "source_of"]

#: Entry-point group of other packages: ``root module of the objects' classes = "package.module:Class"``.
GROUP = "arraybridge.carriers"

# Of a file that has no chunks, read at a time.
_NBYTES = 16 * 2**20


class Carrier:
    """A kind of objects that carry one array; `register_carrier` makes it known.

    >>> import numpy as np, arraybridge
    >>> class Scan:  # somebody's class
    ...     def __init__(self, pixels, patient):
    ...         self.pixels, self.patient = pixels, patient
    >>> class Scans(arraybridge.Carrier):
    ...     def carries(self, x):
    ...         return type(x).__name__ == "Scan"
    ...     def array(self, x):
    ...         return x.pixels
    ...     def rebuild(self, x, array):
    ...         return type(x)(array, x.patient)
    >>> _ = arraybridge.register_carrier(Scans())
    >>> @arraybridge.torch(output_type="input")
    ... def double(x):
    ...     return x * 2  # a tensor here
    >>> double(Scan(np.ones(2), "Ada")).patient
    'Ada'
    """

    #: Python code that gives the carried array of an object ``{x}``, for the advice in error messages.
    expression: ClassVar[str] = ""

    def carries(self, x: Any) -> bool:
        """Whether ``x`` is such an object. Asked of whatever no framework owns; False leaves it alone.

        An exception counts as False, so that an unrelated object in an argument never breaks a call.
        """
        raise NotImplementedError

    def array(self, x: Any) -> Any:
        """The array that ``x`` carries, of any framework, where it can show memory that it keeps alive.

        Else a pair: what is to be read later (a NumPy array, or an object with ``shape``, ``dtype``,
        ``nbytes`` and slices, as a file has), and why, in words that follow "because".
        """
        raise NotImplementedError

    def rebuild(self, x: Any, array: Any) -> Any:
        """An object like ``x`` around another array of that shape, in the framework of the one it carries.

        The array itself where there can be no such object, as for files, or for another dtype.
        """
        return array


# -- which one an object has, and what it carries ----------------------------------------------------

_registered: list[Carrier] = []
# Type → the carriers to ask of its objects.
_by_type: dict[type, tuple[Carrier, ...]] = new_cache()


def register_carrier(carrier: Carrier) -> Carrier:
    """Make a kind of objects known, and return it; the last one that is registered is asked first.

    Raises:
        TypeError: it is no instance of a subclass of `Carrier`.
    """
    if not isinstance(carrier, Carrier):
        raise TypeError(f"register_carrier() takes an instance of a Carrier subclass, not {carrier!r}")
    _registered.insert(0, carrier)
    empty_caches()
    return carrier


def carrier_of(x: Any) -> Carrier | None:
    """What ``x`` is as an object that carries an array; None if it is none, or an array of a framework."""
    cls = type(x)
    candidates = _by_type.get(cls)
    if candidates is None:
        try:
            candidates = tuple(_candidates(x, cls))
        except (RecursionError, MemoryError, MemoryConversionError):  # the last: its framework is broken
            raise
        except Exception:  # noqa: BLE001  # of the object's own attributes, such as its __class__
            return None
        remember(_by_type, cls, candidates)
    for carrier in candidates:
        if _carries(carrier, x):
            return carrier
    return None


def _carries(carrier: Carrier, x: Any) -> bool:
    """Return whether ``x`` is of that kind; False for an object that cannot answer, which is left alone."""
    try:
        return carrier.carries(x)
    except (RecursionError, MemoryError):
        raise
    except Exception:  # noqa: BLE001  # of the object's own attributes, or of a carrier of others
        return False


def _candidates(x: Any, cls: type) -> Iterator[Carrier]:
    if isinstance(x, (type, np.generic)) or registry.find_owner(x) is not None:
        return
    yield from _registered
    for root in dict.fromkeys(str(base.__module__).partition(".")[0] for base in cls.__mro__):
        if root in KINDS:
            yield KINDS[root]
        elif root != "builtins" and root in _entry_points():
            offered = _load_entry_point(root)
            if offered is not None:
                yield offered
    if not is_foreign_array(x) and _is_buffer(x):
        yield BUFFERS


@cache
def _load_entry_point(root: str) -> Carrier | None:
    """Return the carrier that another package offers; None, with a warning, if it fails to load."""
    point = _entry_points()[root]
    try:
        carrier: Carrier = point.load()()
    except (Exception, SystemExit) as error:  # noqa: BLE001  # the code of others may raise anything
        warn(
            f"The entry point {root} = {point.value} in the group {GROUP} fails to load: {told(error)}.",
            RuntimeWarning,
        )
        return None
    return carrier


def _why_not_recognized(x: Any) -> Exception | None:
    """Return the error that kept ``x`` from being recognized as a carrier."""
    for carrier in _by_type.get(type(x), ()):
        try:
            carrier.carries(x)
        except Exception as error:  # noqa: BLE001  # whatever it is, it becomes the cause of another error
            return error
    return None


def _is_buffer(x: Any) -> bool:
    """Whether objects of the class of ``x`` have the buffer protocol: found out once, since it takes 1 µs."""
    try:
        memoryview(x).release()
    except TypeError:
        return False
    except (ValueError, BufferError):
        pass  # one that is closed: others of its class are not
    return True


@cache
def _entry_points() -> dict[str, Any]:
    from importlib.metadata import entry_points

    return {point.name: point for point in entry_points(group=GROUP)}


class _ToRead(NumpyFramework):
    """Values that are read when they are needed, and then are nobody else's."""

    def to_host(self, x: Any) -> np.ndarray:
        values = np.asarray(x[...])
        return hostmemory.fresh(values) if isinstance(x, np.ndarray) or not values.flags.writeable else values

    host_view = copy = to_host


def is_array(x: Any) -> bool:
    """Whether ``x`` is an array that can be a source."""
    return registry.find_owner(x) is not None or carrier_of(x) is not None or is_foreign_array(x)


def source_of(x: Any) -> tuple[Framework, Any]:
    """The framework of an array, and the array to read: that which a carrier carries, a foreign one opened.

    Raises:
        UnknownArrayError: it is no array.
    """
    owner = registry.find_owner(x)
    if owner is not None:
        return owner, x
    carrier = carrier_of(x)
    if carrier is not None:
        return _opened(carrier, x)
    if not is_foreign_array(x):
        raise unknown_array(x) from _why_not_recognized(x)
    return foreign_framework(x)


def advise_about(error: MemoryConversionError, x: Any) -> None:
    """Make the advice of an error about a carried array one about ``x``, the object that the user has."""
    carrier = carrier_of(x)
    if carrier is not None:
        error.advise_about(carrier.expression)


def _opened(carrier: Carrier, x: Any) -> tuple[Framework, Any]:
    try:
        array = carrier.array(x)
    except (MemoryConversionError, MemoryError):
        raise
    except Exception as error:  # the code of others may raise anything
        instead = f"it cannot be read ({told(error)})"
        raise refused(f"an object of type {type(x).__qualname__}", instead) from error
    if type(array) is tuple:
        return _ToRead(as_cause(array[1])), array[0]
    if array is x:
        raise TypeError(f"{type(carrier).__name__}.array() gave back the object itself")
    try:
        return source_of(array)
    except MemoryConversionError as error:
        advise_about(error, x)
        raise


# -- those of the library ----------------------------------------------------------------------------


class Unread:
    """Values that are made when somebody reads them."""

    def __init__(self, shape: tuple[int, ...], dtype: Any, read: Callable[[], np.ndarray]) -> None:
        self.shape, self.dtype = shape, np.dtype(dtype)
        self.nbytes = math.prod(shape) * self.dtype.itemsize
        self._read = read

    def __getitem__(self, key: Any) -> Any:
        return self._read()[key]


def is_of(x: Any, package: str, *names: str) -> bool:
    """Whether ``x`` is of one of these classes of a package; imports none."""
    module = sys.modules.get(package)
    return module is not None and isinstance(x, tuple(getattr(module, name) for name in names))


def refused(what: str, instead: str, *expressions: str) -> ArrayNotSupportedError:
    """Return the error for an object whose contents cannot be converted exactly.

    ``instead`` has ``{}`` in the place of each of the expressions, which are about ``x``, the object.
    """
    advice = Advice(instead, expressions)
    return ArrayNotSupportedError(f"{what} cannot be converted", reason=what, advice=advice)


class Buffers(Carrier):
    """Whatever has the buffer protocol: memoryview, array.array, mmap, bytes."""

    expression = "np.asarray({x})"

    _NUMBERS = frozenset("?bBhHiIlLqQnNefdg")

    def carries(self, x: Any) -> bool:
        try:
            view = memoryview(x)
        except (TypeError, ValueError, BufferError):
            return False
        return view.ndim > 0 and view.format.lstrip("@=<>!").removeprefix("Z") in self._NUMBERS

    def array(self, x: Any) -> Any:
        return np.asarray(memoryview(x))


class Xarray(Carrier):
    """Arrays with names for their axes. Datasets carry several arrays, and are none."""

    expression = "{x}.data"

    def carries(self, x: Any) -> bool:
        return is_of(x, "xarray", "DataArray", "Variable")

    def array(self, x: Any) -> Any:
        if x.chunks is not None:
            instead = "pass {}, or work on its blocks with arraybridge.dask.map_blocks(fn, x.data)"
            raise refused("an xarray object over Dask, which is lazy,", instead, "{x}.compute()")
        variable = getattr(x, "variable", x)
        if _is_unread(variable):
            source = "a file, which xarray has opened lazily"
            return _UnreadVariable(variable), Cause(Reason.FILE, source=source)
        return x.data  # of any framework, which says what it has against sparse ones

    def rebuild(self, x: Any, array: Any) -> Any:
        like = x.copy(deep=False, data=array)
        like.encoding = {}  # says how the old values lie in a file; xarray's own arithmetic drops it, too
        return like


def _is_unread(variable: Any) -> bool:
    """Return whether a variable of xarray reads its values only when somebody asks for them.

    Its ``data`` would read the file, and no public attribute reports this (xarray 2026.9).
    """
    contents = getattr(variable, "_data", None)
    is_of_xarray = type(contents).__module__.partition(".")[0] == "xarray"
    return is_of_xarray and not getattr(variable, "_in_memory", True)


class _UnreadVariable:
    """The values of a variable of xarray, read in parts from its file."""

    def __init__(self, variable: Any) -> None:
        self.shape, self.dtype = tuple(variable.shape), np.dtype(variable.dtype)
        self.nbytes = math.prod(self.shape) * self.dtype.itemsize
        self._variable = variable

    def __getitem__(self, key: Any) -> np.ndarray:
        values = np.asarray(self._variable[key].values)
        return values if values.flags.owndata else hostmemory.fresh(values)


class Pandas(Carrier):
    """Series, indices, and tables of one numeric dtype."""

    expression = "{x}.to_numpy()"

    def carries(self, x: Any) -> bool:
        if is_of(x, "pandas", "DataFrame"):
            first, *others = x.dtypes
            return _is_number(first) and all(dtype == first for dtype in others)
        return is_of(x, "pandas", "Series", "Index") and _is_number(x.dtype)

    def array(self, x: Any) -> Any:
        is_table = is_of(x, "pandas", "DataFrame")
        dtype = x.dtypes.iloc[0] if is_table else x.dtype
        if isinstance(dtype, np.dtype):
            values = x.to_numpy()
            apart = is_table and not np.shares_memory(values, x.iloc[:, 0].to_numpy())
            return (values, Cause(Reason.SEPARATE_COLUMNS)) if apart and values.size else values
        if np.any(x.isna()):
            what = f"values of pandas with nulls ({dtype})"
            raise refused(
                what, "pass {}, with a value of your choice, or {}", "{x}.fillna(0)", "{x}.dropna()"
            )
        cause = Cause(Reason.MASKED_STORAGE, source="pandas", source_dtype=str(dtype))
        return x.to_numpy(dtype=dtype.numpy_dtype), cause

    def rebuild(self, x: Any, array: Any) -> Any:
        pandas = sys.modules["pandas"]
        if array.dtype.isbuiltin == 2:  # of ml_dtypes, in which pandas sees no numbers
            return array
        if is_of(x, "pandas", "DataFrame"):
            table = _table(pandas, array, x)
            return table.__finalize__(x)
        values = _in_own_dtype(pandas, array, x.dtype)
        if is_of(x, "pandas", "Index"):
            try:
                return pandas.Index(values, name=x.name)
            except NotImplementedError:  # no index of this dtype, as float16
                return array
        return pandas.Series(values, index=x.index, name=x.name).__finalize__(x)


def _table(pandas: Any, array: np.ndarray, like: Any) -> Any:
    """Return a table of these values, in pandas' own dtype if the columns of ``like`` have it."""
    dtype = like.dtypes.iloc[0]
    if not _has_own(dtype, array):
        return pandas.DataFrame(array, index=like.index, columns=like.columns)
    columns = {i: _in_own_dtype(pandas, array[:, i], dtype) for i in range(array.shape[1])}
    table = pandas.DataFrame(columns, index=like.index)
    table.columns = like.columns
    return table


def _has_own(dtype: Any, array: np.ndarray) -> bool:
    """Return whether ``dtype`` is pandas' own (``Int64``), with numbers of the dtype of ``array``."""
    return not isinstance(dtype, np.dtype) and bool(dtype.numpy_dtype == array.dtype)


def _in_own_dtype(pandas: Any, array: np.ndarray, dtype: Any) -> Any:
    """Return the values in pandas' own dtype, if it is that of the numbers; without nulls, NaN stays NaN.

    ``astype`` and pandas' other constructors make a null of NaN.
    """
    if not _has_own(dtype, array):
        return array
    if hasattr(dtype, "pyarrow_dtype"):
        values = sys.modules["pyarrow"].array(array, type=dtype.pyarrow_dtype, from_pandas=False)
        return pandas.arrays.ArrowExtensionArray(values)
    values = np.ascontiguousarray(array)
    return dtype.construct_array_type()(values, np.zeros(values.shape, np.bool_))


def _is_number(dtype: Any) -> bool:
    """Not of categories, dates, text; of pandas' own dtypes those that have one of NumPy's."""
    own = not isinstance(dtype, np.dtype)
    return getattr(dtype, "kind", "O") in "biufc" and (not own or hasattr(dtype, "numpy_dtype"))


class Polars(Carrier):
    """Series of numbers."""

    expression = "{x}.to_numpy()"

    def carries(self, x: Any) -> bool:
        if not is_of(x, "polars", "Series"):
            return False
        return bool(x.dtype.is_integer() or x.dtype.is_float() or x.dtype == sys.modules["polars"].Boolean)

    def array(self, x: Any) -> Any:
        if x.null_count():
            instead = "pass {}, with a value of your choice, or {}"
            raise refused("a series of polars with nulls", instead, "{x}.fill_null(0)", "{x}.drop_nulls()")
        try:
            return x.to_numpy(allow_copy=False)
        except RuntimeError:
            return x.to_numpy(), Cause(Reason.CHUNKED_STORAGE, source="polars")

    def rebuild(self, x: Any, array: Any) -> Any:
        polars = sys.modules["polars"]
        like = polars.Series(x.name, array)
        return array if like.dtype == polars.Object else like


class SimpleItk(Carrier):
    """Images with a place in space."""

    expression = "SimpleITK.GetArrayFromImage({x})"

    def carries(self, x: Any) -> bool:
        return is_of(x, "SimpleITK", "Image")

    def array(self, x: Any) -> Any:
        sitk = sys.modules["SimpleITK"]
        if "label" in x.GetPixelIDTypeAsString():  # SimpleITK ends the process where these are read
            instead = "it has no pixels; pass {}"
            raise refused("a label map of SimpleITK", instead, "SimpleITK.LabelMapToLabel({x})")
        ones = sitk.Image([1] * x.GetDimension(), x.GetPixelID(), x.GetNumberOfComponentsPerPixel())
        pixel = sitk.GetArrayFromImage(ones)
        shape = x.GetSize()[::-1] + pixel.shape[x.GetDimension() :]

        def pixels() -> np.ndarray:
            # A look at pixels that two images share drops the metadata of one: so it is at a second image.
            values: np.ndarray = sitk.GetArrayFromImage(sitk.Image(x))
            return values

        unread = Unread(shape, pixel.dtype, pixels)
        return unread, Cause(Reason.CARRIER_COPIES, source="SimpleITK")

    def rebuild(self, x: Any, array: Any) -> Any:
        sitk = sys.modules["SimpleITK"]
        vector = "vector" in x.GetPixelIDTypeAsString()
        values = array[..., None] if vector and array.ndim == x.GetDimension() else array
        try:
            like = sitk.GetImageFromArray(values, isVector=vector)
        except (KeyError, TypeError, RuntimeError):  # no pixels of this dtype
            return array
        like.CopyInformation(x)
        for key in x.GetMetaDataKeys():
            like.SetMetaData(key, x.GetMetaData(key))
        return like


class Pillow(Carrier):
    """Pictures, whose mode says what their numbers mean."""

    expression = "np.asarray({x})"

    def carries(self, x: Any) -> bool:
        return is_of(x, "PIL.Image", "Image")

    def array(self, x: Any) -> Any:
        if x.mode in ("P", "PA"):
            instead = "its numbers stand for colors; pass {}, its colors, or {}, its numbers (such as labels)"
            raise refused(f"an image of mode {x.mode}", instead, '{x}.convert("RGB")', "np.asarray({x})")
        if _is_closed(x):
            raise _closed_image()
        pixel = np.asarray(sys.modules["PIL.Image"].new(x.mode, (1, 1)))

        def pixels() -> np.ndarray:
            try:
                values = np.array(x)  # whose True is 255 in mode "1"
            except (ValueError, AttributeError) as error:  # its file was closed before it was read
                raise _closed_image() from error
            return values.view(np.uint8) != 0 if values.dtype == bool else values

        unread = Unread((*x.size[::-1], *pixel.shape[2:]), pixel.dtype, pixels)
        return unread, Cause(Reason.CARRIER_COPIES, source="Pillow")

    def rebuild(self, x: Any, array: Any) -> Any:
        pillow = sys.modules["PIL.Image"]
        pixel = np.asarray(pillow.new(x.mode, (1, 1)))
        if array.dtype.newbyteorder("=") != pixel.dtype.newbyteorder("="):  # mode I;16B is big-endian
            try:
                like = pillow.fromarray(array)
            except (TypeError, ValueError):  # no mode of this dtype
                return array
            if self.array(like)[0].dtype != array.dtype:  # Pillow has made float32 of float64
                return array
        elif x.mode == "1":
            like = pillow.fromarray(array)
        else:  # by the mode of the picture: CMYK looks like RGBA
            like = pillow.frombytes(x.mode, x.size, array.astype(pixel.dtype, copy=False).tobytes())
        like.info = x.info.copy()
        return like


def _is_closed(x: Any) -> bool:
    """Return whether an image of Pillow has been closed, before or after it was read.

    ``_im`` is private, since ``x.im`` raises of a closed image (Pillow 13).
    """
    is_unread = bool(getattr(x, "tile", None))
    if is_unread and getattr(x, "fp", x) is None:
        return True
    return type(getattr(x, "_im", None)).__name__ == "DeferredError"


def _closed_image() -> ArrayNotSupportedError:
    instead = "open the file again, and convert the image before you close it"
    return refused("an image of Pillow that is closed", instead)


class Variables(Carrier):
    """Variables of Keras and of Flax (``nnx.Param`` among them), which hold an array of some framework."""

    expression = "{x}.value"

    def carries(self, x: Any) -> bool:
        if is_of(x, "keras", "Variable"):
            return True
        return is_of(x, "flax.nnx", "Variable") and registry.find_owner(self.array(x)) is not None

    def array(self, x: Any) -> Any:
        # Flax deprecates .value since 0.12; the attributes of the value are those of older variables.
        return x.get_value() if hasattr(type(x), "get_value") else x.value


class Files(Carrier):
    """Arrays of zarr and h5py."""

    expression = "{x}[...]"

    def carries(self, x: Any) -> bool:
        return is_of(x, "zarr", "Array") or is_of(x, "h5py", "Dataset")

    def array(self, x: Any) -> Any:
        package = type(x).__module__.partition(".")[0]
        if package == "h5py" and not x:
            raise refused("a dataset of h5py whose file is closed", "open the file again")
        if x.shape is None:
            raise refused("an empty dataset of h5py", "it has no shape; pass {}", "np.empty(0, {x}.dtype)")
        return x, Cause(Reason.FILE, source="a zarr array" if package == "zarr" else "an h5py dataset")


BUFFERS, FILES, VARIABLES = Buffers(), Files(), Variables()

#: Root module of an object's class → the carrier to ask.
KINDS: dict[str, Carrier] = {
    "xarray": Xarray(),
    "SimpleITK": SimpleItk(),
    "PIL": Pillow(),
    "zarr": FILES,
    "h5py": FILES,
    "pandas": Pandas(),
    "polars": Polars(),
    "keras": VARIABLES,
    "flax": VARIABLES,
}


def chunks(file: Any) -> Iterator[np.ndarray]:
    """The slices of a file along its first axis, each of whole chunks, read when they are asked for.

    A chunk, or a shard where the chunks lie in shards, is read once: for `prefetch` and `device_map`, over
    files that are larger than memory.

    Args:
        file: an array of zarr or h5py. Where it has no chunks, slices of about 16 MiB are read.

    Raises:
        TypeError: it is no array of zarr or h5py, or has no axis.

    >>> import numpy as np, zarr
    >>> file = zarr.array(np.arange(10), chunks=(4,))
    >>> [part.tolist() for part in chunks(file)]
    [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    """
    if not FILES.carries(file) or not file.shape:
        raise TypeError(
            f"chunks() takes an array of zarr or h5py with an axis, not {type(file).__qualname__}"
        )
    chunk = getattr(file, "shards", None) or file.chunks
    rows = chunk[0] if chunk else max(1, _NBYTES * file.shape[0] // max(1, file.nbytes))
    return (file[start : start + rows] for start in range(0, file.shape[0], rows))
