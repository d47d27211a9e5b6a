"""The file in the user's cache folder that keeps what was measured of a card.

Imported when a card is first asked for: what it imports costs 10 ms.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from arraybridge.offload.rates import Link, Rates

__all__ = ["cache_folder", "load_rates", "store_rates"]

FORMAT = 1


def cache_folder() -> Path | None:
    """The folder of the user's in which arraybridge keeps what it has measured; None without a home."""
    chosen = os.environ.get("XDG_CACHE_HOME", "")
    try:
        if chosen and Path(chosen).is_absolute():
            base = Path(chosen)
        elif sys.platform == "win32":
            base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
        elif sys.platform == "darwin":
            base = Path.home() / "Library" / "Caches"
        else:
            base = Path.home() / ".cache"
    except RuntimeError:  # there is no home
        return None
    return base / "arraybridge"


def _file(folder: Path, key: Mapping[str, str]) -> Path:
    # A file for each key: two processes that measure two cards do not write over each other.
    digest = hashlib.sha256(json.dumps(dict(key), sort_keys=True).encode()).hexdigest()
    return folder / f"card-{digest[:16]}.json"


def load_rates(folder: Path | None, key: Mapping[str, str]) -> Rates | None:
    """What was measured for this card and these versions; None where nothing sensible is."""
    if folder is None:
        return None
    try:
        stored = json.loads(_file(folder, key).read_text(encoding="utf-8"))
        if stored["format"] != FORMAT or stored["key"] != dict(key):
            return None
        rates = stored["rates"]
        numbers = [
            *(rates[link][what] for link in ("to_card", "to_host") for what in ("latency", "bandwidth")),
            rates["launch"],
        ]
        if not all(isinstance(n, float) and 0 < n < math.inf for n in numbers):
            return None
        return Rates(Link(*numbers[0:2]), Link(*numbers[2:4]), numbers[4])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):  # missing, damaged, of another shape
        return None


def store_rates(folder: Path | None, key: Mapping[str, str], rates: Rates) -> bool:
    """Write what was measured, so that a reader finds the old file or the new one, never half of one.

    Returns:
        False where the folder cannot be written to; then it is measured again next time.
    """
    if folder is None:
        return False
    temporary = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix="card-", suffix=".tmp", dir=folder)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump({"format": FORMAT, "key": dict(key), "rates": asdict(rates)}, file, indent=1)
        Path(temporary).replace(_file(folder, key))
        return True
    except OSError:
        if temporary is not None:
            with contextlib.suppress(OSError):
                Path(temporary).unlink()
        return False
