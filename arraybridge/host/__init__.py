"""Host memory that no framework owns: aligned and read-only buffers, DLPack capsules, dtypes."""
