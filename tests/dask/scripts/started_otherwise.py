"""Arrays between this process and a worker that nobody has prepared, and again when it is."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import torch
from distributed import Client, LocalCluster

import arraybridge
import arraybridge.dask as abd
from tests.dask.patience import let_workers_end


class Box:
    """Something that Dask does not look into."""

    def __init__(self, content: object) -> None:
        self.content = content


def kind(x: object) -> str:
    return f"{type(x).__name__} {getattr(x, 'dtype', '')}"


def main() -> None:
    big = 2**40 + 1
    with (
        LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address="127.0.0.1:0") as workers,
        Client(workers, set_as_default=False) as client,
    ):
        for prepared in (False, True):
            if prepared:
                abd.prepare(client)
            sent = [
                torch.tensor([big, -1]),
                torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
                torch.ones(2, requires_grad=True),
                jnp.array([3, 4], dtype="int32"),
                arraybridge.to_pyclesperanto(np.ones((2, 3), np.float32)),
            ]
            for x in sent:
                expected = arraybridge.to_numpy(x, grad="detach").tolist()
                (scattered,) = client.scatter([x])
                for back in (
                    client.submit(lambda y: y, scattered, pure=False).result(),
                    client.submit(lambda y: y, x, pure=False).result(),
                    client.submit(lambda box: Box(box.content), Box(x), pure=False).result().content,
                ):
                    assert kind(back) == kind(x), (prepared, kind(back), kind(x))
                    assert arraybridge.to_numpy(back, grad="detach").tolist() == expected, (prepared, kind(x))
    print("all arrived")


if __name__ == "__main__":
    let_workers_end()
    main()
