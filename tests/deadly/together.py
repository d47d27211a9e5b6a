"""Runs the scripts named as arguments one after the other in one process, and says which one begins."""

from __future__ import annotations

import importlib
import sys

for name in sys.argv[1:]:
    print(f"== {name}", flush=True)
    importlib.import_module(f"tests.deadly.{name}")
