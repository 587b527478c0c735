"""How fast the maps are, as ratios taken in one run: `python -m tests.benchmarks --help`. Run by hand."""
