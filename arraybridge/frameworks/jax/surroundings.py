"""Context managers within which JAX computes independently of the caller's trace, mesh and settings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from operator import attrgetter
from typing import Any

import jax
import jax.experimental
import numpy as np

__all__ = ["first_device", "guard", "isolate", "x64"]

#: Enables 64-bit dtypes. jax >= 0.8 has jax.enable_x64 (jax-ml/jax#32429); both affect only the current
#: thread.
x64 = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64

# jax 0.7.0 has jax.sharding.use_mesh instead.
_set_mesh = jax.set_mesh if hasattr(jax, "set_mesh") else jax.sharding.use_mesh
_NO_MESH = jax.sharding.Mesh(np.empty((), object), ())

# Settings under which JAX raises for some values or operations, and the values under which it does not.
_NEUTRAL_SETTINGS = (
    ("jax_debug_nans", jax.debug_nans, False),
    ("jax_debug_infs", jax.debug_infs, False),
    # JAX transfers the index of a slice to the device, and rows of an array that is sharded over several.
    ("jax_transfer_guard_host_to_device", jax.transfer_guard_host_to_device, "allow"),
    ("jax_transfer_guard_device_to_device", jax.transfer_guard_device_to_device, "allow"),
)


@contextmanager
def isolate(device: Any) -> Iterator[None]:
    """Let JAX compute eagerly and with 64-bit dtypes, regardless of the caller's trace, mesh and settings.

    Arrays that are not committed to a device stay on ``device``, a JAX device.
    """
    # In jax.jit, the result would be a traced value without eval_context.
    with x64(True), jax.core.eval_context(), jax.default_device(device), _neutral_settings():
        yield


def _neutral_settings() -> AbstractContextManager[Any]:
    """Return a context manager without a mesh and with `_NEUTRAL_SETTINGS`."""
    changes = [
        apply(value)
        for name, apply, value in _NEUTRAL_SETTINGS
        if getattr(jax.config, name) not in (value, None)
    ]
    has_mesh = not jax.sharding.get_abstract_mesh().empty
    if not changes and not has_mesh:
        return nullcontext()
    stack = ExitStack()
    for change in changes:
        stack.enter_context(change)
    if has_mesh:
        # Within jax.set_mesh, JAX rejects arrays that are committed to one device (google/orbax#3183, jax
        # 0.10).
        try:
            stack.enter_context(_set_mesh(_NO_MESH))
        except ValueError:  # within a named axis, such as that of jax.shard_map
            if hasattr(jax.sharding, "use_abstract_mesh"):  # jax >= 0.8
                stack.enter_context(jax.sharding.use_abstract_mesh(_NO_MESH.abstract_mesh))
    return stack


def guard(x: Any) -> AbstractContextManager[Any]:
    """Return a context manager for an operation on a JAX array, a sparse array, or a list of them.

    If one of them is a traced value, the operation becomes part of the caller's trace. Otherwise, it runs
    within `isolate`.
    """
    # A sparse array is a pytree of dense arrays.
    arrays = [x] if isinstance(x, jax.Array) else jax.tree_util.tree_leaves(x)
    if any(isinstance(array, jax.core.Tracer) for array in arrays):
        return x64(True)
    return isolate(first_device(arrays[0]))


def first_device(x: jax.Array) -> Any:
    """Return the JAX device of an array; if it has several, the first one of this process."""
    devices = x.sharding.device_set
    if len(devices) == 1:
        return next(iter(devices))
    return min(x.sharding.addressable_devices or devices, key=attrgetter("id"))
