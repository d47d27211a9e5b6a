"""Hide the installed frameworks, except those in the folder of this file and those listed in SHOWN."""

import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path

HERE = Path(__file__).parent
FRAMEWORKS = {"cupy", "jax", "jaxlib", "pyclesperanto", "pyclesperanto_prototype", "tensorflow", "torch"}
FRAMEWORKS |= {"triton"}  # comes with PyTorch
SHOWN = os.environ.get("SHOWN", "").split()
HIDDEN = {name for name in FRAMEWORKS if name not in SHOWN and not (HERE / name).exists()}


class Without(PathFinder):
    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        # The folder of the program comes first in sys.path, and its modules are never hidden.
        own = Path.cwd() / f"{fullname}.py"
        if fullname in HIDDEN and not own.exists():
            return None
        return super().find_spec(fullname, path, target)


sys.meta_path[:] = [Without if finder is PathFinder else finder for finder in sys.meta_path]
