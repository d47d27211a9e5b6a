"""Tests of the frameworks: who they are, what they own, and what others add."""
