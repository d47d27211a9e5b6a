"""Memory: recover when it runs out, give caches back, see who holds what, move data fast."""
