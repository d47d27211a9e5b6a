"""Tests that need a real NVIDIA card."""
