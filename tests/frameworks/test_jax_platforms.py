"""JAX without CPU devices, as with JAX_PLATFORMS=cuda. Its CPU devices are disguised as GPUs."""

from __future__ import annotations

from tests.helpers import output_of, require

DISGUISE = (
    "import numpy as np, jax, arraybridge as ab",
    "jax.config.update('jax_platforms', 'cuda')",
    "from arraybridge.frameworks.jax import framework as module",
    "jax.config.update('jax_platforms', 'cpu')  # only now, since there is no GPU",
    "def as_gpu(native): return ab.Device('gpu', native.id)",
    "def no_cpu(): raise RuntimeError('Unknown backend cpu')",
    "module._as_device, module._cpu = as_gpu, no_cpu",
)


def test_arrays_are_transferred_without_cpu_devices() -> None:
    require("jax")
    printed = output_of(
        *DISGUISE,
        "to_host, gpus = ab.framework('jax').to_host, []",
        "for host in (np.arange(6.0).reshape(2, 3).T, np.full((), 2**40), np.zeros((0, 2), 'complex128')):",
        "    for options in ({}, {'gpu_id': 1}, {'device': 'gpu:2'}):",
        "        x = ab.convert_memory(host, 'jax', **options)",
        "        back = to_host(x)",
        "        assert x.dtype == back.dtype == host.dtype and back.flags.writeable",
        "        assert back.tobytes() == host.tobytes() and not np.shares_memory(back, np.asarray(x))",
        "        gpus.append(str(ab.device_of(x)))",
        "print(*gpus)",
        "print([str(device) for device in ab.devices('jax')])",
        "try: ab.convert_memory(host, 'jax', device='cpu')",
        "except ab.DeviceNotFoundError as error: print('jax has no device cpu here' in str(error))",
        env={"XLA_FLAGS": "--xla_force_host_platform_device_count=3"},
        imported=True,
    )
    assert printed.splitlines() == [
        " ".join(["gpu:0", "gpu:1", "gpu:2"] * 3),
        "['gpu:0', 'gpu:1', 'gpu:2']",
        "True",
    ]
