"""Programs for a fresh interpreter: what Dask knows of arrays depends on what was imported before.

    python array_programs.py sizes torch

Each prints what it found as JSON on its last line.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

FRAMEWORKS = ("cupy", "jax", "jaxlib", "pyclesperanto", "pyclesperanto_prototype", "tensorflow", "torch")


def sizes(framework: str) -> Any:
    """Bytes by Dask of an array of 40 MB, in a program that never mentions arraybridge."""
    import importlib

    from dask.sizeof import sizeof

    before = [name for name in FRAMEWORKS if name in sys.modules]
    module = importlib.import_module("jax.numpy" if framework == "jax" else framework)
    array = module.zeros((1000, 10_000), dtype=module.float32)
    return {
        "bytes": sizeof(array),
        "loaded before": before,
        "loaded after": [name for name in FRAMEWORKS if name in sys.modules],
        "dask module": "arraybridge.dask.workers" in sys.modules,
    }


def loaded(module: str) -> Any:
    """Frameworks that this import brings along."""
    import importlib

    importlib.import_module(module)
    return [name for name in FRAMEWORKS if name in sys.modules]


def order(*steps: str) -> Any:
    """Import these in turn, ``use`` a torch tensor in between; then send one that Dask alone cannot."""
    import importlib

    for step in steps:
        if step == "use":
            import torch
            from dask.sizeof import sizeof
            from dask.tokenize import tokenize
            from distributed.protocol import serialize

            sizeof(torch.zeros(3))
            tokenize(torch.zeros(3))
            serialize(torch.zeros(3))
        elif step == "torchvision":  # an object of that package makes Dask register its own answers
            from distributed.protocol.serialize import dask_serialize

            transform = type("Compose", (), {"__module__": "torchvision.transforms"})
            try:
                dask_serialize.dispatch(transform)
            except TypeError:
                continue  # there is no answer for that class, which is right
        else:
            importlib.import_module(step)
    import torch
    from dask.sizeof import sizeof
    from dask.tokenize import tokenize
    from distributed.protocol import deserialize, serialize

    importlib.import_module(
        "arraybridge.dask.arrays"
    ).register_transport()  # as for workers that are prepared
    sent = torch.tensor([1.0, -0.0, 3.0], dtype=torch.bfloat16)
    back = deserialize(*serialize(sent))
    return {
        "bytes": sizeof(torch.zeros(1000)),
        "same token": tokenize(sent) == tokenize(back),
        "same bits": torch.equal(sent.view(torch.int16), back.view(torch.int16)),
    }


def tokens(*frameworks: str) -> Any:
    """The tokens of functions, and of the same array in each framework."""
    import importlib

    from dask.tokenize import tokenize

    from tests import matrix_data as data

    importlib.import_module("arraybridge.dask.workers")
    arrays = {name: tokenize(data.build(name, "aligned", "float32").array) for name in frameworks}
    return {"arrays": arrays}


PROGRAMS: dict[str, Callable[..., Any]] = {
    "loaded": loaded,
    "order": order,
    "sizes": sizes,
    "tokens": tokens,
}

if __name__ == "__main__":
    print(json.dumps(PROGRAMS[sys.argv[1]](*sys.argv[2:])))
