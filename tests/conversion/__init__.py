"""Tests of conversions: calls, options, plans and unusual sources."""
