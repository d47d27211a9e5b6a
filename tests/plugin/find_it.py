"""Where a framework that is one file is found; each answer on a line of its own."""

from __future__ import annotations

import json
from typing import Any

import dask.array as da
import numpy as np

import arraybridge
from arraybridge.dask import map_blocks
from arraybridge.frameworks import registry

report: dict[str, Any] = {"installed": registry.is_installed("slates")}
found = {str(device): device for device in arraybridge.devices(["numpy", "slates"])}
report["devices"] = {name: [list(one.frameworks), one.name, one.total] for name, one in found.items()}
report["info"] = arraybridge.device_info()["versions"]["slates"]
report["memory"] = list(arraybridge.memory_stats()["gpu:0"].holdings[0])[1:]

x = np.arange(6.0)
slate = arraybridge.convert_memory(x, "slates", 0)
report["value"] = [type(slate).__name__, str(arraybridge.device_of(slate)), slate.values.tolist()]
report["chosen by name"] = arraybridge.gpu(backend="slates")(lambda x: x + x)(x).tolist()


@arraybridge.framework("slates").decorator(output_type="numpy")
def double(block: Any) -> Any:
    assert type(block).__name__ == "Slate"
    return block * 2


report["dask"] = map_blocks(double, da.from_array(x, chunks=3), dtype=x.dtype).compute().tolist()
print(json.dumps(report))
