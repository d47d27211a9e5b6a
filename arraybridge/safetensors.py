"""Map and write ``.safetensors`` files, the checkpoints of models.

A file consists of the size of its header (8 bytes, little-endian), the header (a JSON object with the dtype,
the shape and the position of each tensor), and the values of the tensors without gaps between them.

JAX and TensorFlow share only memory that is aligned to 64 bytes. `save_safetensors` therefore pads the header
with spaces, so that the values start at a multiple of 64 bytes, and writes the tensors whose sizes are
multiples of 64 bytes first. The format permits both. Files of safetensors 0.8 are aligned to 8 bytes
(safetensors/safetensors#607).
"""

from __future__ import annotations

import errno
import json
import math
import mmap
import os
import shutil
import sys
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from io import BufferedWriter, FileIO
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeGuard
from uuid import uuid4

import numpy as np

from arraybridge.advice import Advice
from arraybridge.carriers.sources import source_of
from arraybridge.conversion.convert import convert_memory
from arraybridge.errors import (
    CheckpointError,
    DtypeNotSupportedError,
    MemoryConversionError,
    UnknownArrayError,
    note_on,
)
from arraybridge.formatting import one_of
from arraybridge.host import buffers, dtype_names
from arraybridge.host.file_maps import SafetensorsMap
from arraybridge.interface.unsupported import sparse_array_error
from arraybridge.validation import add_hints, file_path

__all__ = ["load_safetensors", "save_safetensors"]

#: Dtype in the format → NumPy's name.
_DTYPES = {
    "BOOL": "bool",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "U8": "uint8",
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}
_CODES = {name: code for code, name in _DTYPES.items()}
_METADATA = "__metadata__"
#: The largest size of a header in bytes. Other readers reject larger ones (safetensors 0.8).
_MAX_HEADER = 100_000_000


class _Tensor(NamedTuple):
    """A tensor in a file. ``begin`` and ``end`` count bytes from the end of the header."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    begin: int
    end: int


class _OpenFile(NamedTuple):
    """An open file whose header was checked. The values start at the byte ``start``."""

    path: Path
    file: FileIO
    start: int
    tensors: dict[str, _Tensor]


# -- load ----------------------------------------------------------------------------------------------


@add_hints
def load_safetensors(
    path: str | os.PathLike[str], mmap_mode: Literal["c", "r"] | None = "c"
) -> dict[str, np.ndarray[Any, Any]]:
    """Map a ``.safetensors`` file, and return its tensors as NumPy arrays.

    Only the header is read. The system reads values when they are used, and processes that map the same file
    share that memory. Pass the dict to `convert_tree`, or single arrays to `convert_memory`.

    PyTorch shares every tensor. JAX and TensorFlow share those that are aligned to 64 bytes, and copy the
    others: in files from `save_safetensors`, all tensors whose sizes are multiples of 64 bytes are aligned,
    and in files of other programs few are. Save such a file once with `save_safetensors` to avoid the copies.

    While arrays map the file, do not overwrite or truncate it in place: values may change, and access to
    truncated values crashes the process. Replacing the file, as `save_safetensors` does, is safe.

    Args:
        path: The file, or the index of a checkpoint that consists of several files in the same folder. The
            name of an index ends with ``.index.json``.
        mmap_mode: As for `numpy.load`. ``"c"`` maps copy-on-write: the arrays are writable, and writes change
            neither the file nor other processes. ``"r"`` maps read-only; PyTorch then copies. None
            reads the file into aligned memory instead of mapping it. Defaults to ``"c"``.

    Returns:
        The arrays by name, in the order of the header or index.

    Raises:
        CheckpointError: If a file is incomplete or inconsistent.
        DtypeNotSupportedError: If NumPy does not have a dtype, and ``ml_dtypes`` is not installed.
        ValueError: If ``mmap_mode`` is another mode.
        OSError: If a file cannot be opened or mapped.

    Example:
        >>> import numpy as np, tempfile
        >>> path = tempfile.mkdtemp() + "/model.safetensors"
        >>> save_safetensors(path, {"weight": np.ones((2, 2), "float32")})
        >>> convert_memory(load_safetensors(path)["weight"], "torch")
        tensor([[1., 1.],
                [1., 1.]])
    """
    if mmap_mode not in ("c", "r", None):
        raise ValueError(
            f"mmap_mode={mmap_mode!r} is not supported: files are never changed in place. Pass 'c'"
            " (copy-on-write), 'r' (read-only) or None (read into memory)."
        )
    path = file_path("path", path)
    places = _read_index(path) if path.name.endswith(".index.json") else None
    parts = [path] if places is None else list(dict.fromkeys(places.values()))
    with ExitStack() as stack:
        # All headers are checked before the first file is mapped.
        files = {part: _open(part, stack.enter_context(part.open("rb", buffering=0))) for part in parts}
        for name, part in (places or {}).items():
            if name not in files[part].tensors:
                raise _error(path, f"{part.name} does not contain the tensor {name!r}")
        arrays = {part: _load(file, mmap_mode) for part, file in files.items()}
    return arrays[path] if places is None else {name: arrays[part][name] for name, part in places.items()}


def _read_index(path: Path) -> dict[str, Path]:
    """Return the files of an index by the name of each tensor."""
    places = _parse(path.read_bytes(), path).get("weight_map")
    if not isinstance(places, dict):
        raise _error(path, "it has no object 'weight_map'")
    for file in places.values():
        # A file of the folder may be a symbolic link, as in the cache of huggingface_hub.
        is_name = isinstance(file, str) and file.isprintable() and file not in ("", ".", "..")
        if not is_name or Path(file).name != file:
            raise _error(path, f"{file!r} is not the name of a file in its folder")
    return {name: path.parent / file for name, file in places.items()}


def _open(path: Path, file: FileIO) -> _OpenFile:
    """Read and check the header of a file."""
    size = os.fstat(file.fileno()).st_size
    prefix = file.read(8)
    if len(prefix) < 8:
        raise _error(path, f"it has only {size} bytes")
    length = int.from_bytes(prefix, "little")
    if length > min(size - 8, _MAX_HEADER):
        raise _error(path, f"it has {size} bytes, but the size of its header is given as {length}")
    header = _parse(file.read(length), path)
    metadata = header.pop(_METADATA, None)
    if metadata is not None and not _is_dict_of_strings(metadata):
        raise _error(path, f"{_METADATA} is not an object of strings")
    tensors = {name: _read_entry(name, entry, path) for name, entry in header.items()}
    position = 0
    for begin, end, name in sorted((tensor.begin, tensor.end, name) for name, tensor in tensors.items()):
        if begin != position:
            relation = "overlaps the previous one" if begin < position else "follows a gap"
            raise _error(path, f"the tensor {name!r} {relation}")
        position = end
    start = 8 + length
    if start + position != size:
        raise _error(path, f"it has {size} bytes, but its header describes {start + position}")
    return _OpenFile(path, file, start, tensors)


def _parse(text: bytes, path: Path) -> dict[str, Any]:
    """Return the JSON object in ``text``, without repeated names and NaN, which `json.loads` accepts."""

    def check_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        members = dict(pairs)
        if len(members) < len(pairs):
            raise ValueError("a name occurs twice")
        return members

    def reject_constant(constant: str) -> None:
        raise ValueError(f"{constant} is not a number")

    try:
        parsed = json.loads(text.decode(), object_pairs_hook=check_names, parse_constant=reject_constant)
    except (ValueError, RecursionError) as error:
        raise _error(path, f"it is not valid JSON ({error})") from error
    if not isinstance(parsed, dict):
        raise _error(path, "it has no JSON object")
    return parsed


def _read_entry(name: str, entry: Any, path: Path) -> _Tensor:
    """Return the tensor that an entry of the header describes."""
    if not _is_entry(entry):
        raise _error(path, f"the entry of {name!r} needs a dtype, a shape and two data_offsets")
    code = entry["dtype"]
    shape = entry["shape"]
    begin, end = entry["data_offsets"]
    if code not in _DTYPES:
        raise DtypeNotSupportedError(
            f"Cannot load {path}: the tensor {name!r} has dtype {code}, which NumPy does not have.",
            reason=f"NumPy has no dtype {code}",
            advice="Load the file with safetensors.torch.load_file(path).",
        )
    dtype = _dtype(_DTYPES[code])
    # NumPy limits the number of axes, and the size even if one of the axes is empty.
    if len(shape) > buffers.MAX_RANK or math.prod(n or 1 for n in shape) * dtype.itemsize > sys.maxsize:
        raise _error(path, f"the shape of {name!r} is too large for NumPy")
    nbytes = math.prod(shape) * dtype.itemsize
    if end - begin != nbytes:
        raise _error(path, f"{name!r} has {end - begin} bytes instead of {nbytes}")
    return _Tensor(dtype, tuple(shape), begin, end)


def _is_entry(entry: Any) -> bool:
    """Return whether an entry has all fields, and each has the right type."""
    if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str):
        return False
    offsets = entry.get("data_offsets")
    return _are_sizes(entry.get("shape")) and _are_sizes(offsets) and len(offsets) == 2


def _are_sizes(values: Any) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _is_dict_of_strings(values: Any) -> bool:
    return isinstance(values, Mapping) and all(isinstance(one, str) for one in (*values, *values.values()))


def _dtype(name: str) -> np.dtype[Any]:
    """Return the NumPy dtype, in little-endian byte order."""
    try:
        dtype = dtype_names.np_dtype(name)
    except DtypeNotSupportedError as error:
        error.advise(Advice("Run pip install ml_dtypes."))
        raise
    # The dtypes of ml_dtypes always have the byte order of the machine.
    return dtype.newbyteorder("<") if dtype.isbuiltin == 1 else dtype


def _error(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"Cannot load {path}: {reason}.", reason=reason, advice="Download it or save it again."
    )


def _load(opened: _OpenFile, mmap_mode: Literal["c", "r"] | None) -> dict[str, np.ndarray]:
    """Return the arrays of a file."""
    if mmap_mode is not None:
        return _map(opened, mmap_mode)
    arrays = {}
    for name, tensor in opened.tensors.items():
        arrays[name] = buffers.allocate_aligned(tensor.shape, tensor.dtype)
        memory = arrays[name].reshape(-1).view(np.uint8).data
        opened.file.seek(opened.start + tensor.begin)
        while memory:
            count = opened.file.readinto(memory)  # at most 2 GiB on Linux
            if not count:
                raise _error(opened.path, "it became shorter while it was read")
            memory = memory[count:]
    return arrays


def _map(opened: _OpenFile, mmap_mode: Literal["c", "r"]) -> dict[str, np.ndarray]:
    """Return arrays that map a file. It remains mapped as long as one of them exists."""
    options: dict[str, Any] = {"access": mmap.ACCESS_COPY if mmap_mode == "c" else mmap.ACCESS_READ}
    if sys.version_info >= (3, 13) and os.name == "posix":
        options["trackfd"] = False  # otherwise each map keeps a file descriptor open, python/cpython#78502
        if mmap_mode == "c":
            # Without this flag, Linux rejects writable maps that are larger than the memory (mmap(2)).
            flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
            prot = mmap.PROT_READ | mmap.PROT_WRITE
            options |= {"access": mmap.ACCESS_DEFAULT, "flags": flags, "prot": prot}
    try:
        mapped = SafetensorsMap(opened.file.fileno(), 0, **options)
    except OSError as error:
        if mmap_mode == "c" and error.errno == errno.ENOMEM:
            note_on(error, 'Pass mmap_mode="r" to map a file that is larger than the memory.')
        raise
    arrays = {}
    for name, (dtype, shape, begin, end) in opened.tensors.items():
        # Unlike np.ndarray, np.frombuffer keeps users from closing the map while arrays refer to it.
        values = np.frombuffer(mapped, dtype, (end - begin) // dtype.itemsize, opened.start + begin)
        arrays[name] = values.reshape(shape)
    return arrays


# -- save ----------------------------------------------------------------------------------------------


@add_hints
def save_safetensors(
    path: str | os.PathLike[str], arrays: Mapping[str, Any], metadata: Mapping[str, str] | None = None
) -> None:
    """Write arrays of any framework to a ``.safetensors`` file, aligned so that other frameworks share them.

    Every reader of the format opens the file. The arrays are written one at a time, under another name in the
    same folder. The complete file then replaces an existing one: if saving fails, the old file stays. Arrays
    that map it keep their values, and ``path`` may be the file that the arrays map. Windows cannot replace a
    file that is mapped.

    Args:
        path: The file to write. A symbolic link remains one, and an existing file keeps its permissions.
        arrays: A dict of arrays, carriers or NumPy scalars. Tensors may require grad; their graph is not
            saved. Arrays that share memory are written separately.
        metadata: A dict of strings that other programs can read from the header. Some expect
            ``{"format": "pt"}``. Defaults to None.

    Raises:
        DtypeNotSupportedError: If the format does not have a dtype, such as complex128.
        UnknownArrayError: If a value is not an array. Nested dicts have to be flattened.
        MemoryConversionError: If an array cannot be converted to NumPy for another reason. The message
            contains its name.
        TypeError: If ``arrays`` or ``metadata`` is not a dict, or a name or text is not a string.
        ValueError: If a name is ``"__metadata__"`` or not valid Unicode, or the header exceeds 100 MB.
        OSError: If the file cannot be written.

    Example:
        >>> import tempfile, torch
        >>> model = torch.nn.Linear(2, 3)
        >>> path = tempfile.mkdtemp() + "/model.safetensors"
        >>> save_safetensors(path, model.state_dict(), {"format": "pt"})
        >>> load_safetensors(path)["weight"].shape
        (3, 2)
    """
    if not isinstance(arrays, Mapping):
        raise TypeError(
            f"arrays must be a dict of arrays, not {type(arrays).__name__}."
            " Call save_safetensors(path, arrays)."
        )
    if metadata is not None and not _is_dict_of_strings(metadata):
        raise TypeError(
            "metadata must be a dict of strings. Convert other values with str() or json.dumps()."
        )
    path = Path(os.path.realpath(file_path("path", path)))
    if path.exists() and not path.is_file():
        raise FileExistsError(f"{path} is not a file. Pass the name of a file.")
    tensors = _place_tensors({_check_name(name): _describe(name, x) for name, x in arrays.items()})
    header = _header({name: tensors[name] for name in arrays}, metadata)
    temporary = path.with_name(f".{uuid4().hex}.safetensors.tmp")
    try:
        with temporary.open("xb") as file:
            with suppress(OSError):  # there is no old file, or the file system has no permissions
                shutil.copymode(path, temporary)
            file.write(header)
            for name, tensor in tensors.items():
                _write(file, name, arrays[name], tensor)
            file.flush()
            os.fsync(file.fileno())
        _replace(path, temporary)
    except OSError as error:
        if error.filename == str(temporary):  # the user passed the path
            error.filename = str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)


def _check_name(name: Any) -> str:
    if not isinstance(name, str):
        raise TypeError(f"Names of tensors must be strings, not {name!r}. Convert the keys with str().")
    if name == _METADATA:
        raise ValueError(f"The format reserves the name {_METADATA}. Pass metadata= instead.")
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"The name {name!r} cannot be encoded as UTF-8. Choose another name.") from error
    return name


def _describe(name: str, x: Any) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Return the dtype and the shape of an array, without converting it."""
    try:
        source, array = source_of(x)
        if source.sparse.layout(array):
            raise sparse_array_error(source, array)
        source.check(array)
        dtype = source.dtype_name(array)
        if dtype not in _CODES:
            raise DtypeNotSupportedError(
                f"Cannot save dtype {dtype}: safetensors files do not have it.",
                source_type=source.name,
                reason=f"safetensors files have no dtype {dtype}",
                advice=f"Cast it to {one_of(_CODES)}.",
            )
        return _dtype(dtype), source.shape(array)
    except MemoryConversionError as error:
        if isinstance(error, UnknownArrayError) and isinstance(x, dict):
            error.advise(Advice('flatten nested dicts first, as in {"layer.weight": x}'))
        error.add_path(f"[{name!r}]")
        raise


def _place_tensors(described: dict[str, tuple[np.dtype[Any], tuple[int, ...]]]) -> dict[str, _Tensor]:
    """Return the tensors with their positions, in the order of the file.

    Tensors whose sizes are multiples of 64 bytes come first, so they are aligned to 64 bytes. All are aligned
    to the size of their elements.
    """

    def rank(name: str) -> tuple[bool, int]:
        dtype, shape = described[name]
        return math.prod(shape) * dtype.itemsize % buffers.ALIGNMENT != 0, -dtype.itemsize

    tensors = {}
    position = 0
    for name in sorted(described, key=rank):
        dtype, shape = described[name]
        end = position + math.prod(shape) * dtype.itemsize
        tensors[name] = _Tensor(dtype, shape, position, end)
        position = end
    return tensors


def _header(tensors: dict[str, _Tensor], metadata: Mapping[str, str] | None) -> bytes:
    """Return the start of the file, up to the values, which begin at a multiple of 64 bytes."""
    entries: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    for name, (dtype, shape, begin, end) in tensors.items():
        entries[name] = {
            "dtype": _CODES[dtype_names.name_of(dtype)],
            "shape": shape,
            "data_offsets": (begin, end),
        }
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % buffers.ALIGNMENT)
    if len(text) > _MAX_HEADER:
        raise ValueError(
            f"The header has {len(text)} bytes, and readers accept {_MAX_HEADER}. Save several files."
        )
    return len(text).to_bytes(8, "little") + text


def _write(file: BufferedWriter, name: str, x: Any, tensor: _Tensor) -> None:
    """Write the values of an array."""
    try:
        values = convert_memory(x, "numpy", grad="detach")
    except MemoryConversionError as error:
        error.add_path(f"[{name!r}]")
        raise
    name_of = dtype_names.name_of
    if (name_of(values.dtype), values.shape) != (name_of(tensor.dtype), tensor.shape):
        raise ValueError(f"The array {name!r} changed while it was saved.")
    little_endian = np.asarray(values, tensor.dtype, order="C")
    file.write(little_endian.reshape(-1).view(np.uint8).data)


def _replace(path: Path, temporary: Path) -> None:
    """Replace a file, if it exists, with the temporary one."""
    try:
        temporary.replace(path)
    except PermissionError as error:
        if os.name == "nt":
            note_on(error, "Windows cannot replace a file while arrays map it. Save under another name.")
        raise
