"""Tests of the frameworks: registration, detection, and plug-ins."""
