"""A JAX that never ends its import, and that may tell by a file that it has begun."""

import os
import time
from pathlib import Path

if "FAKE_BEGUN" in os.environ:
    Path(os.environ["FAKE_BEGUN"]).touch()
time.sleep(600)
