"""JAX: immutable arrays on CPU, GPU and TPU; 64-bit dtypes kept whatever the x64 flag says."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np

from arraybridge.frameworks import hostmemory, loans
from arraybridge.frameworks.base import CPU, Framework, as_now, is_c_contiguous, refuse, refuse_dtype
from arraybridge.frameworks.jax import gradients as jax_autodiff
from arraybridge.frameworks.jax.memory import JaxPool, as_device, cpu_alone, jax_device, local_devices
from arraybridge.frameworks.parts import Fallback, Fast
from arraybridge.types import Device

# Of memory whose axes lie in another order JAX 0.7.1 makes wrong values, and 0.7.2 no array.
_HONOURS_ORDER = jax.__version_info__ >= (0, 8)
# jax.enable_x64, of 0.8 and later, is thread-local as a context manager.
_x64 = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64

#: What a thread may set for itself and changes results.
_SETTINGS = tuple(
    (
        functools.partial(getattr, jax.config, f"jax_{name}"),
        _x64 if name == "enable_x64" else getattr(jax, name),
    )
    for name in (
        *("enable_x64", "default_device", "default_matmul_precision", "default_prng_impl"),
        *("threefry_partitionable", "numpy_dtype_promotion"),
    )
)


# A private interface: the public from_dlpack spends 25 µs, most of it on a stream question that fails on the
# CPU and on canonicalising the dtype, which narrows 64-bit dtypes where x64 is off; the import itself takes 3
# (jax 0.10). The public function, under enable_x64, stands in where this one is missing.
try:
    from jax._src.lib import _jax

    _import_capsule: Callable[..., Any] | None = _jax.dlpack_managed_tensor_to_buffer
except (ImportError, AttributeError):
    _import_capsule = None

_DTYPES = hostmemory.PLAIN | hostmemory.DLPACK


# A kernel's shared memory is exhausted by the kernel's own size, and no cache brings it back. CUDA's
# errors come under several codes (INTERNAL, UNKNOWN, FAILED_PRECONDITION). What blames the call is none.
_OOM = re.compile(
    r"RESOURCE_EXHAUSTED: (?!.*[Ss]hared memory)"
    r"|(?!INVALID_ARGUMENT|NOT_FOUND|ALREADY_EXISTS|PERMISSION_DENIED|UNAUTHENTICATED|OUT_OF_RANGE|UNIMPLEMENTED"
    r"|DATA_LOSS)[A-Z_]+: .*(?:CUDA_ERROR_OUT_OF_MEMORY|hipErrorOutOfMemory|STATUS_ALLOC_FAILED"
    r"|[Ff]ailed to allocate|[Oo]ut of memory)",
    re.DOTALL,
)


class JaxFramework(Framework):
    name = "jax"
    all_pickle = False  # 64 bits are cut down to 32 where they are not enabled
    conforms = True
    alignment = hostmemory.ALIGNMENT
    mutable = False
    dtypes = _DTYPES

    def __init__(self) -> None:
        self.autodiff = jax_autodiff.AUTODIFF
        self.dlpack_device = 2
        self.fast = JaxFast()
        self.pool = JaxPool()

    def owns(self, x: Any) -> bool:
        return isinstance(x, jax.Array)

    def check(self, x: jax.Array) -> None:
        if isinstance(x, jax.core.Tracer):
            raise refuse(
                self, "a traced value", "it has no values yet; convert outside jax.jit, jax.grad and jax.vmap"
            )
        if x.is_deleted():
            instead = (
                "it was donated to a jitted function, or deleted; keep a copy of it, or do not donate it"
            )
            raise refuse(self, "a deleted array", instead)
        if jnp.issubdtype(x.dtype, jax.dtypes.extended):
            raise refuse_dtype(self, x.dtype, "pass jax.random.key_data(x)")
        if hostmemory.name_of(x.dtype) not in _DTYPES:
            raise refuse_dtype(self, x.dtype, 'pass x.astype("int8"), or an array of other numbers')
        if not x.is_fully_addressable:
            raise refuse(
                self, "an array that spans processes", "gather it first, e.g. with process_allgather"
            )

    def dtype_name(self, x: jax.Array) -> str:
        return hostmemory.name_of(x.dtype)

    def nbytes(self, x: jax.Array) -> int:
        return x.size * x.dtype.itemsize  # x.nbytes halves 64-bit dtypes where x64 is off (jax 0.7)

    def device_of(self, x: jax.Array) -> Device:
        if isinstance(x, jax.core.Tracer):
            return as_device(jax.devices()[0])
        devices = x.sharding.device_set
        return as_device(min(devices, key=lambda d: d.id) if len(devices) > 1 else next(iter(devices)))

    def must_copy(self, x: jax.Array) -> str:
        return "several devices hold a part of it each" if self.pool.is_scattered(x) else ""

    # -- host memory ------------------------------------------------------------------------------

    def host_view(self, x: jax.Array) -> np.ndarray:
        try:
            return np.asarray(memoryview(x))  # a seventh of the time that a capsule takes
        except (TypeError, ValueError, RuntimeError, BufferError, NotImplementedError):
            # Its axes lie in another order in memory, where np.asarray(x) would copy, or buffers have no
            # format for its dtype.
            return hostmemory.from_capsule(x.__dlpack__(), x.dtype)

    def to_host(self, x: jax.Array) -> np.ndarray:
        if self.device_of(x).kind == "cpu" and not self.pool.is_scattered(x):
            return super().to_host(x)
        # Not np.asarray(x): JAX keeps that copy beside the array, and nobody else may write to it.
        return hostmemory.writable_alias(np.asarray(self.to_device(x, CPU)))

    def from_host(self, view: np.ndarray, device: Device) -> jax.Array:
        if device.kind != "cpu":
            return super().from_host(view, device)
        capsule, native = hostmemory.capsule(hostmemory.writable_alias(view)), jax_device(device)
        if _import_capsule is not None:
            return _import_capsule(capsule, native, None)
        with _x64(True):
            return jax.dlpack.from_dlpack(hostmemory.importable(capsule), device=native)

    def cannot_stride(self, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> str:
        if is_c_contiguous(shape, strides, itemsize):
            return ""
        if not _HONOURS_ORDER:
            return "this JAX imports memory as C-contiguous, whatever its strides"
        axes = sorted(zip(strides, shape, strict=True), reverse=True)
        if is_c_contiguous(tuple(n for _, n in axes), tuple(s for s, _ in axes), itemsize):
            return ""
        return "it is no permutation of a compact array, and XLA knows no other strides"

    # -- devices ----------------------------------------------------------------------------------

    def devices(self) -> tuple[Device, ...]:
        return tuple(sorted(map(as_device, local_devices()), key=lambda d: (d.kind != "cpu", d.index)))

    def missing_device_reason(self) -> str:
        return "JAX finds no accelerator: install jax[cuda12] or jax[cuda13], and the card's driver."

    def to_device(self, x: jax.Array, device: Device) -> jax.Array:
        with _x64(True):  # what it copies is read late, and would show later changes of the source
            return jax.device_put(x, jax_device(device)).block_until_ready()

    def adopt(self, x: Any, source: Framework, device: Device) -> jax.Array:
        loans.release()
        # torch refuses to lend from a card that is not the current one.
        with source.selected(device), _x64(True):
            # Hands the producer JAX's stream for external events, and copies nothing.
            lent = jax.dlpack.from_dlpack(source.exported(x, device))
        if device.kind != "cpu" and lent.size:
            _lend_to_jax(x, lent, jax_device(device))
        return lent

    def settle(self, x: jax.Array) -> None:
        x.block_until_ready()

    # -- values -----------------------------------------------------------------------------------

    def copy(self, x: jax.Array) -> jax.Array:
        with _x64(True):
            return jax.block_until_ready(jnp.copy(x))

    def cast(self, x: jax.Array, dtype: str) -> jax.Array:
        with _x64(True):
            return jax.block_until_ready(x.astype(hostmemory.np_dtype(dtype)))

    # -- memory -----------------------------------------------------------------------------------

    def is_oom(self, error: BaseException) -> bool:
        # XlaRuntimeError, its older name, is the same class in every release that is supported.
        return isinstance(error, jax.errors.JaxRuntimeError) and _OOM.match(str(error)) is not None

    def concatenate(self, parts: list[jax.Array], axis: int) -> jax.Array:
        dtype = parts[0].dtype
        if dtype.name.startswith("float8"):  # of which XLA joins the numbers, and makes one NaN of all NaNs
            bits = [jax.lax.bitcast_convert_type(part, jnp.uint8) for part in parts]
            return jax.lax.bitcast_convert_type(jnp.concatenate(bits, axis), dtype)
        return super().concatenate(parts, axis)

    def selected(self, device: Device) -> AbstractContextManager[Any]:
        # Opening JAX takes most of the memory of every card: what nobody has used is left alone.
        return jax.default_device(jax_device(device)) if self.pool.is_started() else nullcontext()

    # -- between processes ------------------------------------------------------------------------

    def array_classes(self) -> tuple[type, ...]:
        # jax.Array is an abstract class; its arrays are of another one, which has no public name.
        return (jax.Array, *jax.Array.__subclasses__())

    def is_plain(self, x: jax.Array) -> bool:
        return not getattr(x, "weak_type", True) and len(x.devices()) == 1  # a key of jax.random has none

    # -- running functions ------------------------------------------------------------------------

    def array_namespace(self) -> Any:
        return jnp

    def thread_settings(self) -> Callable[[], AbstractContextManager[Any]]:
        return as_now(_SETTINGS)

    def annotation(self, name: str) -> AbstractContextManager[Any]:
        return jax.profiler.TraceAnnotation(name)

    def wide(self) -> AbstractContextManager[Any]:
        return _x64(True)

    def late_errors(self, cls: type) -> Callable[[Any], object] | None:
        return None if issubclass(cls, jax.core.Tracer) else getattr(cls, "block_until_ready", None)


class JaxFast(Fast):
    def types(self) -> tuple[type, ...]:
        return (type(jax.device_put(np.zeros(1, np.uint8), jax.local_devices(backend="cpu")[0])),)

    def facts(self, alignment: int) -> Callable[[jax.Array], Hashable]:
        alone, minds_order = cpu_alone(), alignment > 1

        def facts(x: jax.Array) -> Hashable:
            if x.is_deleted():
                raise Fallback
            if minds_order:
                memoryview(x)  # refused where its axes lie in another order, and of what has no buffer format
            shape = x.shape
            is_lent = bool(hostmemory.lent) and hostmemory.is_lent(x.unsafe_buffer_pointer())
            return x.dtype, shape if 0 in shape else len(shape), None if alone else x.sharding, is_lent

        return facts

    def view(self) -> Callable[[jax.Array], np.ndarray]:
        asarray = np.asarray

        def look(x: jax.Array) -> np.ndarray:
            # Not asarray(x): where JAX has to copy (other orders of axes, cards), it keeps the copy beside
            # the array for good, and nothing public tells it from a view. A memoryview is refused there.
            return asarray(memoryview(x))

        return look

    def export(self, alignment: int) -> Callable[[jax.Array], Any]:
        if cpu_alone():
            return lambda x: x.__dlpack__()
        cpu = jax.local_devices(backend="cpu")[0]

        def give(x: jax.Array) -> Any:
            if x.device is not cpu:
                raise Fallback
            return x.__dlpack__()

        return give

    def adopt(self, immutable: bool) -> Callable[[Any], jax.Array] | None:
        if _import_capsule is None or not _HONOURS_ORDER:
            return None
        cpu = jax.local_devices(backend="cpu")[0]
        import_capsule = _import_capsule

        def take(capsule: Any) -> jax.Array:
            return import_capsule(capsule, cpu, None)

        return take


def _lend_to_jax(x: Any, lent: jax.Array, device: Any) -> None:
    """Keep what JAX was lent until JAX has done what was queued when its array went.

    XLA gives such memory back as soon as nobody refers to the array, also where it is still to be read.
    """

    def begin() -> jax.Array:
        # Also inside of jit, where it would be a traced value.
        with jax.ensure_compile_time_eval(), jax.default_device(device):
            return jnp.zeros(()) + 1

    loans.keep_after(lent, x, begin, lambda y: y.block_until_ready(), lambda y: y.is_ready())
