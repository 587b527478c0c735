"""Scores and metrics of many examples, one row for each example and method."""
