"""A user's file that happens to be called torch.py; importing it fails in a way of its own."""

raise LookupError("no such lamp")
