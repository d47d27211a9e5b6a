"""The decorator `gpu`, which runs each call to a NumPy-style function on the faster device."""
