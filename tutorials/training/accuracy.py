"""The accuracy of an embedded model on sentences that it was not trained on."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from captum_vz.testbed import agreement_sentences, held_out, load_model, prefers_good
from captum_vz.text import Record, form_ids

#: The number of sentence pairs of the grammar that `measure` draws.
EVALUATION_PAIRS: Final = 1000


def measure(folder: str | Path, blimp: str | Path, trained: Sequence[Record]) -> dict[str, Any]:
    """The accuracy of the model in `folder` on the held-out halves of BLiMP and on new sentences of the grammar.

    Sentences of the training, `trained`, do not count as new. For ``"held_out"`` and ``"grammar"``, for each paradigm
    and ``"overall"``: the number of pairs, and the share of pairs in which the model prefers the good form.
    ``"dropped"`` counts pairs with a form of several or unknown tokens.
    """
    model, tokenizer = load_model(folder)
    seen = {record["sentence_good"] for record in trained}
    evaluations = {
        "held_out": [record for records in held_out(blimp).values() for record in records],
        "grammar": [record for record in agreement_sentences(EVALUATION_PAIRS) if record["sentence_good"] not in seen],
    }
    results: dict[str, Any] = {}
    for name, records in evaluations.items():
        single = [record for record in records if form_ids(tokenizer, record) is not None]
        results[name] = {"dropped": len(records) - len(single)}
        results[name] |= accuracies(single, prefers_good(model, tokenizer, single))
    return results


def accuracies(records: Sequence[Record], right: Tensor) -> dict[str, dict[str, float]]:
    """The share of right ones among all records, ``"overall"``, and among those of each paradigm."""
    paradigms = [record["UID"] for record in records]
    of_each = {name: right[[name == one for one in paradigms]] for name in dict.fromkeys(paradigms)}
    return {name: share_right(its) for name, its in ({"overall": right} | of_each).items()}


def share_right(right: Tensor) -> dict[str, float]:
    """The number of pairs, and the share of right ones."""
    return {"pairs": len(right), "accuracy": round(right.double().mean().item(), 4)}
