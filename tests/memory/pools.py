"""Send shared arrays through the process pools of the standard library, with a start method."""

from __future__ import annotations

import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.connection import Connection

import numpy as np

from arraybridge import shared
from tests.parallel.functions import fill, filled, make_shared


def return_dropped(connection: Connection) -> None:
    """Send an array back after its creator has dropped it."""
    x = connection.recv()
    connection.send("arrived")
    connection.recv()
    connection.send(x)
    connection.recv()


def main(method: str) -> None:
    context = multiprocessing.get_context(method)
    x = shared(np.zeros((4, 1000)))
    with context.Pool(2) as pool:
        pool.starmap(fill, [(x[i], i) for i in range(4)])
    assert x.sum(1).tolist() == [0, 1000, 2000, 3000]
    print("Pool", flush=True)
    with context.Pool(2, maxtasksperchild=1) as pool:
        made = pool.map_async(make_shared, range(4), chunksize=1).get(60)
    assert [one.tolist() for one in made] == [[i, i, i] for i in range(4)]
    print("short-lived", flush=True)
    with ProcessPoolExecutor(1, context) as executor, ProcessPoolExecutor(1, context) as second:
        results = list(executor.map(filled, [x[:2], x[2:].T]))
        assert x.sum() == 4000
        assert all(np.shares_memory(result, x) for result in results)
        print("executor", flush=True)
        made = list(executor.map(make_shared, range(6)))
        assert [one.tolist() for one in made] == [[i, i, i] for i in range(6)]
        print("result", flush=True)
        onwards = second.submit(filled, made[0]).result()
        assert made[0].tolist() == [1, 1, 1]
        assert np.shares_memory(onwards, made[0])
        print("onwards", flush=True)
    y, (ours, theirs) = shared(np.ones(3)), context.Pipe()
    process = context.Process(target=return_dropped, args=(theirs,))
    process.start()
    ours.send(y)
    assert ours.recv() == "arrived"
    del y
    ours.send("gone")
    assert ours.recv().tolist() == [1, 1, 1]
    ours.send("read")
    process.join()
    print("held there", flush=True)
    process = context.Process(target=fill, args=(x[::-1], 9))
    process.start()
    process.join()
    assert x.sum() == 36_000
    print("Process")


if __name__ == "__main__":
    main(sys.argv[1])
