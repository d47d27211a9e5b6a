"""The first conversions of a process, from eight threads at once: imports, plans and registry meet there.

Arguments: the frameworks to convert between. Prints "right" and the number of conversions.
"""

import sys
import threading

import numpy as np

import arraybridge

frameworks = ("numpy", *sys.argv[1:])
barrier = threading.Barrier(8)
wrong: list[str] = []
done: list[int] = []


def work(number: int) -> None:
    values = np.arange(number, number + 12, dtype=np.float32).reshape(3, 4)
    barrier.wait()
    count = 0
    order = frameworks[number % len(frameworks) :] + frameworks[: number % len(frameworks)]
    for source in order:
        array = arraybridge.convert_memory(values, source)
        for target in order:
            result = arraybridge.to_numpy(arraybridge.convert_memory(array, target))
            count += 1
            if result.tobytes() != values.tobytes():
                wrong.append(f"{number}: {source} → {target}")
    done.append(count)


threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(wrong or "right", sum(done))
