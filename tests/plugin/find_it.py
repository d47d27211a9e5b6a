"""Print as JSON what the library reports about a framework of another package that is not imported yet."""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np

import arraybridge

x = np.arange(6.0)
report: dict[str, Any] = {"early": "slates" in sys.modules}
slate = arraybridge.convert_memory(x, "slates", 0)
report["value"] = [type(slate).__name__, str(arraybridge.device_of(slate)), slate.values.tolist()]
report["same"] = arraybridge.convert_memory(slate, "slates") is slate
view = arraybridge.convert_memory(x, "slates").values
view[0] = 7.0
report["shared"] = x[0] == 7.0
view[0] = 0.0
report["route"] = str(arraybridge.explain(arraybridge.to_cpu(slate), "numpy"))
tree = arraybridge.convert_tree({"a": [slate], "b": "text"}, "numpy")
report["tree"] = [tree["a"][0].tolist(), tree["b"]]
try:
    arraybridge.framework("slate")
except ValueError as error:
    report["suggested"] = str(error)

found = {str(device): device for device in arraybridge.devices(["numpy", "slates"])}
report["devices"] = {name: [list(one.frameworks), one.name, one.total] for name, one in found.items()}
report["info"] = arraybridge.device_info()["versions"]["slates"]
report["memory"] = list(arraybridge.memory_stats()["gpu:0"].holdings[0])[1:]
report["chosen by name"] = arraybridge.gpu(backend="slates")(lambda x: x + x)(x).tolist()


@arraybridge.framework("slates").decorator(output_type="numpy")
def double(block: Any) -> Any:
    assert type(block).__name__ == "Slate"
    return block * 2


report["decorated"] = double(x).tolist()
if sys.argv[1:] == ["dask"]:
    import dask.array as da

    from arraybridge.dask import map_blocks

    report["dask"] = map_blocks(double, da.from_array(x, chunks=3), dtype=x.dtype).compute().tolist()
print(json.dumps(report, default=bool))
