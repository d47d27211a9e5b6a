"""What a trace keeps of each event while it is open; it makes the `Event` when somebody reads it."""

from __future__ import annotations

from dataclasses import dataclass

from arraybridge.timeline.events import Event, Site
from arraybridge.timeline.layouts import Steps, layout
from arraybridge.timeline.route import Route

__all__ = ["ConversionRecord", "Record", "SpanRecord"]


# One record is made per event while the trace is open, so these classes are not frozen, and are called with
# positional arguments: 0.2 µs instead of 0.6.
@dataclass(slots=True, eq=False)
class Record:
    """One event: when, in which thread, and where in the user's code.

    Attributes:
        began: The start, as `time.perf_counter` returned it.
        seconds: The duration.
        thread: The name of the thread.
        thread_id: The number of the thread.
        site: The line of the user's code.
    """

    began: float
    seconds: float
    thread: str
    thread_id: int
    site: Site

    def event(self, opened: float, line: int) -> Event:
        """Return the event.

        Args:
            opened: The start of the trace, as `time.perf_counter` returned it.
            line: The line number of `site`.
        """
        raise NotImplementedError  # not an ABC, whose isinstance() takes 0.3 µs


@dataclass(slots=True, eq=False)
class ConversionRecord(Record):
    """A conversion by arraybridge.

    Attributes:
        route: The route, with its seconds.
        steps: Shape and strides of an array that was copied, for `Event.layout`; None if it was not copied.
        array: The identity of an array that was copied, for `Event.array`.
    """

    route: Route
    steps: Steps | None
    array: int | None

    def event(self, opened: float, line: int) -> Event:
        route = self.route
        file, _, _, library = self.site
        return Event(
            kind="conversion",
            name=f"{route.source} → {route.target}",
            start=self.began - opened,
            seconds=self.seconds,
            thread=self.thread,
            device=str(route.device),
            file=file,
            line=line,
            nbytes=route.nbytes * route.copies,
            reason=route.reason,
            library=library,
            thread_id=self.thread_id,
            route=route,
            layout="" if self.steps is None else layout(*self.steps),
            array=self.array,
            source=route.source,
            target=route.target,
            code=route.code,
        )


@dataclass(slots=True, eq=False)
class SpanRecord(Record):
    """A piece of work other than a conversion, such as a call, a stage or a retry; see `Event`."""

    kind: str
    name: str
    device: str
    nbytes: int
    reason: str
    item: int | None
    flow: str

    def event(self, opened: float, line: int) -> Event:
        file, _, _, library = self.site
        return Event(
            kind=self.kind,
            name=self.name,
            start=self.began - opened,
            seconds=self.seconds,
            thread=self.thread,
            device=self.device,
            file=file,
            line=line,
            nbytes=self.nbytes,
            reason=self.reason,
            library=library,
            item=self.item,
            flow=self.flow,
            thread_id=self.thread_id,
        )
