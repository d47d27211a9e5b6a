"""JAX arrays on CPU, GPU and TPU, with 64-bit dtypes preserved regardless of the x64 flag."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import entry_points
from typing import Any

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
from jax.extend import backend as jax_backend

from arraybridge import hardware
from arraybridge.device import Device
from arraybridge.errors import ArrayNotSupportedError, DtypeNotSupportedError
from arraybridge.frameworks import (
    dlpack_capsules,
    dtype_names,
    host_memory,
    keep_alives,
    read_only_memory,
    resource_exhausted,
)
from arraybridge.frameworks.accelerator_memory import Holding, Memory
from arraybridge.frameworks.base import FastPath, Framework, nbytes_of_parts
from arraybridge.frameworks.batching import IndexedBatching
from arraybridge.frameworks.component import component
from arraybridge.frameworks.device_access import CPU, Devices
from arraybridge.frameworks.installation import can_find
from arraybridge.frameworks.interchange import Interchange, is_c_contiguous
from arraybridge.frameworks.jax import gradients as jax_autodiff
from arraybridge.frameworks.jax.sparse import JaxSparse, is_sparse
from arraybridge.frameworks.runtime import Observation, OneLevel, Pytree, Runtime
from arraybridge.frameworks.unsupported import (
    is_sub_byte,
    sparse_array_error,
    sub_byte_dtype_error,
    unsupported_array_error,
    unsupported_dtype_error,
)
from arraybridge.reasons import Cause, Reason

# If the axes are not in C order in memory, JAX 0.7.1 imports wrong values, and JAX 0.7.2 raises.
_RESPECTS_ORDER = jax.__version_info__ >= (0, 8)
# jax >= 0.8 has jax.enable_x64, which affects only the current thread if used as a context manager.
_x64 = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64

# This private function imports a capsule in 3 µs; the public from_dlpack takes 25 µs (jax 0.10). The public
# function queries a stream, which fails on the CPU, and canonicalizes the dtype, which narrows 64-bit dtypes
# if x64 is off. If the private function is missing, the public one is called under enable_x64.
try:
    from jax._src.lib import _jax

    _import_capsule: Callable[..., Any] | None = _jax.dlpack_managed_tensor_to_buffer
except (ImportError, AttributeError):
    _import_capsule = None

_DTYPES = dtype_names.PLAIN | dtype_names.DLPACK

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


def _current_x64() -> bool:
    return bool(jax.config.jax_enable_x64)


def _current_default_device() -> Any:
    return jax.config.jax_default_device


def _current_matmul_precision() -> Any:
    return jax.config.jax_default_matmul_precision


def _identifier(device: Any) -> int:
    """Return the ID of a JAX device."""
    return int(device.id)


def _identifier_of_replica(replica: jax.Array) -> int:
    return _identifier(replica.device)


def _cpus_first(device: Device) -> tuple[bool, int]:
    return device.kind != "cpu", device.index


class JaxObservation(Observation):
    """Dtype, bytes, address and device of JAX arrays."""

    is_asynchronous = True
    narrows_64_bit = True

    def read(self, owner: Framework, x: jax.Array) -> tuple[Any, int, int | None, Device]:
        address = None if owner.devices.is_scattered(x) else x.unsafe_buffer_pointer()
        return x.dtype, x.size * x.dtype.itemsize, address, owner.devices.device_of(x)


class JaxInterchange(Interchange):
    """Export and import of JAX arrays."""

    all_pickle = False  # if x64 is off, unpickling narrows 64-bit dtypes
    dlpack_device = 2

    def copy_reason(self, x: jax.Array) -> Cause | None:
        if self.framework.devices.is_scattered(x) and not x.is_fully_replicated:
            return _SEVERAL_SHARDS
        return None

    def cannot_stride(self, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> Cause | None:
        if is_c_contiguous(shape, strides, itemsize):
            return None
        if not _RESPECTS_ORDER:
            return _STRIDES_IGNORED
        axes = sorted(zip(strides, shape, strict=True), reverse=True)
        if is_c_contiguous(tuple(n for _, n in axes), tuple(s for s, _ in axes), itemsize):
            return None
        return _NOT_COMPACT

    def import_from(self, x: Any, source: Framework, device: Device) -> jax.Array:
        keep_alives.release()
        # PyTorch exports only from the current GPU.
        with source.devices.selected(device), _x64(True):
            # JAX passes its stream for external events to the producer, and does not copy.
            imported = jax.dlpack.from_dlpack(source.interchange.export(x, device))
        if device.kind != "cpu" and imported.size:
            _keep_for_jax(x, imported, self.framework.devices.native_device(device))
        return imported

    def export(self, x: jax.Array, device: Device) -> Any:
        # JAX cannot export an array that spans several devices.
        replica = self.framework.devices.replica(x, device)
        return x if replica is None else replica

    def block_until_ready(self, x: jax.Array) -> None:
        x.block_until_ready()

    def is_plain(self, x: jax.Array) -> bool:
        # A jax.random key has no weak_type.
        return not getattr(x, "weak_type", True) and len(x.devices()) == 1


class JaxRuntime(Runtime):
    """JAX's settings, pytrees and array namespace."""

    observation = JaxObservation()

    settings = (
        (_current_x64, _x64),
        (_current_default_device, jax.default_device),
        (_current_matmul_precision, jax.default_matmul_precision),
    )

    def open_pytree(self, x: Any) -> Pytree | None:
        pairs, structure = jax.tree_util.tree_flatten_with_path(x, is_leaf=OneLevel())
        if jax.tree_util.treedef_is_leaf(structure):
            return None
        places = [jax.tree_util.keystr(path) for path, _ in pairs]
        return Pytree([child for _, child in pairs], places, structure, structure.unflatten)

    def array_classes(self) -> tuple[type, ...]:
        # jax.Array is abstract, and the class of its instances has no public name.
        return (jax.Array, *jax.Array.__subclasses__())

    def array_namespace(self) -> Any:
        return jnp

    def annotation(self, name: str) -> AbstractContextManager[Any]:
        return jax.profiler.TraceAnnotation(name)

    def x64_context(self) -> AbstractContextManager[Any]:
        return _x64(True)

    def late_errors(self, cls: type) -> Callable[[Any], object] | None:
        return None if issubclass(cls, jax.core.Tracer) else getattr(cls, "block_until_ready", None)


class JaxDevices(Devices):
    """The devices of all JAX backends of this process."""

    def device_of(self, x: jax.Array) -> Device:
        if isinstance(x, jax.core.Tracer):
            return _as_device(_default_device())
        try:
            devices = x.sharding.device_set
        except AttributeError:
            if not is_sparse(x):
                raise
            # jax.tree.map can replace the values with any object.
            values = jax.tree_util.tree_leaves(x)[:1]
            return self.device_of(values[0]) if values and isinstance(values[0], jax.Array) else CPU
        return _as_device(min(devices, key=_identifier) if len(devices) > 1 else next(iter(devices)))

    def replica(self, x: jax.Array, device: Device) -> jax.Array | None:
        if not self.is_scattered(x) or not x.is_fully_replicated:
            return None
        replicas = sorted((shard.data for shard in x.addressable_shards), key=_identifier_of_replica)
        return next((x for x in replicas if _as_device(x.device) == device), replicas[0])

    def available(self) -> tuple[Device, ...]:
        return tuple(sorted(map(_as_device, _local_devices()), key=_cpus_first))

    def accelerators(self) -> tuple[str, ...]:
        # CUDA and ROCm devices both have the platform "gpu", but the version string of their client names the
        # actual platform.
        versions = [f"{x.platform} {x.client.platform_version}".lower() for x in _local_devices()]
        kinds = {"cuda": "cuda", "rocm": "rocm", "tpu": "tpu", "metal": "mps", "oneapi": "xpu"}
        return tuple(kind for word, kind in kinds.items() if any(word in version for version in versions))

    def missing_device_reason(self) -> str:
        return "JAX finds no accelerator. Install jax[cuda12] or jax[cuda13], and the driver of the GPU."

    def to_device(self, x: jax.Array, device: Device) -> jax.Array:
        with _x64(True):  # device_put may still read the source when it returns
            placed = jax.device_put(x, self.native_device(device)).block_until_ready()
        # If a replica is on the device, device_put returns it without a copy.
        return self.framework.copy(placed) if device in self._devices_of(x) else placed

    def _devices_of(self, x: jax.Array) -> list[Device]:
        return [_as_device(native) for native in x.sharding.device_set]

    def selected(self, device: Device) -> AbstractContextManager[Any]:
        # Starting JAX allocates most of the memory of every GPU, so an unused JAX is not started.
        return jax.default_device(self.native_device(device)) if self.is_started() else nullcontext()

    def native_device(self, device: Device) -> Any:
        if device is CPU:
            return _cpu()
        return next(native for native in _local_devices() if _as_device(native) == device)

    def is_started(self) -> bool:
        try:  # this function is private, because every public one starts JAX
            from jax._src import xla_bridge

            return xla_bridge.backends_are_initialized()
        except (ImportError, AttributeError):
            return True  # this lets callers query JAX

    def is_scattered(self, x: jax.Array) -> bool:
        if isinstance(x, jax.core.Tracer):
            return False  # jax >= 0.10: a tracer has no `sharding`
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
        return _as_device(x) if isinstance(x, jax.Device) else None

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
        # In every supported release, XlaRuntimeError is an older name for this class.
        return isinstance(error, jax.errors.JaxRuntimeError) and self.is_oom_text(str(error))

    def is_oom_text(self, text: str) -> bool:
        if text.startswith(_EXHAUSTED):
            return resource_exhausted.is_memory(text.removeprefix(_EXHAUSTED))
        return _OOM.match(text) is not None and not resource_exhausted.is_other(text)

    def free_cache(self, device: Device | None, compiled: bool = False) -> int:
        # XLA's allocator never returns memory to the GPU. Only compiled programs can be freed.
        if not compiled or not self.framework.devices.is_started():
            return 0
        gpus = [d for d in _local_devices() if device is None or _as_device(d) == device]
        before = sum(_bytes_in_use(d) for d in gpus)
        jax.clear_caches()
        return max(0, before - sum(_bytes_in_use(d) for d in gpus))

    def synchronize(self) -> None:
        if not self.framework.devices.is_started():
            return
        # JAX has no function that waits for all work. A device runs its work in order, so a new computation
        # finishes last.
        jax.block_until_ready(
            [_jitted_add_one(jax.device_put(np.float32(0), device)) for device in _local_devices()]
        )
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
        if not _loses_nans(x):
            return super().slice_axis(x, axis, start, stop)
        size = len(range(*slice(start, stop).indices(x.shape[axis])))
        return _slice_of_bits(x, start, axis=axis % x.ndim, size=size)

    def unstack(self, x: jax.Array) -> list[jax.Array]:
        if not _loses_nans(x):
            return super().unstack(x)
        return [self.slice_axis(x, 0, i, i + 1).reshape(x.shape[1:]) for i in range(x.shape[0])]

    def concatenate(self, parts: list[jax.Array], axis: int) -> jax.Array:
        if not _loses_nans(parts[0]):
            return super().concatenate(parts, axis)
        return _from_bits(super().concatenate([_bits(part) for part in parts], axis), parts[0].dtype)

    def stack(self, planes: list[jax.Array]) -> jax.Array:
        if not _loses_nans(planes[0]):
            return super().stack(planes)
        return _from_bits(super().stack([_bits(plane) for plane in planes]), planes[0].dtype)


class JaxFastPath(FastPath):
    """Fast conversions of JAX arrays on the CPU."""

    def fast_types(self) -> tuple[type, ...]:
        # type(jnp.zeros(())) is not used, because inside jax.jit, the array would be a tracer and become part
        # of the program. The other subclasses of jax.Array are jax.random keys, which have no buffer.
        return tuple(cls for cls in jax.Array.__subclasses__() if hasattr(cls, "unsafe_buffer_pointer"))

    def plan_key(self, x: jax.Array, alignment: int) -> Hashable:
        if x.is_deleted():
            raise NotImplementedError
        if alignment > 1:
            memoryview(x)  # raises unless the axes are in C order and the dtype has a buffer format
        shape = x.shape
        is_shared_read_only = bool(read_only_memory.exported_ranges) and read_only_memory.is_shared_read_only(
            x.unsafe_buffer_pointer()
        )
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
        return np.asarray(memoryview(x))

    def fast_export(self, x: jax.Array) -> Any:
        if not _has_only_one_cpu() and x.device is not _cpu():
            raise NotImplementedError
        return x.__dlpack__()

    def fast_import(self, capsule: Any) -> jax.Array:
        if _import_capsule is None or not _RESPECTS_ORDER:
            raise NotImplementedError
        return _import_capsule(capsule, _cpu(), None)


class JaxFramework(Framework):
    """JAX, whose arrays are ``jax.Array`` objects."""

    name = "jax"
    alignment = host_memory.ALIGNMENT
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
        return isinstance(x, jax.Array) or is_sparse(x)

    def check(self, x: jax.Array) -> None:
        if is_sparse(x):
            raise sparse_array_error(self, x)
        if isinstance(x, jax.core.Tracer):
            raise unsupported_array_error(
                self,
                "a traced value",
                "it has no values yet. Convert outside jax.jit, jax.grad and jax.vmap, or in a function"
                " decorated with @torch(grad='flow') or @tensorflow(grad='flow'), which works inside them",
            )
        if x.is_deleted():
            instead = (
                "it was donated to a jitted function, or deleted. Copy it before that, or do not donate it"
            )
            raise unsupported_array_error(self, "a deleted array", instead)
        if dtype_names.name_of(x.dtype) not in _DTYPES:
            raise _unsupported_dtype_error(self, x)
        if not x.is_fully_addressable:
            raise unsupported_array_error(
                self,
                "an array that spans processes",
                "its other parts are in other processes. Gather it first, for example with"
                " jax.experimental.multihost_utils.process_allgather",
            )

    def dtype_name(self, x: jax.Array) -> str:
        return dtype_names.name_of(x.dtype)

    def nbytes(self, x: jax.Array) -> int:
        if is_sparse(x):
            return nbytes_of_parts(self, x)
        # x.nbytes of a 64-bit dtype is too small if x64 is off (jax 0.7).
        return x.size * x.dtype.itemsize

    def host_view(self, x: jax.Array) -> np.ndarray:
        replica = self.devices.replica(x, CPU)
        if replica is not None:
            x = replica
        try:
            return np.asarray(memoryview(x))  # seven times as fast as a capsule
        except (TypeError, ValueError, RuntimeError, BufferError, NotImplementedError):
            # Either the axes are not in C order in memory, so that np.asarray(x) would copy, or the dtype
            # has no buffer format.
            return dlpack_capsules.from_capsule(x.__dlpack__(), x.dtype)

    def to_host(self, x: jax.Array) -> np.ndarray:
        if self.devices.device_of(x).kind == "cpu" and not self.interchange.copy_reason(x):
            return super().to_host(x)
        # np.asarray(x) would return a copy that must not be written to, because `x` keeps a reference to it.
        # The array that to_device returns is new.
        return read_only_memory.writable_alias(np.asarray(self.devices.to_device(x, CPU)))

    def from_host(self, view: np.ndarray, device: Device) -> jax.Array:
        if device.kind != "cpu":
            return super().from_host(view, device)
        capsule = dlpack_capsules.capsule(view)
        native = self.devices.native_device(device)
        if _import_capsule is not None:
            return _import_capsule(capsule, native, None)
        with _x64(True):
            return jax.dlpack.from_dlpack(dlpack_capsules.Importable(capsule), device=native)

    def copy(self, x: jax.Array) -> jax.Array:
        if is_sparse(x):
            return jax.tree_util.tree_map(self.copy, x)
        with _x64(True):
            return jax.block_until_ready(jnp.copy(x))

    def cast(self, x: jax.Array, dtype: str) -> jax.Array:
        with _x64(True):
            return jax.block_until_ready(x.astype(dtype_names.np_dtype(dtype)))


def _unsupported_dtype_error(framework: Framework, x: jax.Array) -> DtypeNotSupportedError:
    """Return the error for an array whose dtype other frameworks lack, with advice for that kind of dtype."""
    name = dtype_names.name_of(x.dtype)
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        return unsupported_dtype_error(
            framework,
            x.dtype,
            "their elements are random keys, not numbers; pass the data of the key, {}",
            "jax.random.key_data({x})",
        )
    if is_sub_byte(name):
        return sub_byte_dtype_error(framework, name)
    return unsupported_dtype_error(
        framework,
        x.dtype,
        "no other framework has this dtype; pass {}, which may round the values",
        '{x}.astype("float32")',
    )


def _loses_nans(x: jax.Array) -> bool:
    """Return whether XLA may change the bits of NaNs when it slices or joins arrays of this dtype.

    XLA computes float8 in a wider dtype: for joins in JAX 0.10, and for slices of float8_e5m2 in JAX 0.12.
    Joins of bfloat16 make signaling NaNs quiet in JAX 0.10.
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


def _keep_for_jax(x: Any, imported: jax.Array, device: Any) -> None:
    """Keep ``x`` alive until JAX finishes the work that is pending when ``imported`` is freed."""

    def begin() -> jax.Array:
        # Without compile-time evaluation, the result would be a traced value inside jax.jit.
        with jax.ensure_compile_time_eval(), jax.default_device(device):
            return jnp.zeros(()) + 1

    keep_alives.keep_until_done(imported, x, begin, jax.block_until_ready)


def _add_one(x: jax.Array) -> jax.Array:
    return x + 1


_jitted_add_one = jax.jit(_add_one)


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
    """Return whether a single CPU device is the only device of this process."""
    return [device.platform for device in _local_devices()] == ["cpu"]


@functools.cache
def _plugins() -> list[str]:
    """Return the names of the installed JAX plug-ins, which add accelerators."""
    return [point.name for point in entry_points(group="jax_plugins")]


def _cpu_count() -> int:
    """Return the number of CPU devices that JAX has, or will have when it starts."""
    count = jax.config.jax_num_cpu_devices
    if count > 0:
        return count
    flag = re.search(r"xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    return int(flag.group(1)) if flag else 1


def _bytes_in_use(device: Any) -> int:
    return int((device.memory_stats() or {}).get("bytes_in_use", 0))


@functools.cache
def _as_device(device: Any) -> Device:
    if device.platform == "cpu":
        return Device("cpu", device.id)
    number = device.local_hardware_id
    return Device("gpu", device.id if number is None else number, str(device.device_kind))
