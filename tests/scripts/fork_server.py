"""Run programs in forked copies of this process, which has imported the frameworks, but has not started them.

Reads one program per line, in JSON: its arguments, its environment, and the files for its output. Prints the
exit code of each. `tests.helpers.run_python` writes the lines.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import sys
from contextlib import suppress
from pathlib import Path
from types import ModuleType

# The compiler of PyTorch's CUDA build is first, see conftest.py. TensorFlow imports JAX, if it is installed.
FRAMEWORKS = ("triton", "torch", "jax", "tensorflow")


def run(arguments: list[str]) -> None:
    """Run a program as ``python`` does with these arguments. Exit handlers run when this process exits."""
    kind, *rest = arguments
    if kind == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    if kind == "-c":
        source, name, sys.argv = rest[0], "<string>", ["-c", *rest[1:]]
    else:
        source, name, sys.argv = Path(kind).read_text(encoding="utf-8"), kind, arguments
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__file__ = name
    exec(compile(source, name, "exec"), vars(main))  # noqa: S102  # the program of a test


def serve() -> list[str]:
    """Fork a process for each line of the input; return its arguments there."""
    while line := sys.stdin.readline():
        arguments, environment, *files = json.loads(line)
        child = os.fork()
        if child == 0:
            for number, file in enumerate([os.devnull, *files]):
                os.dup2(os.open(file, os.O_RDWR), number)
            atexit.register(gc.unfreeze)  # packages report frozen objects as leaks when the process exits
            os.environ.clear()
            os.environ.update(environment)
            return arguments
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    os._exit(0)  # the exit of an interpreter with frozen objects may print messages


if __name__ == "__main__":
    for name in FRAMEWORKS:
        with suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection of garbage in a child would copy the memory of this process
    run(serve())
