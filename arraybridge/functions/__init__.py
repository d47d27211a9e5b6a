"""Running a user's function in its framework: decorators, dtype conversion of results, slices."""
