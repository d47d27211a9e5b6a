"""What holds for all tests with Dask."""

from __future__ import annotations

from tests.dask.patience import let_workers_end

let_workers_end()
