"""Choosing devices, and using several: `device_map` and `Pipeline`."""
