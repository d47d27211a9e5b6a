"""Send a shared array to worker processes of a Dask cluster and back; run by test_shared_memory.py."""

from __future__ import annotations

import numpy as np
from distributed import Client
from distributed.protocol import deserialize, serialize

from arraybridge import shared
from arraybridge.dask import cluster
from tests.parallel.functions import filled


def main() -> None:
    x = shared(np.zeros((4, 1000)))
    with (
        cluster(2, threads_per_worker=1, memory_limit=10**9, dashboard_address=":0") as workers,
        Client(workers) as client,
    ):
        result = client.submit(filled, x[1]).result()
        print("place", np.shares_memory(result, x))
        print("written", x.sum())
        print("disk", deserialize(*serialize(x[1, :3])).tolist())  # as Dask spills to disk


if __name__ == "__main__":
    main()
