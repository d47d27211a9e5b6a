"""Private interfaces of JAX that the package uses, and the public replacements used without them."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

import arraybridge
from arraybridge.frameworks import dlpack_capsules
from tests.helpers import require


@pytest.mark.parametrize("dtype", ["float64", "int64", "float32", "bool"])
def test_public_import_shares_without_the_private_one(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    require("jax")
    from arraybridge.frameworks.jax import framework as module

    memory: Any = arraybridge.aligned((4, 3), dtype)
    memory[...] = np.arange(12).reshape(4, 3)
    monkeypatch.setattr(module, "_import_capsule", None)
    framework = module.JaxFramework()
    with pytest.raises(NotImplementedError):  # conversions then take the slow path
        framework.fast_path.fast_import(dlpack_capsules.capsule(memory))
    shared = framework.from_host(memory, arraybridge.Device("cpu", 0))
    assert shared.dtype == dtype
    assert shared.unsafe_buffer_pointer() == memory.ctypes.data
    np.testing.assert_array_equal(np.asarray(shared), memory)


def test_jax_is_queried_without_the_private_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    require("jax")
    monkeypatch.setitem(sys.modules, "jax._src.xla_bridge", None)
    monkeypatch.delattr(sys.modules["jax._src"], "xla_bridge")
    assert arraybridge.framework("jax").devices.is_started()
