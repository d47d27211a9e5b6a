"""A package that offers a framework through an entry point, and scripts that use it."""
