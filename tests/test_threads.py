"""Conversions from many threads at once."""

from __future__ import annotations

import importlib.util
import threading
from pathlib import Path

import numpy as np

from arraybridge import CopyRequiredError, convert_memory, explain
from tests import matrix_data as data
from tests.helpers import require, run_python

SCRIPT = Path(__file__).parent / "conversion" / "scripts" / "first_calls_in_threads.py"
THREADS = 8
ROUNDS = 12


def test_all_pairs_from_eight_threads() -> None:
    for name in data.FRAMEWORKS:
        require(name)
    barrier = threading.Barrier(THREADS)
    errors: list[BaseException] = []
    counts = [0] * THREADS

    def work(number: int) -> None:
        generator = np.random.default_rng(number)
        barrier.wait()
        for _ in range(ROUNDS):
            # A shape of its own for each thread, and values that no other has.
            values = generator.integers(0, 2**30, (number + 2, 5)).astype(np.float32)
            for source in data.FRAMEWORKS:
                array = convert_memory(values, source, copy=True)
                for target in data.FRAMEWORKS:
                    result = convert_memory(array, target)
                    assert data.bits(result) == values.tobytes(), f"{source} → {target}"
                    assert explain(array, target).nbytes == values.nbytes
                    counts[number] += 1
            try:
                convert_memory(values[::-1], "torch", copy=False)
            except CopyRequiredError:
                counts[number] += 1

    def guarded(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    assert counts == [ROUNDS * (25 + 1)] * THREADS


def test_jax_keeps_64_bits_in_every_thread() -> None:
    jax = require("jax")
    found: list[str] = []

    def work() -> None:
        for _ in range(50):
            found.append(convert_memory(np.array([2**40 + 1]), "jax").dtype.name)
            found.append(jax.numpy.arange(3).dtype.name)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (found.count("int64"), found.count("int32")) == (200, 200)


def test_the_first_calls_of_a_process_come_from_threads() -> None:
    there = [
        name
        for name in ("torch", "jax", "tensorflow", "pyclesperanto")
        if importlib.util.find_spec(name) is not None
    ]
    done = run_python(str(SCRIPT), *there, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["right", str(8 * (len(there) + 1) ** 2)]
