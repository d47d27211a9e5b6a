"""Tests that need NumPy and no other framework."""
