"""The form of inseq's results, https://github.com/inseq-team/inseq."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from captum_vz.generation.result import GenerationAttribution


def as_inseq(found: GenerationAttribution, layer: int) -> Any:
    """The scores of one layer as inseq's `FeatureAttributionOutput`, see :meth:`GenerationAttribution.to_inseq`."""
    try:
        from inseq.data.attribution import CoarseFeatureAttributionSequenceOutput, FeatureAttributionOutput
        from inseq.utils.typing import TokenWithId
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("to_inseq needs inseq: pip install inseq.") from error
    index, count = found.layer_index(layer), len(found.generated.ids)
    before = torch.ones(count, count, dtype=torch.bool).tril(-1)
    # inseq marks by NaN what a step cannot see.
    prefix = found.prefix[..., index].masked_fill(~before, float("nan"))
    scores = torch.cat([found.scores[..., index], prefix], dim=1).T.float()
    texts = (found.prompt, found.generated)
    tokens = [TokenWithId(*one) for text in texts for one in zip(text.labels, text.ids, strict=True)]
    given = len(found.prompt.ids)
    # In an encoder-decoder, the encoder's tokens are the source. Otherwise, all tokens are the target.
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
