"""More than one layer at a time."""
