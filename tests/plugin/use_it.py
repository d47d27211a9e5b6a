"""Convert to and from a framework that an installed package offers; print what came of it as JSON.

Arguments: the built-in frameworks to convert with. The package has to be importable, with its metadata.
"""

import json
import sys
from typing import Any

import numpy as np

import arraybridge

report: dict[str, Any] = {}
arraybridge.detect_memory_type(np.zeros(1))
arraybridge.convert_memory(np.zeros(1), "numpy")
report["imported early"] = "tapeworks" in sys.modules

values = np.arange(6, dtype=np.float32).reshape(2, 3)
tape = arraybridge.convert_memory(values, "tapeworks")
report["imported when needed"] = "tapeworks" in sys.modules
report["type"] = type(tape).__name__
report["bytes"] = tape.memory.hex()
report["detected"] = arraybridge.detect_memory_type(tape)
report["same"] = arraybridge.convert_memory(tape, "tapeworks") is tape
report["copy"] = arraybridge.convert_memory(tape, "tapeworks", copy=True) is tape
report["device"] = str(arraybridge.device_of(tape))
report["route"] = str(arraybridge.explain(tape, "numpy"))

view = arraybridge.convert_memory(tape, "numpy", copy=False)
view[0, 0] = 7
report["shares"] = np.frombuffer(tape.memory, np.float32)[0] == 7
view[0, 0] = 0
del view

for name in sys.argv[1:]:
    there = arraybridge.convert_memory(tape, name)
    back = arraybridge.convert_memory(there, "tapeworks")
    report[name] = [
        arraybridge.detect_memory_type(there),
        back.dtype,
        list(back.shape),
        back.memory.hex(),
        arraybridge.explain(there, "tapeworks").source,
    ]

tree = arraybridge.convert_tree({"a": values, "b": [tape, "text"]}, "tapeworks")
report["tree"] = [type(tree["a"]).__name__, tree["b"][0] is tape, tree["b"][1]]
back = arraybridge.convert_tree(tree, "numpy")
report["tree back"] = [back["a"].tolist(), back["b"][0].tolist()]
try:
    arraybridge.convert_memory(values.astype(np.float16), "tapeworks")
except arraybridge.DtypeNotSupportedError as error:
    report["refused"] = str(error)
cast = arraybridge.convert_memory(values.astype(np.float16), "tapeworks", dtype="float32")
report["cast"] = cast.memory.hex()
try:
    arraybridge.framework("tapework")
except ValueError as error:
    report["suggested"] = str(error)
print(json.dumps(report, default=bool))
