"""A script whose workers import JAX with it, first of all: the environment has to be there by then."""

from __future__ import annotations

import jax
from distributed import Client

from arraybridge.dask import cluster
from tests.dask.patience import let_workers_end


def wide() -> str:
    return str(jax.config.jax_enable_x64)


if __name__ == "__main__":
    let_workers_end()
    started = cluster(
        1, cards=False, env={"JAX_ENABLE_X64": "1"}, threads_per_worker=1, dashboard_address="127.0.0.1:0"
    )
    with started, Client(started) as client:
        print(list(client.run(wide).values()))
