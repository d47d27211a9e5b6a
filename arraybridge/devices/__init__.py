"""Choosing devices: what is here, and which is meant."""
