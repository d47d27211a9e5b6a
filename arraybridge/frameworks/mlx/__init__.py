"""MLX: lazy arrays on Apple GPUs, and on the CPU."""
