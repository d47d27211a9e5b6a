"""Traces: recorded events, their lines in the user's code, hot spots, and files for trace viewers."""
