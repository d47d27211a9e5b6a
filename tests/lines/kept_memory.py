"""Memory that NumPy and JAX share with torch's tensors stays theirs, whatever is sent to processes."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch

import arraybridge
from arraybridge import device_map


class Weights:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def make(self) -> torch.Tensor:
        return self.tensor


def add(weights: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return weights[:3] + x[:3]


def fill(x: torch.Tensor) -> torch.Tensor:
    return x.fill_(9)


def tensors() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(1000, dtype=torch.float32), torch.arange(16384, dtype=torch.float32)


def views(*both: torch.Tensor) -> list[Any]:
    return [to(x) for x in both for to in (arraybridge.to_numpy, arraybridge.to_jax)]


if __name__ == "__main__":
    for name in ("items", "function", "setup", "in place"):
        x, y = tensors()
        kept = views(x, y)
        one = torch.ones(3)
        if name == "items":
            results = list(device_map(partial(add, one), [x, y], ["cpu"], processes=True))
        elif name == "function":
            results = [*device_map(partial(add, x), [one], ["cpu"], processes=True)]
            results += device_map(partial(add, y), [one], ["cpu"], processes=True)
        elif name == "setup":
            results = [*device_map(add, [one], ["cpu"], processes=True, setup=Weights(x).make)]
            results += device_map(add, [one], ["cpu"], processes=True, setup=Weights(y).make)
        else:
            results = [found[:3] for found in device_map(fill, [x, y], ["cpu"], processes=True)]
        junk = [np.full(n, 7, np.float32) for n in (1000, 16384) for _ in range(5)]
        more = [torch.full((n,), 7.0) for n in (1000, 16384) for _ in range(5)]
        right = all(np.array_equal(np.asarray(one), np.arange(len(one))) for one in (*kept, x, y))
        shared = all(
            np.asarray(one).__array_interface__["data"][0] == own.data_ptr()
            for one, own in zip(kept[::2], (x, y), strict=True)
        )
        print(name, right, shared, [result.tolist() for result in results], flush=True)
