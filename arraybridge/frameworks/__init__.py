"""One package per framework. Their base class is in `arraybridge.interface.framework`."""
