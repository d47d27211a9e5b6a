"""A JAX that never ends its import."""

import time

time.sleep(600)
