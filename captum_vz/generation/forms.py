"""A generated text as inseq shows it, over the image or the sound of its prompt, and read from a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from captum_vz.errors import ArgumentError
from captum_vz.methods import Method
from captum_vz.visualization import draw_audio, draw_image


@dataclass(frozen=True, eq=False)
class StoredMethod(Method):
    """The method of a result that was read from a file."""

    takes_features = True
    is_signed: bool = field(default=False, kw_only=True)

    def rows(self, subject: Any, question: Any, features: Any) -> Sequence[Tensor]:
        """Refused."""
        raise ArgumentError(f"{self.title} was read from a file, without its model: explain the text again.")


def over_signal(found: Any, given: Any, index: int, step: int | None, options: dict[str, Any]) -> Figure:
    """The scores of the prompt's patches over an image, or of its frames over a sound."""
    ids = found.prompt.ids
    runs = [list(group) for _, group in groupby(range(len(ids)), ids.__getitem__)]
    places = max(runs, key=len)  # the placeholders of an image have one id, the states of an encoder -1
    if len(places) < 2:
        raise ArgumentError("the prompt has no tokens of an image or a sound: leave over= out.", "over")
    steps = range(len(found.rows)) if step is None else [range(len(found.rows))[step]]
    rows = {found.rows[one].name: found.all_scores[one, places, index] for one in steps}
    look: dict[str, Any] = {"label": "score" if found.is_signed else "share of the row"}
    if getattr(given, "ndim", 3) > 2 or not hasattr(given, "shape"):  # images of Pillow have no axes
        return draw_image(rows, given, **(look | {"title": f"{found.method}, {found.layers[index]}"} | options))
    if step is None:
        raise ArgumentError("a sound is drawn for one new token: pass step=, such as 0.", "step")
    name, row = next(iter(rows.items()))
    look |= {"sampling_rate": 16000, "title": f"{name}, {found.layers[index]}"}
    return draw_audio(given, row, **(look | options))


def inseq_form(found: Any, index: int) -> Any:
    """The scores of a layer as inseq's object, see :meth:`GenerationAttribution.to_inseq`."""
    try:
        from inseq.data.attribution import CoarseFeatureAttributionSequenceOutput, FeatureAttributionOutput
        from inseq.utils.typing import TokenWithId
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("to_inseq needs inseq: pip install inseq.") from error
    given, steps = len(found.prompt.ids), len(found.generated.ids)
    seen = torch.ones(steps, given + steps).tril(given - 1).bool()
    scores = found.all_scores[..., index].masked_fill(~seen, float("nan")).T.float()
    tokens = [TokenWithId(*one) for one in zip(found.tokens, (*found.prompt.ids, *found.generated.ids), strict=True)]
    name, start, stop = found.prompt.sections[-1] if found.prompt.sections else ("", 0, 0)
    source = start if (name, stop) == ("decoder", given) else 0
    sequence = CoarseFeatureAttributionSequenceOutput(
        source=tokens[:source] if source else tokens[:given],
        target=tokens[source:],
        source_attributions=scores[:source] if source else None,
        target_attributions=scores[source:],
        step_scores={},
        sequence_scores={},
        attr_pos_start=given - source,
    )
    about = {"attribution_method": found.method, "layer": found.layers[index], "generated_texts": [found.text]}
    return FeatureAttributionOutput([sequence], info=about)
