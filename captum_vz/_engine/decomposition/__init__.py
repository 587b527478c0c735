"""A layer's output as a sum of one vector for each source."""
