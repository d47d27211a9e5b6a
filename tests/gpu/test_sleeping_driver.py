"""Queries do not initialize CUDA's driver, so the process can still fork."""

from __future__ import annotations

import pytest

from tests.gpu.forked import results_of
from tests.helpers import output_of, require

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", ["cupy", "torch"])
def test_queries_do_not_initialize_the_driver(name: str) -> None:
    require(name)
    results = results_of("tests.gpu.sleeping_driver", name)
    assert results.pop("from_host") is True
    assert {query: result for query, result in results.items() if result is not False} == {}


@pytest.mark.parametrize("name", ["cupy", "torch"])
def test_process_can_fork_after_queries(name: str) -> None:
    require(name)
    printed = output_of(
        f"import os, numpy as np, arraybridge as ab, {name}",
        f"ab.devices('{name}'); ab.explain(np.ones(3), '{name}', gpu_id=0)",
        f"found = ab.framework('{name}').devices",
        "found.available(), found.default_device(), found.missing_device_reason()",
        "if not os.fork():",
        f"    print(ab.to_numpy(ab.convert_memory(np.ones(3), '{name}', 0)).sum(), flush=True)",
        "    os._exit(0)",
        "os.wait()",
    )
    assert printed == "3.0"
