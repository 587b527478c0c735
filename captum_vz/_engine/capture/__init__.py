"""One pass recorded, and one layer run again."""
