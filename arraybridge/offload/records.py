"""`Record` and `History`: the timings and verifications of a `gpu` function, by call signature.

Times are in seconds and include transfers. The caller measures them with `clock`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from arraybridge.offload.call_signature import Call

CPU = "cpu"
GPU = "gpu"

#: The clock of all timings, in seconds. Call it as ``records.clock()``, because tests replace it.
clock: Callable[[], float] = time.perf_counter


class Record:
    """Timings and verifications of one call signature.

    Attributes:
        seconds: The mean duration on each device; None if there is none.
        counts: The number of runs on each device.
        verified: The names of the GPUs on which a trial has shown that the result agrees with NumPy's.
        scalars: For each array in NumPy's result, whether it is a scalar.
        cpu_reason: The reason why calls with this signature stay on the CPU, or "".
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float | None] = {CPU: None, GPU: None}
        self.counts = {CPU: 0, GPU: 0}
        self.verified: set[str] = set()
        self.scalars: list[bool] = []
        self.cpu_reason = ""

    def add(self, place: str, seconds: float) -> None:
        """Add a run to the mean. The second run replaces the first one, which may include compilation."""
        mean = self.seconds[place]
        count = self.counts[place]
        self.seconds[place] = seconds if mean is None or count == 1 else mean + (seconds - mean) / count
        self.counts[place] = count + 1

    def choose(self) -> tuple[str, str]:
        """Return the faster device, and the reason. A device without enough timings is measured first."""
        cpu = self.seconds[CPU]
        gpu = self.seconds[GPU]
        if cpu is None or gpu is None:
            return GPU, "there are no timings on the GPU for such arguments yet"
        if self.counts[GPU] == 1:
            return GPU, "the first run on the GPU includes compilation and does not count"
        return (GPU, "the GPU is faster") if gpu < cpu else (CPU, "the CPU is faster")


class History:
    """The records of a function, by call signature."""

    #: The maximum number of records. The least recently used one is evicted first. While there are at most
    #: half as many, their order is not updated, which saves time.
    LIMIT = 256

    def __init__(self) -> None:
        self.records: dict[Any, Record] = {}
        self._lock = threading.Lock()

    def record(self, call: Call) -> Record:
        """Return the record of a call, created if missing. It is not stored if the call has no signature."""
        if call.no_signature_reason:
            return Record()
        record = self.records.get(call.signature)
        is_nearly_full = len(self.records) > self.LIMIT // 2
        return self._refresh(call.signature) if record is None or is_nearly_full else record

    def _refresh(self, signature: Any) -> Record:
        """Move a record to the end of the records, or create it and evict the first ones."""
        with self._lock:
            record = self.records.pop(signature, None) or Record()
            while len(self.records) >= self.LIMIT:
                del self.records[next(iter(self.records))]
            self.records[signature] = record
            return record

    def find(self, call: Call, *, any_self: bool = False) -> Record:
        """Return the record of a call without marking it as used; a new record if there is none.

        With ``any_self``, the signature of the record may differ in ``self``.
        """
        if call.no_signature_reason:
            return Record()
        with self._lock:
            record = self.records.get(call.signature)
            if any_self:
                candidates = (one for key, one in self.records.items() if key[1:] == call.signature[1:])
                record = next(candidates, record)
            return record or Record()
