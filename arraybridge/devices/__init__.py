"""Device selection: the available devices, the default device and array API namespaces."""
