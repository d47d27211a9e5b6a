"""Tests of arraybridge/timeline: events, hot spots, files for viewers, and annotations."""
