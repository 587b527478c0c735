"""The README's figures of the embedded model are those of the card beside its weights."""

import json
import re
from pathlib import Path

from captum_vz.testbed.model import AGREEMENT_FOLDER

README = Path(__file__).parents[1] / "README.md"


def test_the_readme_states_the_cards_accuracies() -> None:
    stated = re.findall(r"^\| `?([^`|]+?)`? \| (\d+) \| ([\d.]+) % \|$", README.read_text("utf-8"), re.MULTILINE)
    accuracy = json.loads((AGREEMENT_FOLDER / "card.json").read_text("utf-8"))["accuracy"]
    measured = {name: figures for name, figures in accuracy["held_out"].items() if name not in ("dropped", "overall")}
    measured["all five"] = accuracy["held_out"]["overall"]
    measured["the package's own grammar, new sentences"] = accuracy["grammar"]["overall"]
    assert stated == [
        (name, str(figures["pairs"]), f"{100 * figures['accuracy']:.1f}") for name, figures in measured.items()
    ]
