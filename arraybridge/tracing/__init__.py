"""What happened when, and where in the user's code: events, hot spots, and files that viewers open."""
