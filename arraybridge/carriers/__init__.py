"""Objects that carry one array: read as arrays, and made anew around others."""
