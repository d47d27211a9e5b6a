"""One module or package per framework, and their common base class in `base.Framework`."""
