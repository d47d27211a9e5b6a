"""The decorator `gpu`, which runs each call of a NumPy-style function on the faster device."""
