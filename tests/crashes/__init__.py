"""Scripts that would end or hang the process if arraybridge were wrong; what else is wrong, they assert.

test_crashes.py runs each in a process of its own.
"""
