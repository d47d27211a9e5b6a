"""Detect all kinds of objects and print the loaded top-level packages: two JSON lists.

Arguments: frameworks to import for the second list, in which one array of each is detected as well.
"""

import importlib
import json
import sys

import numpy as np

import arraybridge


class Interface:
    """A third-party array type."""

    __array_interface__ = np.arange(3.0).__array_interface__


things = [np.arange(3), np.ma.masked_array([1, 2]), Interface(), [1, 2], "torch", 3.5, None, object()]


def packages() -> set[str]:
    return {module.partition(".")[0] for module in sys.modules} - sys.stdlib_module_names


def loaded() -> list[str]:
    before = packages()
    for thing in things:
        try:
            arraybridge.detect_memory_type(thing)
        except arraybridge.UnknownArrayError:
            continue
    return sorted(packages() - before)


alone = loaded()
for name in sys.argv[1:]:
    framework = importlib.import_module(name)
    things.append(framework.numpy.ones(2) if name == "jax" else framework.ones((2,)))
    if name == "torch":
        things.append(arraybridge.Device.parse(framework.device("cpu")))
print(json.dumps([alone, loaded()]))
