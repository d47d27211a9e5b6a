"""How many functions a decorated call enters without trouble, with one failure, and in halves."""

import itertools

import numpy as np

import arraybridge
from tests.counting import functions_entered

failures: list[int] = []


@arraybridge.torch(oom_recovery="split")
def once(x):
    """Fail where a failure waits."""
    if failures:
        failures.clear()
        raise MemoryError
    return x * 2


@arraybridge.torch(oom_recovery="split")
def halved(x):
    """Fail on more than four rows."""
    if len(x) > 4:
        raise MemoryError
    return x * 2


x = np.ones((8, 4))
for call in (lambda: once(x), lambda: failures.append(1) or once(x), lambda: halved(x)):
    call()
    call()
    # A comprehension is part of its function; how frameworks free their caches is their own affair.
    left_out = (">", "free_cache", ":_opened", "is_started")
    own = [name for name in functions_entered(call) if not name.endswith(left_out)]
    files = [name.split(":")[0] for name in own]
    print(len(set(own)), sum(a != b for a, b in itertools.pairwise(files)))
