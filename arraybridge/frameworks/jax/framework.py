"""JAX arrays on CPU, GPU and TPU, with 64-bit dtypes preserved regardless of the x64 flag."""

from __future__ import annotations

import functools
import math
import os
import re
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext, suppress
from importlib.metadata import entry_points
from operator import attrgetter
from typing import Any

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
from jax.extend import backend as jax_backend

from arraybridge import hardware
from arraybridge.device import Device
from arraybridge.errors import ArrayNotSupportedError, DtypeNotSupportedError
from arraybridge.frameworks.jax import gradients as jax_autodiff
from arraybridge.frameworks.jax.sparse import JaxSparse, is_sparse
from arraybridge.frameworks.jax.surroundings import first_device, guard, isolate, x64
from arraybridge.host import buffers, dlpack_capsules, dtype_names, read_only_memory
from arraybridge.interface import keep_alives, resource_exhausted, unsupported
from arraybridge.interface.batching import IndexedBatching
from arraybridge.interface.component import component
from arraybridge.interface.devices import CPU, Devices
from arraybridge.interface.framework import FastPath, Framework, NoPlanError, native_errors
from arraybridge.interface.installation import can_find
from arraybridge.interface.interchange import Interchange, is_c_contiguous
from arraybridge.interface.memory import Holding, Memory
from arraybridge.interface.runtime import OneLevel, Pytree, Runtime
from arraybridge.reasons import Cause, Reason

# If the axes are not in C order in memory, JAX 0.7.1 imports wrong values (jax-ml/jax#17784), and JAX 0.7.2
# raises.
_RESPECTS_ORDER = jax.__version_info__ >= (0, 8)
# This private function imports a capsule in 3 µs; the public from_dlpack takes 25 µs (jax 0.10). The public
# function queries a stream, which fails on the CPU, and canonicalizes the dtype, which narrows 64-bit dtypes
# if x64 is off (jax-ml/jax#12904). If the private function is missing, the public one is called under
# enable_x64.
try:
    from jax._src.lib import _jax

    _import_capsule: Callable[..., Any] | None = _jax.dlpack_managed_tensor_to_buffer
except (ImportError, AttributeError):
    _import_capsule = None

# This module is private, because every public function starts JAX, jax-ml/jax#23320. An import in each call
# would take 3 µs.
_xla_bridge: Any = None
with suppress(ImportError):
    from jax._src import xla_bridge

    _xla_bridge = xla_bridge

_DTYPES = dtype_names.PLAIN | dtype_names.DLPACK
# The dtypes that JAX's functions narrow if x64 is off.
_WIDE_DTYPES = frozenset(map(np.dtype, ("int64", "uint64", "float64", "complex128")))

# Reasons that have no details, so each is created only once.
_SEVERAL_SHARDS = Cause(Reason.SEVERAL_SHARDS)
_STRIDES_IGNORED = Cause(Reason.STRIDES_IGNORED)
_NOT_COMPACT = Cause(Reason.NOT_COMPACT)

_EXHAUSTED = "RESOURCE_EXHAUSTED: "
_OOM = re.compile(
    r"(?:INTERNAL|UNKNOWN|FAILED_PRECONDITION): .*(?:CUDA_ERROR_OUT_OF_MEMORY|hipErrorOutOfMemory"
    r"|STATUS_ALLOC_FAILED|[Ff]ailed to allocate|[Oo]ut of memory|cu[A-Z]\w+ allocation failed)"
    r"|[^\n]*gpu\w+Create[^\n]* failed: cu[A-Z]\w+ allocation failed",
    re.DOTALL,
)


def _has_cpu() -> bool:
    """Return whether JAX has CPU devices, without starting JAX. JAX_PLATFORMS=cuda disables them."""
    platforms = jax.config.jax_platforms
    return not platforms or "cpu" in platforms.split(",")


def _setting(name: str) -> Callable[[], Any]:
    """Return a function that returns the current value of one of JAX's settings."""
    return functools.partial(getattr, jax.config, name)


class JaxInterchange(Interchange):
    """Export and import of JAX arrays."""

    all_pickle = False  # if x64 is off, unpickling narrows 64-bit dtypes (jax-ml/jax#11895)
    dlpack_device = 2

    def address(self, x: jax.Array) -> int:
        return 0 if self.framework.devices.is_scattered(x) else int(x.unsafe_buffer_pointer())

    def copy_reason(self, x: jax.Array) -> Cause | None:
        if self.framework.devices.is_scattered(x) and not x.is_fully_replicated:
            return _SEVERAL_SHARDS
        return None

    def can_read_into(self, x: jax.Array, view: np.ndarray) -> bool:
        return self.copy_reason(x) is not None and self.framework.devices.device_of(x).kind == "cpu"

    def read_into(self, x: jax.Array, view: np.ndarray) -> None:
        framework = self.framework
        is_on_host = framework.devices.device_of(x).kind == "cpu"
        read = framework.host_view if is_on_host else framework.to_host
        for shard in x.addressable_shards:
            if shard.replica_id == 0:
                buffers.copy_into(view[shard.index], read(shard.data))

    def cannot_stride(self, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> Cause | None:
        if is_c_contiguous(shape, strides, itemsize):
            return None
        if not _RESPECTS_ORDER:
            return _STRIDES_IGNORED
        # JAX imports any permutation of a compact array (jax >= 0.8, jax-ml/jax#25066).
        axes = sorted(zip(strides, shape, strict=True), reverse=True)
        if is_c_contiguous(tuple(n for _, n in axes), tuple(s for s, _ in axes), itemsize):
            return None
        return _NOT_COMPACT

    def check_copy(self, x: jax.Array) -> None:
        _check_not_deleted(self.framework, x)

    check_castable = check_copy

    def import_from(self, x: Any, source: Framework, device: Device) -> jax.Array:
        keep_alives.release()
        native = self.framework.devices.native_device(device)
        # PyTorch exports only from the current GPU (pytorch/pytorch#195721).
        with source.devices.select(device), isolate(native):
            # JAX passes its stream for external events to the producer, and does not copy.
            imported = jax.dlpack.from_dlpack(source.interchange.export(x, device))
        if device.kind != "cpu" and imported.size:
            run_last = functools.partial(_run_last, native)
            keep_alives.keep_until_done(imported, x, run_last, self.block_until_ready)
        return imported

    def export(self, x: jax.Array, device: Device) -> Any:
        # JAX cannot export an array that spans several devices (ArrayImpl.__dlpack__ in jax 0.10).
        replica = self.framework.devices.replica(x, device)
        return x if replica is None else replica

    def block_until_ready(self, x: jax.Array) -> None:
        x.block_until_ready()

    def is_plain(self, x: jax.Array) -> bool:
        # A jax.random key has no weak_type.
        return not getattr(x, "weak_type", True) and len(x.devices()) == 1


class JaxRuntime(Runtime):
    """JAX's settings, pytrees and array namespace, and the properties of arrays that traces read."""

    is_asynchronous = True
    namespace = "jax.numpy"
    narrows_64_bit = True
    settings = (
        (_setting("jax_enable_x64"), x64),
        (_setting("jax_default_device"), jax.default_device),
        (_setting("jax_default_matmul_precision"), jax.default_matmul_precision),
    )

    def observe(self, x: jax.Array) -> tuple[Any, int, int | None, Device]:
        devices = x.sharding.device_set
        dtype = x.dtype
        if len(devices) > 1 and not isinstance(x, jax.core.Tracer):
            return dtype, _nbytes(x), None, self.framework.devices.device_of(x)
        address = x.unsafe_buffer_pointer()  # raises for traced arrays
        # `x.size` would call two more Python functions.
        return dtype, math.prod(x.shape) * dtype.itemsize, address, _as_device(*devices)

    def open_pytree(self, x: Any) -> Pytree | None:
        pairs, structure = jax.tree_util.tree_flatten_with_path(x, is_leaf=OneLevel())
        if jax.tree_util.treedef_is_leaf(structure):
            return None
        places = [jax.tree_util.keystr(path) for path, _ in pairs]
        return Pytree([child for _, child in pairs], places, structure, structure.unflatten)

    def array_classes(self) -> tuple[type, ...]:
        # jax.Array is abstract (jax-ml/jax#12421), and the class of its instances has no public name.
        return (jax.Array, *jax.Array.__subclasses__())

    def annotation(self, name: str) -> AbstractContextManager[Any]:
        return jax.profiler.TraceAnnotation(name)

    def device_guard(self, x: Any) -> AbstractContextManager[Any]:
        return guard(x)

    def x64_context(self, enabled: bool = True) -> AbstractContextManager[Any]:
        return x64(enabled)

    def narrows(self, x: jax.Array) -> bool:
        # Most dtypes are narrower. Keys of jax.random are not numbers.
        return x.dtype.itemsize >= 8 and x.dtype in _WIDE_DTYPES and not jax.config.jax_enable_x64

    def late_errors(self, cls: type) -> Callable[[Any], object] | None:
        return None if issubclass(cls, jax.core.Tracer) else getattr(cls, "block_until_ready", None)


class JaxDevices(Devices):
    """The devices of all JAX backends of this process."""

    def device_of(self, x: jax.Array) -> Device:
        if isinstance(x, jax.core.Tracer):
            return _as_device(_default_device())
        try:
            return _as_device(first_device(x))
        except AttributeError:
            if not is_sparse(x):
                raise
            # jax.tree.map can replace the values with any object.
            values = jax.tree_util.tree_leaves(x)[:1]
            return self.device_of(values[0]) if values and isinstance(values[0], jax.Array) else CPU

    def replica(self, x: jax.Array, device: Device) -> jax.Array | None:
        if not self.is_scattered(x) or not x.is_fully_replicated:
            return None
        replicas = sorted((shard.data for shard in x.addressable_shards), key=attrgetter("device.id"))
        return next((x for x in replicas if _as_device(x.device) == device), replicas[0])

    def available(self) -> tuple[Device, ...]:
        # "cpu" sorts before "gpu".
        return tuple(sorted(map(_as_device, _local_devices()), key=attrgetter("kind", "index")))

    def default_device(self) -> Device:
        return CPU if self.framework.has_host else _as_device(_default_device())

    def accelerators(self) -> tuple[str, ...]:
        # CUDA and ROCm devices both have the platform "gpu", but the version string of their client names the
        # actual platform (jax-ml/jax#33238 proposes a public name).
        versions = [f"{x.platform} {x.client.platform_version}".lower() for x in _local_devices()]
        kinds = {"cuda": "cuda", "rocm": "rocm", "tpu": "tpu", "metal": "mps", "oneapi": "xpu"}
        return tuple(kind for word, kind in kinds.items() if any(word in version for version in versions))

    def missing_device_reason(self) -> str:
        return "JAX finds no accelerator. Install jax[cuda12] or jax[cuda13], and the driver of the GPU."

    def to_device(self, x: jax.Array, device: Device) -> jax.Array:
        is_sharded = self.framework.interchange.copy_reason(x) is not None
        if is_sharded and device.kind == "cpu":
            return self.framework.from_host(self.framework.to_host(x), device)
        native = self.native_device(device)
        with isolate(native):  # device_put may still read the source when it returns (jax 0.10)
            placed = jax.device_put(x, native).block_until_ready()
        if is_sharded:
            # If `x` is sharded over a mesh, the result of device_put keeps this type, and the next operation
            # fails (jax-ml/jax#31793, jax 0.10). Its only shard has the right type.
            shard: jax.Array = placed.addressable_shards[0].data
            return shard
        # If a replica is on the device, device_put returns it without a copy (jax 0.10, no issue found).
        return self.framework.copy(placed) if native in x.sharding.device_set else placed

    def select(self, device: Device) -> AbstractContextManager[Any]:
        # Starting JAX allocates most of the memory of every GPU (jax-ml/jax#16724), so an unused JAX is not
        # started.
        return jax.default_device(self.native_device(device)) if self.is_started() else nullcontext()

    def native_device(self, device: Device) -> Any:
        if device is CPU:
            return _cpu()
        return next(native for native in _local_devices() if _as_device(native) == device)

    def is_started(self) -> bool:
        try:
            return bool(_xla_bridge.backends_are_initialized())
        except AttributeError:  # the private name is missing
            return True  # this lets callers query JAX

    def starts_with_next_array(self) -> bool:
        if self.is_started():
            return False
        try:  # no public function reports transformations, which do not start JAX, jax-ml/jax#18544
            from jax._src import core

            return core.trace_state_clean()
        except (ImportError, AttributeError):
            return False

    def is_scattered(self, x: jax.Array) -> bool:
        if isinstance(x, jax.core.Tracer):
            return False  # jax >= 0.10: a tracer has no `sharding`, jax-ml/jax#15908
        try:
            return len(x.sharding.device_set) > 1
        except AttributeError:
            if not is_sparse(x):
                raise
            return any(
                self.is_scattered(part)
                for part in jax.tree_util.tree_leaves(x)
                if isinstance(part, jax.Array)
            )

    def visible_devices(self) -> tuple[Device, ...]:
        # Starting JAX creates a context on every GPU and, by default, allocates most of its memory. Only JAX
        # can count other accelerators, such as TPUs and AMD GPUs.
        if self.is_started() or can_find("libtpu") or any("cuda" not in name for name in _plugins()):
            return self.available()
        cpus = (Device("cpu", i) for i in range(_cpu_count()))
        return (*cpus, *(Device("gpu", gpu.index) for gpu in (hardware.gpus() if _plugins() else ())))

    def read_device(self, x: Any) -> Device | None:
        if not isinstance(x, jax.Device):
            return None
        if x.process_index != x.client.process_index():
            raise ValueError(f"{x!r} belongs to another process. Pass a device of jax.local_devices().")
        return _as_device(x)

    def check_move(self, x: jax.Array, device: Device) -> None:
        if not isinstance(x, jax.core.Tracer):
            return
        raise ArrayNotSupportedError(
            f"Cannot move a traced JAX value to {device}: traced values have no device, so the requested"
            f" device must be JAX's default device, {self.device_of(x)}.",
            reason="the requested device differs from the device of the trace",
            advice="Remove device= and gpu_id=, and pass jax.device_put(x, device) to the traced function.",
        )


class JaxMemory(Memory):
    """Memory of XLA's allocators, and JAX's out-of-memory errors."""

    def is_oom(self, error: BaseException) -> bool:
        # In every supported release, XlaRuntimeError is an older name for this class (jax-ml/jax#25007).
        return isinstance(error, jax.errors.JaxRuntimeError) and self.is_oom_text(str(error))

    def is_oom_text(self, text: str) -> bool:
        if text.startswith(_EXHAUSTED):
            return resource_exhausted.is_memory(text.removeprefix(_EXHAUSTED))
        return _OOM.match(text) is not None and not resource_exhausted.is_other(text)

    def free_cache(self, device: Device | None, compiled: bool = False) -> int:
        # XLA's allocator never returns memory to the GPU (jax-ml/jax#1222). Only compiled programs can be
        # freed.
        if not compiled or not self.framework.devices.is_started():
            return 0
        gpus = [d for d in _local_devices() if device is None or _as_device(d) == device]
        before = sum(_bytes_in_use(d) for d in gpus)
        jax.clear_caches()
        return max(0, before - sum(_bytes_in_use(d) for d in gpus))

    def synchronize(self) -> None:
        if not self.framework.devices.is_started():
            return
        # JAX has no function that waits for all work (jax-ml/jax#4335). A device runs its work in order, so a
        # new computation finishes last.
        jax.block_until_ready(list(map(_run_last, _local_devices())))
        jax.block_until_ready([x for x in jax.live_arrays() if not x.is_deleted()])

    def usage(self) -> list[Holding]:
        rows = []
        for device in _local_devices() if self.framework.devices.is_started() else ():
            stats = device.memory_stats()
            if stats:  # CPUs report no statistics
                used = stats["bytes_in_use"]
                pool = stats.get("pool_bytes")
                cached = None if pool is None else max(0, pool - used)
                peak = stats.get("peak_bytes_in_use")
                rows.append(Holding(str(_as_device(device)), "jax", used, cached, peak))
        return rows

    def free_memory_of(self, device: Device) -> int:
        stats = self.framework.devices.native_device(device).memory_stats() or {}
        unused = int(stats.get("bytes_limit", 0) - stats.get("bytes_in_use", 0))
        # JAX's limit is a share of the GPU's memory, part of which other programs may occupy.
        return min(unused, super().free_memory_of(device) or unused)

    def oom_error(self) -> Exception:
        return jax.errors.JaxRuntimeError(
            "RESOURCE_EXHAUSTED: Out of memory allocating 2147483648 bytes. (simulated)"
        )


class JaxBatching(IndexedBatching):
    """Functions that split and join JAX arrays and preserve the bits of NaNs."""

    def slice_axis(self, x: jax.Array, axis: int, start: int, stop: int) -> jax.Array:
        if not isinstance(x, jax.core.Tracer) and not x.is_fully_addressable:
            what = "a JAX array that spans processes"
            raise unsupported.cannot_split_error(self.framework, what, "{x}.addressable_shards[0].data")
        if not _loses_nans(x):
            return super().slice_axis(x, axis, start, stop)
        size = len(range(*slice(start, stop).indices(x.shape[axis])))
        with guard(x):
            return _slice_of_bits(x, start, axis=axis % x.ndim, size=size)

    def unstack(self, x: jax.Array) -> list[jax.Array]:
        if not _loses_nans(x):
            return super().unstack(x)
        with guard(x):
            rows = [_slice_of_bits(x, i, axis=0, size=1) for i in range(x.shape[0])]
            return [row.reshape(x.shape[1:]) for row in rows]

    def _join(
        self, name: str, on_host: Callable[..., np.ndarray], arrays: list[jax.Array], axis: int
    ) -> jax.Array:
        join = getattr(jnp, name)
        with guard(arrays):
            if not _loses_nans(arrays[0]):
                return join(arrays, axis=axis)
            return _from_bits(join([_bits(x) for x in arrays], axis=axis), arrays[0].dtype)


#: The exceptions of JAX for arrays that it cannot export or import.
_ERRORS: tuple[type[Exception], ...] = native_errors()


class JaxFastPath(FastPath):
    """Fast conversions of JAX arrays on the CPU."""

    def fast_types(self) -> tuple[type, ...]:
        # type(jnp.zeros(())) is not used, because inside jax.jit, the array would be a tracer and become part
        # of the program. The other subclasses of jax.Array are jax.random keys, which have no buffer.
        return tuple(cls for cls in jax.Array.__subclasses__() if hasattr(cls, "unsafe_buffer_pointer"))

    def plan_key(self, x: jax.Array, alignment: int) -> Hashable:
        if x.is_deleted():
            raise NoPlanError
        is_shared_read_only = False
        try:
            if alignment > 1:
                memoryview(x)  # raises unless the axes are in C order and the dtype has a buffer format
            if read_only_memory.exported_ranges:
                is_shared_read_only = read_only_memory.is_shared_read_only(x.unsafe_buffer_pointer())
        except _ERRORS as error:
            raise NoPlanError from error
        shape = x.shape
        return (
            x.dtype,
            shape if 0 in shape else len(shape),
            _has_only_one_cpu() or x.sharding,
            is_shared_read_only,
        )

    def fast_view(self, x: jax.Array) -> np.ndarray:
        # If JAX has to copy (the axes are not in C order, or the memory is on a GPU), the array keeps a
        # reference to the result of np.asarray(x), and no public attribute distinguishes this copy from a
        # view. In these cases, memoryview raises.
        try:
            return np.asarray(memoryview(x))
        except _ERRORS as error:
            raise NoPlanError from error

    def fast_export(self, x: jax.Array) -> Any:
        try:
            if not _has_only_one_cpu() and x.device is not _cpu():
                raise NoPlanError
            return x.__dlpack__()
        except _ERRORS as error:
            raise NoPlanError from error

    def fast_import(self, capsule: Any) -> jax.Array:
        if _import_capsule is None or not _RESPECTS_ORDER:
            raise NoPlanError
        return _import_capsule(capsule, _cpu(), None)


class JaxFramework(Framework):
    """JAX, whose arrays are ``jax.Array`` objects."""

    name = "jax"
    has_host = _has_cpu()
    alignment = buffers.ALIGNMENT
    mutable = False
    dtypes = _DTYPES
    autodiff = jax_autodiff.AUTODIFF
    sparse = JaxSparse()
    interchange = component(JaxInterchange)
    runtime = component(JaxRuntime)
    devices = component(JaxDevices)
    memory = component(JaxMemory)
    batching = component(JaxBatching)
    fast_path = component(JaxFastPath)

    def owns(self, x: Any) -> bool:
        # A traced jax.Ref is a Tracer, but not a jax.Array.
        return isinstance(x, (jax.Array, jax.core.Tracer)) or is_sparse(x)

    def check(self, x: jax.Array) -> None:
        if is_sparse(x):
            raise unsupported.sparse_array_error(self, x)
        if isinstance(x, jax.core.Tracer):
            raise unsupported.array_error(
                self,
                "a traced JAX value",
                "it has no values yet",
                "Convert outside jax.jit, jax.grad and jax.vmap, or in a function decorated with"
                " @torch(grad='flow') or @tensorflow(grad='flow'), which works inside them.",
            )
        _check_not_deleted(self, x)
        if dtype_names.name_of(x.dtype) not in _DTYPES:
            raise _dtype_error(self, x)
        if not x.is_fully_addressable and not x.is_fully_replicated:
            raise _several_processes_error(self)

    def dtype_name(self, x: jax.Array) -> str:
        return dtype_names.name_of(x.dtype)

    def nbytes(self, x: jax.Array) -> int:
        return super().nbytes(x) if is_sparse(x) else _nbytes(x)

    def host_view(self, x: jax.Array) -> np.ndarray:
        replica = self.devices.replica(x, CPU)
        if replica is not None:
            x = replica
        try:
            return np.asarray(memoryview(x))  # seven times as fast as a capsule
        except (TypeError, ValueError, RuntimeError, BufferError, NotImplementedError):
            # Either the axes are not in C order in memory, so that np.asarray(x) would copy, or the dtype
            # has no buffer format.
            return dlpack_capsules.from_capsule(x.__dlpack__())

    def to_host(self, x: jax.Array) -> np.ndarray:
        is_on_host = self.devices.device_of(x).kind == "cpu"
        if self.interchange.copy_reason(x):
            # np.asarray(x) would copy the values twice, and `x` would keep one of the copies
            # (jax-ml/jax#26216, jax 0.10).
            values = buffers.allocate_aligned(x.shape, x.dtype)
            self.interchange.read_into(x, values)
            return values
        if is_on_host:
            return super().to_host(x)
        if not self.has_host:
            return buffers.copy_aligned(np.asarray(x))
        # np.asarray(x) would return a copy that must not be written to, because `x` keeps a reference to it.
        # The array that to_device returns is new.
        return read_only_memory.writable_alias(np.asarray(self.devices.to_device(x, CPU)))

    def from_host(self, view: np.ndarray, device: Device) -> jax.Array:
        if not self.has_host:
            native = self.devices.native_device(device)
            with isolate(native):  # device_put may still read the source when it returns (jax 0.10)
                return jax.device_put(view, native).block_until_ready()
        if device.kind != "cpu":
            return super().from_host(view, device)
        capsule = dlpack_capsules.capsule(view)
        native = self.devices.native_device(device)
        if _import_capsule is not None:
            return _import_capsule(capsule, native, None)
        with x64(True):
            return jax.dlpack.from_dlpack(dlpack_capsules.Importable(capsule), device=native)

    def copy(self, x: jax.Array) -> jax.Array:
        if is_sparse(x):
            return jax.tree_util.tree_map(self.copy, x)
        with guard(x):
            # device_put(may_alias=False) may still alias NumPy memory (jax 0.10, jax-ml/jax#37830).
            return jax.block_until_ready(jnp.copy(x))

    def cast(self, x: jax.Array, dtype: str) -> jax.Array:
        with guard(x):
            return jax.block_until_ready(x.astype(dtype_names.np_dtype(dtype)))


def _dtype_error(framework: Framework, x: jax.Array) -> DtypeNotSupportedError:
    """Return the error for an array whose dtype other frameworks lack, with advice for that kind of dtype."""
    name = dtype_names.name_of(x.dtype)
    what = f"a JAX array of dtype {name}"
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        return unsupported.dtype_error(
            framework,
            what,
            "its elements are random keys, not numbers",
            "Pass the data of the key, {}.",
            "jax.random.key_data({x})",
        )
    if unsupported.is_sub_byte(name):
        return unsupported.sub_byte_dtype_error(framework, what, name)
    return unsupported.dtype_error(
        framework,
        what,
        "no other framework has this dtype",
        "Pass {}, which may round the values.",
        '{x}.astype("float32")',
    )


def _check_not_deleted(framework: Framework, x: jax.Array) -> None:
    if isinstance(x, jax.core.Tracer) or not x.is_deleted():
        return
    raise unsupported.array_error(
        framework,
        "a deleted JAX array",
        "it was donated to a jitted function, or deleted",
        "Copy it before that, or do not donate it.",
    )


def _several_processes_error(framework: Framework) -> ArrayNotSupportedError:
    """Return the error for an array that has parts in other processes."""
    from jax.experimental import multihost_utils  # noqa: F401  # the expression needs this module

    return unsupported.array_error(
        framework,
        "a JAX array that spans processes",
        "its other parts are in other processes",
        "Pass {}, in all processes.",
        "jax.experimental.multihost_utils.process_allgather({x}, tiled=True)",
    )


def _nbytes(x: jax.Array) -> int:
    """Return the size of an array, or of its parts in this process, without replicas."""
    # x.nbytes of a 64-bit dtype is too small if x64 is off (jax 0.7).
    if isinstance(x, jax.core.Tracer) or x.is_fully_addressable:
        return x.size * x.dtype.itemsize
    sizes = {str(shard.index): shard.data.size for shard in x.addressable_shards}
    return sum(sizes.values()) * x.dtype.itemsize


def _loses_nans(x: jax.Array) -> bool:
    """Return whether XLA may change the bits of NaNs when it slices or joins arrays of this dtype.

    XLA computes float8 in a wider dtype: for joins in JAX 0.10, and for slices of float8_e5m2 in JAX 0.12.
    Joins of bfloat16 make signaling NaNs quiet in JAX 0.10 (conversions too, jax-ml/ml_dtypes#162).
    """
    return dtype_names.name_of(x.dtype) in dtype_names.DLPACK


def _bits(x: jax.Array) -> jax.Array:
    """Return the bits of the elements as unsigned integers."""
    return jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))


def _from_bits(bits: jax.Array, dtype: Any) -> jax.Array:
    return jax.lax.bitcast_convert_type(bits, dtype)


@functools.partial(jax.jit, static_argnames=("axis", "size"))
def _slice_of_bits(x: jax.Array, start: Any, *, axis: int, size: int) -> jax.Array:
    """Return ``size`` rows from ``start`` along ``axis``, and preserve the bits of NaNs.

    The function is compiled, so that XLA copies only these rows.
    """
    return _from_bits(jax.lax.dynamic_slice_in_dim(_bits(x), start, size, axis), x.dtype)


_jitted_negative = jax.jit(jnp.negative)


def _run_last(device: Any) -> jax.Array:
    """Start a computation on a device, and return its result, which is ready after all earlier work."""
    with isolate(device):
        return _jitted_negative(jax.device_put(np.float32(0), device))


def _local_devices() -> list[Any]:
    """Return JAX's objects for the devices of this process, on all backends."""
    return [device for backend in jax_backend.backends().values() for device in backend.local_devices()]


def _default_device() -> Any:
    """Return JAX's default device, which holds arrays that are not committed to a device."""
    default = jax.config.jax_default_device
    if isinstance(default, str):
        return jax.local_devices(backend=default)[0]
    return jax.local_devices()[0] if default is None else default


@functools.cache
def _cpu() -> Any:
    return jax.local_devices(backend="cpu")[0]


@functools.cache
def _has_only_one_cpu() -> bool:
    """Return whether a single CPU device is the only device of all processes."""
    backends = jax_backend.backends().values()
    return [device.platform for backend in backends for device in backend.devices()] == ["cpu"]


@functools.cache
def _plugins() -> list[str]:
    """Return the names of the installed JAX plug-ins, which add accelerators."""
    return [point.name for point in entry_points(group="jax_plugins")]


def _cpu_count() -> int:
    """Return the number of CPU devices that JAX has, or will have when it starts."""
    if not _has_cpu():
        return 0
    count = jax.config.jax_num_cpu_devices
    if count > 0:
        return count
    flag = re.search(r"xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    return int(flag.group(1)) if flag else 1


def _bytes_in_use(device: Any) -> int:
    return int((device.memory_stats() or {}).get("bytes_in_use", 0))


@functools.cache
def _as_device(device: Any) -> Device:
    # The IDs of a second process begin at 2048. A device of another process has no local number.
    number = device.id if device.local_hardware_id is None else device.local_hardware_id
    if device.platform == "cpu":
        return Device("cpu", number) if number else CPU
    return Device("gpu", number, str(device.device_kind))
