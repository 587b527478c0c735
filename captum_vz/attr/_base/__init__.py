"""The base classes of the methods, and the data that one forward pass returns."""
