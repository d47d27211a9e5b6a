"""Test helpers: import a framework or skip, and run a script in a separate process."""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import arraybridge
from arraybridge.carriers import registry as carrier_registry
from arraybridge.interface import registry

SCRIPTS = Path(__file__).parent / "scripts"

#: The mode of the emulated GPU ("lazy", "at-once" or "guarded", see tests/emulated_gpu); "" on other
#: machines.
EMULATED = os.environ.get("ARRAYBRIDGE_EMULATED_GPU", "")

#: The reason of skips on a machine with one GPU. tools/gpu_check_run.py counts "not applicable" separately.
ONE_GPU = "not applicable: requires two GPUs"


def required() -> frozenset[str]:
    """Return the frameworks in ARRAYBRIDGE_REQUIRE, whose absence is a failure instead of a skip."""
    return frozenset(
        filter(None, (name.strip() for name in os.environ.get("ARRAYBRIDGE_REQUIRE", "").split(",")))
    )


def require(name: str) -> Any:
    """Import a framework and return its module; skip the test (or the whole file) if it is not installed.

    If ARRAYBRIDGE_REQUIRE names the framework, its absence fails instead. For "pyclesperanto", the module
    is the package that the library chose. TensorFlow gets two CPU devices.

        torch = require("torch")
    """
    try:
        module = _import_pyclesperanto() if name == "pyclesperanto" else importlib.import_module(name)
    except ImportError as error:
        reason = f"{name} can't be imported: {error}"
        if name in required():
            pytest.fail(f"{reason} (required by ARRAYBRIDGE_REQUIRE)", pytrace=False)
        pytest.skip(reason, allow_module_level=True)
    if name == "tensorflow":
        _split_tensorflow_cpu(module)
    return module


def require_two_gpus() -> Any:
    """Return CuPy; skip the test on a machine with one GPU, where it does not apply."""
    cupy = require("cupy")
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip(ONE_GPU)
    return cupy


def jax_with(devices: int) -> Any:
    """Return JAX if it has at least this many CPU devices, which XLA_FLAGS sets; otherwise skip."""
    jax = require("jax")
    if len(jax.devices("cpu")) < devices:
        pytest.skip(f"XLA_FLAGS gives JAX fewer than {devices} CPU devices")
    return jax


def needs_kernels_of(*names: str) -> None:
    """Skip the test on an emulated GPU (tests/emulated_gpu) unless it runs the kernels of all of these.

    It compiles CuPy's own kernels. Those of PyTorch, XLA and CUDA's libraries are machine code for a GPU.

        needs_kernels_of("torch", "cuBLAS")
    """
    machine_code = [name for name in names if name != "cupy"]
    if machine_code and EMULATED:
        all_of = ", ".join(machine_code)
        pytest.skip(f"the emulated GPU cannot run kernels of {all_of}, which are machine code")


def _import_pyclesperanto() -> ModuleType:
    # The library must find an OpenCL platform before the package is imported.
    arraybridge.framework("pyclesperanto")
    for package in ("pyclesperanto", "pyclesperanto_prototype"):
        module = sys.modules.get(package)
        # Without a device, pyclesperanto is only partly imported.
        if module is not None and hasattr(module, "push"):
            return module
    raise ImportError("neither of its packages finds an OpenCL device")


def _split_tensorflow_cpu(tf: ModuleType) -> None:
    config: Any = tf.config
    (cpu,) = config.list_physical_devices("CPU")
    if config.get_logical_device_configuration(cpu) is not None:
        return
    try:
        config.set_logical_device_configuration(cpu, [config.LogicalDeviceConfiguration() for _ in range(2)])
    except RuntimeError:
        # TensorFlow has started already, with one device.
        return


def run_python(
    *arguments: str, env: dict[str, str] | None = None, timeout: float = 600, imported: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments in another process and return the result, also after a crash.

    It imports the same arraybridge as this process, and ``tests``. ``env`` adds to the environment; an
    empty value removes a variable. Warnings are errors there as well.

    With ``imported``, the process has imported PyTorch, JAX and TensorFlow already, but has not started them:
    it is a forked copy of one process, which saves up to ten seconds. Use this if the test is about neither
    imports nor variables that they read.

        done = run_python("-m", "arraybridge", "demo", env={"NO_COLOR": "1"})
    """
    environment = {**_environment(), **(env or {})}
    # Empty variables of this process may have a meaning, such as CUPY_ACCELERATORS.
    environment = {name: value for name, value in environment.items() if value or name not in (env or {})}
    # -P omits the current folder, which may be another copy of the package, from sys.path.
    command = [sys.executable, "-P", *arguments]
    if imported and hasattr(os, "fork") and sys.platform != "darwin":
        with tempfile.TemporaryDirectory() as folder:
            return _run_forked(command, environment, timeout, Path(folder))
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, check=False, env=environment
    )


def _environment() -> dict[str, str]:
    """Return the environment of processes that import the same arraybridge, and ``tests``."""
    package = importlib.util.find_spec("arraybridge")
    assert package is not None
    assert package.origin is not None
    paths = [str(Path(package.origin).parent.parent), str(SCRIPTS.parent.parent)]
    # Packages that tools/gpu_check.sh added for this Python stay importable.
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONWARNINGS": "error"}


def _run_forked(
    command: list[str], environment: dict[str, str], timeout: float, folder: Path
) -> subprocess.CompletedProcess[str]:
    files = [folder / "stdout", folder / "stderr"]
    for file in files:
        file.touch()
    server = _fork_server()
    try:
        print(json.dumps([command[2:], environment, *map(str, files)]), file=server.stdin, flush=True)
        if not select.select([server.stdout], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(command, timeout)
        exit_code = int(server.stdout.readline())
    except BaseException:
        _fork_server.cache_clear()
        os.killpg(server.pid, signal.SIGKILL)
        raise
    return subprocess.CompletedProcess(command, exit_code, *(file.read_text("utf-8") for file in files))


@cache
def _fork_server() -> Any:
    """Start tests/scripts/fork_server.py; it ends with this process."""
    server = subprocess.Popen(
        [sys.executable, "-P", "-u", str(SCRIPTS / "fork_server.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=_environment(),
        start_new_session=True,
    )
    atexit.register(server.communicate)  # closes its input
    return server


def tool(name: str) -> Any:
    """Return the module of a file in tools/; skip a test file if tools/ is not next to the tests."""
    file = SCRIPTS.parent.parent / "tools" / f"{name}.py"
    if not file.is_file():
        pytest.skip("there is no tools folder next to these tests", allow_module_level=True)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def output_of(*lines: str, env: dict[str, str] | None = None, imported: bool = False) -> str:
    """Return the output of a fresh process that runs these lines and exits successfully.

    See `run_python` for the options.

    assert output_of("import sys", "print('torch' in sys.modules)") == "False"
    """
    # Output before a fork or os._exit is printed once.
    environment = {"PYTHONUNBUFFERED": "1", **(env or {})}
    done = run_python("-c", "\n".join(lines), env=environment, imported=imported)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@contextmanager
def registry_kept() -> Iterator[None]:
    """Restore the registered frameworks and carriers at the end."""
    before, carriers = registry.instances(), carrier_registry._registered.copy()
    try:
        yield
    finally:
        carrier_registry._registered[:] = carriers
        for name, one in registry.instances().items():
            if name not in before:
                registry.unregister(name)
            elif before[name] is not one:
                registry.register(before[name], replace=True)
