"""The base classes of the methods, and what a pass of them hands on."""
