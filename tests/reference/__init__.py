"""Ground truth for the tests: tiny models of many families and naive twins of the methods, in loops and float64."""
