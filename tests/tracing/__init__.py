"""Tests of traces: events, hot spots, files for viewers, and annotations."""
