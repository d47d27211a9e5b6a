"""Fixtures of all Dask tests, including one shared cluster."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from distributed import Client

from arraybridge.dask import cluster
from tests.dask.functions import QUIET
from tests.dask.timeouts import let_workers_end

let_workers_end()


@pytest.fixture(scope="package")
def two_workers() -> Iterator[Client]:
    """Yield a client of two worker processes in which warnings are errors. It is not the default client."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONWARNINGS", "error")
        workers = cluster(2, gpus=False, **QUIET)
    with workers, Client(workers, set_as_default=False) as client:
        yield client
