"""From methods and examples to rows of scores and metrics."""
