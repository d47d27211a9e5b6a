"""All that is peculiar to this framework."""
