"""A JAX without its jaxlib."""

__version__ = "0.10.2"
