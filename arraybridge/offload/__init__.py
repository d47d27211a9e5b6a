"""`@gpu`: each call of a NumPy-style function runs where it is done first."""
