"""A plan in an engine with pages: the rows of a step, decode from pages, counts. It knows no engine."""
