"""What a figure knows of itself: its numbers in words and in a table, and where they come from."""
