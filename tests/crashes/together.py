"""Run the scripts named as arguments one after the other in one process, and print the outcome of each."""

from __future__ import annotations

import gc
import importlib
import sys
import traceback

for name in sys.argv[1:]:
    print(f"#### {name}", flush=True)
    try:
        importlib.import_module(f"tests.crashes.{name}")
    except Exception:  # noqa: BLE001  # any exception is reported, and the next script runs
        traceback.print_exc(file=sys.stdout)
    else:
        print("right", flush=True)
    gc.freeze()  # the scripts collect garbage often, and most objects belong to the frameworks
