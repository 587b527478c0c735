"""How fast the maps are, as ratios of times in one run. Run by hand: `python -m tests.benchmarks --help`."""
