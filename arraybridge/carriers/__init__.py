"""Carriers: objects that wrap one array, which can be read and replaced."""
