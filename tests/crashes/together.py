"""Runs the scripts named as arguments one after the other in one process, and says how each went."""

from __future__ import annotations

import importlib
import sys
import traceback

for name in sys.argv[1:]:
    print(f"#### {name}", flush=True)
    try:
        importlib.import_module(f"tests.crashes.{name}")
    except Exception:  # noqa: BLE001  # whatever it is, it is reported, and the next script runs
        traceback.print_exc(file=sys.stdout)
    else:
        print("right", flush=True)
