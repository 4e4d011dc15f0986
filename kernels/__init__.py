"""Pure tensor functions: index building, sparse attention, gather decode, scores."""
