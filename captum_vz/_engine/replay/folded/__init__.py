"""The folded replay: a faster form of packed pairs. Without this room all numbers are the same."""
