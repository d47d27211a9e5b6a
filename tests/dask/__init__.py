"""Decorated functions over Dask arrays."""
