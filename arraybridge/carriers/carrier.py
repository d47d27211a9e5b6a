"""What is read where an array is meant; objects that carry one, what a carrier is, and those of the library.

Carriers are asked only of what no framework owns. None of their packages is imported here: one whose object
comes is there already.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np

from arraybridge.errors import ArrayNotSupportedError, MemoryConversionError, told
from arraybridge.frameworks import hostmemory, registry
from arraybridge.frameworks.base import Framework
from arraybridge.frameworks.foreign import foreign_framework, is_foreign_array, unknown_array
from arraybridge.frameworks.numpy import NumpyFramework
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

    def carries(self, x: Any) -> bool:
        """Whether ``x`` is such an object. Asked of whatever no framework owns; False leaves it alone."""
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
        candidates = remember(_by_type, cls, tuple(_candidates(x, cls)))
    for carrier in candidates:
        if carrier.carries(x):
            return carrier
    return None


def _candidates(x: Any, cls: type) -> Iterator[Carrier]:
    if isinstance(x, (type, np.generic)) or registry.find_owner(x) is not None:
        return
    yield from _registered
    for root in dict.fromkeys(base.__module__.partition(".")[0] for base in cls.__mro__):
        if root in KINDS:
            yield KINDS[root]
        elif root != "builtins" and root in _entry_points():
            yield _entry_points()[root].load()()
    if not is_foreign_array(x) and _is_buffer(x):
        yield BUFFERS


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
        raise unknown_array(x)
    return foreign_framework(x)


def _opened(carrier: Carrier, x: Any) -> tuple[Framework, Any]:
    try:
        array = carrier.array(x)
    except (MemoryConversionError, MemoryError):
        raise
    except Exception as error:  # the code of others may raise anything
        raise refused(f"an object of type {type(x).__qualname__}", f"it says: {told(error)}") from error
    if type(array) is tuple:
        return _ToRead(array[1]), array[0]
    if array is x:
        raise TypeError(f"{type(carrier).__name__}.array() gave back the object itself")
    return source_of(array)


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


def refused(what: str, instead: str) -> ArrayNotSupportedError:
    """The error for what carries no array that can be converted exactly."""
    return ArrayNotSupportedError(f"{what} cannot be converted; {instead}", reason=what)


class Buffers(Carrier):
    """Whatever has the buffer protocol: memoryview, array.array, mmap, bytes."""

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

    def carries(self, x: Any) -> bool:
        return is_of(x, "xarray", "DataArray", "Variable")

    def array(self, x: Any) -> Any:
        return x.data  # of any framework, which says what it has against Dask's and sparse ones

    def rebuild(self, x: Any, array: Any) -> Any:
        like = x.copy(deep=False, data=array)
        like.encoding = {}  # says how the old values lie in a file; xarray's own arithmetic drops it, too
        return like


class Pandas(Carrier):
    """Series, indices, and tables of one numeric dtype."""

    def carries(self, x: Any) -> bool:
        if is_of(x, "pandas", "DataFrame"):
            dtypes = set(x.dtypes)
            return len(dtypes) == 1 and _is_number(dtypes.pop())
        return is_of(x, "pandas", "Series", "Index") and _is_number(x.dtype)

    def array(self, x: Any) -> Any:
        is_table = is_of(x, "pandas", "DataFrame")
        dtype = x.dtypes.iloc[0] if is_table else x.dtype
        if isinstance(dtype, np.dtype):
            values = x.to_numpy()
            apart = is_table and not np.shares_memory(values, x.iloc[:, 0].to_numpy())
            return (values, "the columns of the table lie apart") if apart and values.size else values
        if np.any(x.isna()):
            raise refused(f"values of pandas with nulls ({dtype})", "pass x.fillna(value) or x.dropna()")
        return x.to_numpy(dtype=dtype.numpy_dtype), f"pandas keeps {dtype} with a mask"

    def rebuild(self, x: Any, array: Any) -> Any:
        pandas = sys.modules["pandas"]
        if array.dtype.isbuiltin == 2:  # of ml_dtypes, in which pandas sees no numbers
            return array
        if is_of(x, "pandas", "DataFrame"):
            table = pandas.DataFrame(array, index=x.index, columns=x.columns)
            return _in_own_dtypes(table, x.dtypes.iloc[0]).__finalize__(x)
        if is_of(x, "pandas", "Index"):
            try:
                return _in_own_dtypes(pandas.Index(array, name=x.name), x.dtype)
            except NotImplementedError:  # no index of this dtype, as float16
                return array
        series = pandas.Series(array, index=x.index, name=x.name)
        return _in_own_dtypes(series, x.dtype).__finalize__(x)


def _in_own_dtypes(values: Any, dtype: Any) -> Any:
    """In pandas' own dtype (``Int64``), if it is that of the numbers."""
    if isinstance(dtype, np.dtype):
        return values
    numbers = values.dtypes.iloc[0] if values.ndim == 2 else values.dtype
    return values.astype(dtype) if dtype.numpy_dtype == numbers else values


def _is_number(dtype: Any) -> bool:
    """Not of categories, dates, text; of pandas' own dtypes those that have one of NumPy's."""
    own = not isinstance(dtype, np.dtype)
    return dtype.kind in "biufc" and (not own or hasattr(dtype, "numpy_dtype"))


class Polars(Carrier):
    """Series of numbers."""

    def carries(self, x: Any) -> bool:
        if not is_of(x, "polars", "Series"):
            return False
        return bool(x.dtype.is_integer() or x.dtype.is_float() or x.dtype == sys.modules["polars"].Boolean)

    def array(self, x: Any) -> Any:
        if x.null_count():
            raise refused("a series of polars with nulls", "pass x.fill_null(value) or x.drop_nulls()")
        try:
            return x.to_numpy(allow_copy=False)
        except RuntimeError:
            return x.to_numpy(), "polars keeps it in pieces or bits"

    def rebuild(self, x: Any, array: Any) -> Any:
        polars = sys.modules["polars"]
        like = polars.Series(x.name, array)
        return array if like.dtype == polars.Object else like


class SimpleItk(Carrier):
    """Images with a place in space."""

    def carries(self, x: Any) -> bool:
        return is_of(x, "SimpleITK", "Image")

    def array(self, x: Any) -> Any:
        sitk = sys.modules["SimpleITK"]
        if "label" in x.GetPixelIDTypeAsString():  # SimpleITK ends the process where these are read
            raise refused("a label map of SimpleITK", "it has no pixels; pass sitk.LabelMapToLabel(x)")
        ones = sitk.Image([1] * x.GetDimension(), x.GetPixelID(), x.GetNumberOfComponentsPerPixel())
        pixel = sitk.GetArrayFromImage(ones)
        shape = x.GetSize()[::-1] + pixel.shape[x.GetDimension() :]

        def pixels() -> np.ndarray:
            # A look at pixels that two images share drops the metadata of one: so it is at a second image.
            values: np.ndarray = sitk.GetArrayFromImage(sitk.Image(x))
            return values

        unread = Unread(shape, pixel.dtype, pixels)
        return unread, "SimpleITK lends no memory that outlives its image"

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

    def carries(self, x: Any) -> bool:
        return is_of(x, "PIL.Image", "Image")

    def array(self, x: Any) -> Any:
        if x.mode in ("P", "PA"):
            instead = 'its numbers stand for colours; pass x.convert("RGB")'
            raise refused(f"a picture of mode {x.mode}", instead)
        pixel = np.asarray(sys.modules["PIL.Image"].new(x.mode, (1, 1)))

        def pixels() -> np.ndarray:
            values = np.array(x)  # whose True is 255 in mode "1"
            return values.view(np.uint8) != 0 if values.dtype == bool else values

        unread = Unread((*x.size[::-1], *pixel.shape[2:]), pixel.dtype, pixels)
        return unread, "Pillow hands out a copy of its pixels"

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


class Files(Carrier):
    """Arrays of zarr and h5py."""

    def carries(self, x: Any) -> bool:
        return is_of(x, "zarr", "Array") or is_of(x, "h5py", "Dataset")

    def array(self, x: Any) -> Any:
        package = type(x).__module__.partition(".")[0]
        if package == "h5py" and not x:
            raise refused("a dataset of h5py whose file is closed", "open the file again")
        if x.shape is None:
            raise refused("an empty dataset of h5py", "it has no shape; pass an array with zero elements")
        return x, f"it is read from {'a zarr array' if package == 'zarr' else 'an h5py dataset'}"


BUFFERS, FILES = Buffers(), Files()

#: Root module of an object's class → the carrier to ask.
KINDS: dict[str, Carrier] = {
    "xarray": Xarray(),
    "SimpleITK": SimpleItk(),
    "PIL": Pillow(),
    "zarr": FILES,
    "h5py": FILES,
    "pandas": Pandas(),
    "polars": Polars(),
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
