"""Tests of arraybridge.memory."""
