"""The form of inseq's results, https://github.com/inseq-team/inseq."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from captum_vz.result.words import TokenText


def as_inseq(scores: Tensor, prefix: Tensor, prompt: TokenText, generated: TokenText, about: dict[str, Any]) -> Any:
    """The scores of one layer as inseq's `FeatureAttributionOutput`.

    Args:
        scores: The scores of the prompt tokens, `(n, m)`.
        prefix: The scores of the generated tokens, `(n, n)`. Entries from the diagonal on are not used.
        prompt: The prompt tokens.
        generated: The generated tokens.
        about: What inseq keeps with the scores.
    """
    try:
        from inseq.data.attribution import CoarseFeatureAttributionSequenceOutput, FeatureAttributionOutput
        from inseq.utils.typing import TokenWithId
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("to_inseq needs inseq: pip install inseq.") from error
    before = torch.ones_like(prefix, dtype=torch.bool).tril(-1)
    # inseq marks by NaN what a step cannot see.
    joined = torch.cat([scores, prefix.masked_fill(~before, float("nan"))], dim=1).T.float()
    tokens = [TokenWithId(*one) for text in (prompt, generated) for one in zip(text.labels, text.ids, strict=True)]
    given = len(prompt.ids)
    # In an encoder-decoder, the encoder's tokens are the source. Otherwise, all tokens are the target.
    name, start, stop = prompt.sections[-1] if prompt.sections else ("", 0, 0)
    source = start if (name, stop) == ("decoder", given) else 0
    sequence = CoarseFeatureAttributionSequenceOutput(
        source=tokens[:source] if source else tokens[:given],
        target=tokens[source:],
        source_attributions=joined[:source] if source else None,
        target_attributions=joined[source:],
        step_scores={},
        sequence_scores={},
        attr_pos_start=given - source,
    )
    return FeatureAttributionOutput([sequence], info=about)
