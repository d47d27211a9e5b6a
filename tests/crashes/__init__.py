"""Scripts that would crash or hang the process if arraybridge were wrong; they assert other mistakes.

test_crashes.py runs each one in a separate process.
"""
