"""Tests that need a real NVIDIA GPU."""
