"""Records of an open trace, which are converted to `Event` objects when the log is read."""

from __future__ import annotations

from arraybridge.route import Route
from arraybridge.strides import Steps, stride_pattern
from arraybridge.tracing.events import Event
from arraybridge.tracing.user_lines import Site

__all__ = ["ConversionRecord", "Record"]


# Recording has to be fast. A class that is not frozen and takes positional arguments needs 0.2 µs per record
# instead of 0.6 µs, and less if it calls no `__init__` of a base class. Defining dataclasses would take 5 %
# of the time of `import arraybridge`.
class Record:
    """A record of an event, with its time, thread and line; the base class of the records in a log.

    Attributes:
        began: The start, as `time.perf_counter` returned it.
        seconds: The duration in seconds.
        thread: The name of the thread.
        thread_id: The identifier of the thread.
        site: The line of the user's code.
    """

    __slots__ = ("began", "seconds", "site", "thread", "thread_id")

    began: float
    seconds: float
    thread: str
    thread_id: int
    site: Site

    def event(self, opened: float, line: int) -> Event:
        """Return this record as an `Event`.

        Args:
            opened: The start of the trace, as `time.perf_counter` returned it.
            line: The line number of `site`.
        """
        raise NotImplementedError  # not an abstract method, since isinstance() with an ABC takes 0.3 µs


class ConversionRecord(Record):
    """The record of a conversion by arraybridge.

    Attributes:
        route: The route, including its ``seconds``.
        steps: The shape, strides and itemsize of a copied array, for `Event.layout`; otherwise None.
        array: The identifying number of a copied array, for `Event.array`; otherwise None.
    """

    __slots__ = ("array", "route", "steps")

    def __init__(
        self,
        began: float,
        seconds: float,
        thread: str,
        thread_id: int,
        site: Site,
        route: Route,
        steps: Steps | None,
        array: int | None,
    ) -> None:
        self.began = began
        self.seconds = seconds
        self.thread = thread
        self.thread_id = thread_id
        self.site = site
        self.route = route
        self.steps = steps
        self.array = array

    def event(self, opened: float, line: int) -> Event:
        """Return the event of the conversion; see `Record.event`."""
        route = self.route
        cause = route.cause
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
            reason=cause.text,
            library=library,
            thread_id=self.thread_id,
            route=route,
            layout="" if self.steps is None else stride_pattern(*self.steps),
            array=self.array,
            source=route.source,
            target=route.target,
            code=cause.code,
        )
