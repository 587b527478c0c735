"""The folder of a study: its settings, its examples, and the parts that hold its rows."""
