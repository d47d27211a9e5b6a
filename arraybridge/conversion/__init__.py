"""Conversion of arrays between frameworks: routes, decisions and the plan cache."""
