"""Many methods for one text, side by side."""
