"""Processes that ``arraybridge doctor`` waits for: each with a limit, and all ended with it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

__all__ = ["end_of", "run", "workers"]

_running: set[subprocess.Popen[str]] = set()


@contextlib.contextmanager
def workers() -> Iterator[ThreadPoolExecutor]:
    """Threads that wait for processes; Ctrl-C ends those processes instead of waiting for one that hangs."""
    pool = ThreadPoolExecutor(max(1, min(4, os.cpu_count() or 1)))
    try:
        yield pool
    except (KeyboardInterrupt, SystemExit):
        pool.shutdown(wait=False, cancel_futures=True)
        for process in list(_running):
            process.kill()
        raise
    finally:
        pool.shutdown()


def run(
    command: list[str], timeout: float, hear: Callable[[str], None] | None = None, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run a process that `workers` can end.

    With ``hear``, which hears of each line that it prints, ``timeout`` is the time from one line to the next.

    Raises:
        subprocess.TimeoutExpired: it took longer, and was ended.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as err:
        process: subprocess.Popen[str] = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=err,
            text=True,
            errors="replace",
            env=os.environ | environ,
        )
        _running.add(process)
        late = threading.Event()

        def end() -> None:
            late.set()
            process.kill()

        lines: list[str] = []
        watch = _timer(timeout, end)
        try:
            with process:
                for line in process.stdout or ():
                    lines.append(line)
                    if hear is not None:
                        watch.cancel()
                        hear(line.rstrip("\n"))
                        watch = _timer(timeout, end)
        finally:
            watch.cancel()
            _running.discard(process)
        if late.is_set():
            raise subprocess.TimeoutExpired(command, timeout, "".join(lines))
        err.seek(0)
        return subprocess.CompletedProcess(command, process.returncode, "".join(lines), err.read())


def _timer(seconds: float, then: Callable[[], None]) -> threading.Timer:
    timer = threading.Timer(seconds, then)
    timer.daemon = True
    timer.start()
    return timer


def end_of(done: subprocess.CompletedProcess[str]) -> str:
    """How a process ended, in words, with the last line that it wrote."""
    if done.returncode < 0:
        try:
            how = signal.Signals(-done.returncode).name
        except ValueError:
            how = f"signal {-done.returncode}"
    else:
        how = f"exit code {done.returncode}"
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return f"{how} ({lines[-1][:300]})" if lines else how
