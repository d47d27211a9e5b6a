"""Which of these modules does ``import arraybridge`` load? Run in a process of its own by `check_framework`.

python -m arraybridge.testing.loaded torch jax     # prints those that are loaded, one a line
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    import numpy  # noqa: F401

    before = set(sys.modules)  # NumPy loads some of the standard library
    import arraybridge.testing  # noqa: F401

    print("\n".join(name for name in sys.argv[1:] if name in sys.modules and name not in before))
