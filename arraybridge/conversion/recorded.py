"""Run a conversion and record it in the open traces and profilers."""

from __future__ import annotations

import time
from threading import current_thread, get_ident
from typing import Any

from arraybridge.conversion.request import Decision
from arraybridge.tracing import events, user_lines
from arraybridge.tracing.records import ConversionRecord
from arraybridge.tracing.trace_log import ActiveLogs

__all__ = ["convert_and_record"]


def convert_and_record(decision: Decision, active_logs: ActiveLogs) -> Any:
    """Convert the array of a decision, and record the route and the duration in every open trace."""
    logs, annotation = active_logs
    route = decision.route
    if logs and route.device.kind == "cpu" and not decision.source.devices.has_only_host:
        # The wait for pending computation does not count as conversion time.
        events.wait_for(decision.source, decision.data)
    events.start_devices(route.target)
    start = time.perf_counter()
    with annotation(f"{route.source} → {route.target}"):
        result = decision()
    if not logs:
        return result
    seconds = time.perf_counter() - start
    # The route is a frozen dataclass, but no other code refers to it yet.
    object.__setattr__(route, "seconds", seconds)
    steps = None
    array = None
    if route.copies and not route.layout:
        steps = events.steps(decision.source, decision.data)
    if route.copies:
        array = events.same_array(decision.data)
    record = ConversionRecord(
        start, seconds, current_thread().name, get_ident(), user_lines.site(), route, steps, array
    )
    copied = route.nbytes * route.copies
    for log in logs:
        log.add(record, copied, seconds)
    return result
