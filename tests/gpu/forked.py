"""Run many functions in separate processes without starting Python for each one.

One process imports the frameworks and forks once per function. It must not use a GPU itself: CUDA works in
a child only if the driver has not been initialized before the fork.
"""

from __future__ import annotations

import json
import os
import traceback
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from tests.helpers import run_python


def results_of(module: str, *arguments: str, env: dict[str, str] | None = None) -> dict[str, Any]:
    """Run a module that ends in `print_results_of_each`, and return the results by name."""
    done = run_python("-m", module, *arguments, env=env)
    assert done.returncode == 0, done.stderr
    results: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return results


def print_results_of_each(functions: Mapping[str, Callable[[], Any]]) -> None:
    """Call each function in a fork of this process, and print the results as one line of JSON.

    The result of a function that raises is its traceback; the result of a process that crashes is its exit
    status.
    """
    from arraybridge import cuda_driver

    assert not cuda_driver.is_driver_initialized(), "a fork of this process cannot use CUDA"
    # Importing NumPy starts threads of its BLAS, which are not used here.
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    print(json.dumps({name: _result_in_fork(function) for name, function in functions.items()}))


def _result_in_fork(function: Callable[[], Any]) -> Any:
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        _answer(function, writer)
    os.close(writer)
    with os.fdopen(reader) as answer:
        text = answer.read()
    _, status = os.waitpid(process, 0)
    return json.loads(text) if text else f"the process ended with status {status}"


def _answer(function: Callable[[], Any], writer: int) -> None:
    try:
        try:
            result = function()
        except Exception:  # noqa: BLE001  # the test reports it
            result = traceback.format_exc()
        os.write(writer, json.dumps(result).encode())
    finally:
        os._exit(0)  # skip the exit handlers of the parent
