"""Print whether items of a hundred large arrays can be sent when few file descriptors are available."""

from __future__ import annotations

import resource

import numpy as np

from arraybridge import device_map
from tests.parallel.functions import same


def main() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    item = [np.full(2 << 20, i, np.uint8) for i in range(100)]
    results = device_map(same, [item] * 3, ["cpu"], processes=True)
    print(all([int(x[-1]) for x in result] == [*range(100)] for result in results))


if __name__ == "__main__":
    main()
