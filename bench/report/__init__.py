"""A plan as one HTML page, with what is known about it."""
