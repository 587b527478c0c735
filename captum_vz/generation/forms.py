"""A generated text as inseq shows it."""

from __future__ import annotations

from typing import Any

import torch


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
