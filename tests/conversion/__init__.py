"""Tests of arraybridge/conversion: calls, detection, trees, traces and errors."""
