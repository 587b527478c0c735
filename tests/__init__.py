"""The tests find the lessons' package, which is a distribution of its own, in the checkout."""

import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[1] / "tutorials"))
