"""Decorated functions over Dask arrays, on the threads of one machine or on a cluster of many.

>>> import numpy as np, arraybridge
>>> from arraybridge.dask import map_blocks, to_dask
>>> @arraybridge.torch
... def halve(block):
...     return block / 2  # a torch tensor here
>>> images = to_dask(np.arange(6.0), chunks=3)
>>> map_blocks(halve, images).compute()
array([0. , 0.5, 1. , 1.5, 2. , 2.5])

Dask does the scheduling, the transport and the chunking; what is added is what happens inside a block, and
what Dask has to know of arrays (`arraybridge.dask_arrays`). Install it with the extra ``dask``.
"""

from __future__ import annotations

import importlib

from arraybridge import dask_arrays
from arraybridge.errors import FrameworkNotInstalledError

try:
    for _package in ("cloudpickle", "dask.array", "distributed"):
        importlib.import_module(_package)
except ImportError as error:
    raise FrameworkNotInstalledError(
        'arraybridge.dask needs Dask and distributed; run pip install "dask[array]" distributed cloudpickle,'
        ' or pip install ".[dask]" in a checkout of arraybridge.',
        reason=str(error),
    ) from error

from arraybridge.dask.block import BlockError as BlockError
from arraybridge.dask.clusters import cluster as cluster
from arraybridge.dask.clusters import prepare as prepare
from arraybridge.dask.exchange import from_dask as from_dask
from arraybridge.dask.exchange import to_dask as to_dask
from arraybridge.dask.mapping import map_blocks as map_blocks
from arraybridge.dask.mapping import map_overlap as map_overlap
from arraybridge.dask.recovered import recoveries as recoveries
from arraybridge.dask.workers import WorkerSetup as WorkerSetup

__all__ = [
    "BlockError",
    "cluster",
    "from_dask",
    "map_blocks",
    "map_overlap",
    "prepare",
    "recoveries",
    "to_dask",
]

dask_arrays.register()
