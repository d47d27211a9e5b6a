"""Records of an open trace, which are converted to `Event` objects when the log is read."""

from __future__ import annotations

from arraybridge.tracing.events import Event, Site
from arraybridge.tracing.memory_layouts import Steps, layout
from arraybridge.tracing.route import Route

__all__ = ["ConversionRecord", "Record", "SpanRecord"]

# Python passes keywords in a dict to a class, and to any callable with more than 14 of them. Without a dict,
# an event takes 1.2 µs instead of 2.2 µs. The positional arguments are the fields without a default.
_new_event = Event.__new__


# Recording has to be fast. Classes that are not frozen and take positional arguments need 0.2 µs instead of
# 0.6 µs per record. Dataclasses would take 5 % of the time of `import arraybridge`.
class Record:
    """The time, thread and line of an event.

    Attributes:
        began: The start, as `time.perf_counter` returned it.
        seconds: The duration.
        thread: The name of the thread.
        thread_id: The number of the thread.
        site: The line of the user's code.
    """

    __slots__ = ("began", "seconds", "site", "thread", "thread_id")

    def __init__(self, began: float, seconds: float, thread: str, thread_id: int, site: Site) -> None:
        self.began = began
        self.seconds = seconds
        self.thread = thread
        self.thread_id = thread_id
        self.site = site

    def event(self, opened: float, line: int) -> Event:
        """Return the event.

        Args:
            opened: The start of the trace, as `time.perf_counter` returned it.
            line: The line number of `site`.
        """
        raise NotImplementedError  # isinstance() of an ABC would take 0.3 µs


class ConversionRecord(Record):
    """A conversion by arraybridge.

    Attributes:
        route: The route, including its ``seconds``.
        steps: The shape and strides of a copied array, for `Event.layout`; None if it was not copied.
        array: The number of a copied array, for `Event.array`.
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
        # Not super().__init__(), which takes 0.2 µs longer.
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
        return _new_event(
            Event,
            "conversion",
            f"{route.source} → {route.target}",
            self.began - opened,
            self.seconds,
            self.thread,
            str(route.device),
            file,
            line,
            nbytes=route.nbytes * route.copies,
            reason=cause.text,
            library=library,
            thread_id=self.thread_id,
            route=route,
            layout="" if self.steps is None else layout(*self.steps),
            array=self.array,
            source=route.source,
            target=route.target,
            code=cause.code,
        )


class SpanRecord(Record):
    """An event other than a conversion, such as a call, a stage or a retry; see `Event`."""

    __slots__ = ("device", "flow", "item", "kind", "name", "nbytes", "reason")

    def __init__(
        self,
        began: float,
        seconds: float,
        thread: str,
        thread_id: int,
        site: Site,
        kind: str,
        name: str,
        device: str,
        nbytes: int,
        reason: str,
        item: int | None,
        flow: str,
    ) -> None:
        super().__init__(began, seconds, thread, thread_id, site)
        self.kind = kind
        self.name = name
        self.device = device
        self.nbytes = nbytes
        self.reason = reason
        self.item = item
        self.flow = flow

    def event(self, opened: float, line: int) -> Event:
        """Return the event of the span; see `Record.event`."""
        file, _, _, library = self.site
        return _new_event(
            Event,
            self.kind,
            self.name,
            self.began - opened,
            self.seconds,
            self.thread,
            self.device,
            file,
            line,
            nbytes=self.nbytes,
            reason=self.reason,
            library=library,
            item=self.item,
            flow=self.flow,
            thread_id=self.thread_id,
        )
