"""Delete each part in a copy of the package, import all other modules, convert, and call a function.

The first argument is the copy, and each of the others a part: files or folders, relative to it. Prints the
name of each part.
"""

import importlib
import pkgutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch  # noqa: F401  # is imported once

COPY = Path(sys.argv[1])
REMOVED = COPY / "removed"
# Importing the other frameworks would take most of the time.
LEFT_OUT = tuple(f"arraybridge.frameworks.{name}" for name in ("cupy", "jax", "tensorflow", "pyclesperanto"))
LEFT_OUT += ("arraybridge.frameworks.mlx", "arraybridge.frameworks.paddle", "arraybridge.__main__")


def modules_of(package: Any) -> list[str]:
    found = pkgutil.walk_packages(package.__path__, f"{package.__name__}.", onerror=None)
    return [module.name for module in found if not module.name.startswith(LEFT_OUT)]


def check(part: str) -> None:
    import arraybridge

    assert Path(arraybridge.__file__).parent.parent == COPY
    for name in modules_of(arraybridge):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:  # a package that an optional part needs is not installed
            if str(error.name).startswith("arraybridge"):
                raise
    x = np.arange(6.0)
    assert arraybridge.convert_memory(x, "torch").tolist() == x.tolist()
    double = arraybridge.torch(output_type="input", oom_recovery="split")(lambda batch: batch["x"] * 2)
    with arraybridge.trace() as log:
        assert double({"x": x}).tolist() == (x * 2).tolist()
    assert log.events
    (result,) = arraybridge.device_map(double, [{"x": x}], ["cpu"])
    assert result.tolist() == (x * 2).tolist()
    print(part)


REMOVED.mkdir()
for part in sys.argv[2:]:
    files = sorted(COPY.glob(f"arraybridge/{part}"))
    assert files, part
    for file in files:
        file.rename(REMOVED / file.name)
    for name in [name for name in sys.modules if name.partition(".")[0] == "arraybridge"]:
        del sys.modules[name]
    importlib.invalidate_caches()
    check(part)
    for file in files:
        (REMOVED / file.name).rename(file)
