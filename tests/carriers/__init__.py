"""Tests of objects that carry an array."""
