"""How long a call takes, and where it is the faster: `benchmark` and `compare`."""
