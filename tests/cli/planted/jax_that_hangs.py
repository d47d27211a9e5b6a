"""A fake JAX whose import hangs. It can signal the start of the import with a file."""

import os
import time
from pathlib import Path

if "FAKE_BEGUN" in os.environ:
    Path(os.environ["FAKE_BEGUN"]).touch()
time.sleep(600)
