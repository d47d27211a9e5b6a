"""Scripts that the conversion tests run in separate processes."""
