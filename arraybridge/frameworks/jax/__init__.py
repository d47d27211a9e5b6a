"""JAX: conversions, devices, memory and gradients."""
