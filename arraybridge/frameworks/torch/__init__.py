"""PyTorch: conversions, devices, memory and gradients."""
