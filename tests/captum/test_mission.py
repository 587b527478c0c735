"""The mission in a screenful: one sentence and one model, Captum's methods and ours side by side, in one picture."""

from __future__ import annotations

import torch
from captum.attr import IntegratedGradients, Saliency, visualization
from torch import Tensor

from captum_vz import LayerAttention, ValueZeroing, ValueZeroingRollout, find_layers, token_scores
from captum_vz.testbed import load_agreement_model
from captum_vz.visualization import text_record


def test_five_methods_explain_one_sentence_in_one_picture() -> None:
    model, tokenizer = load_agreement_model()
    encoding = tokenizer("the pictures of some hat [MASK] scaring marcus.", return_tensors="pt")
    ids, tokens = encoding["input_ids"], encoding.tokens()
    mask = tokens.index("[MASK]")
    right, wrong = tokenizer.convert_tokens_to_ids(["are", "is"])

    # Captum's gradients explain a number, here by how much the model prefers "are", and reach down to the embeddings.
    def preference(embeddings: Tensor) -> Tensor:
        logits = model(inputs_embeds=embeddings).logits[:, mask]
        return logits[:, right] - logits[:, wrong]

    embeddings = model.get_input_embeddings()(ids).detach().requires_grad_()
    integrated = token_scores(IntegratedGradients(preference).attribute(embeddings, n_steps=100))
    saliency = token_scores(Saliency(preference).attribute(embeddings), "l2")

    # Maps explain a token's vector, here that at [MASK], and take the token ids themselves.
    layers = find_layers(model)
    attention = LayerAttention(model, layers[-1]).attribute(ids, target=mask)
    zeroing = ValueZeroing(model, layers[-1]).attribute(ids, target=mask)
    rollout = ValueZeroingRollout(model, layers).attribute(ids, target=mask)

    scores = {
        "Integrated Gradients": integrated,
        "Saliency": saliency,
        "Layer Attention": attention,
        "Value Zeroing": zeroing,
        "Value Zeroing Rollout": rollout,
    }
    page = visualization.visualize_text(
        [text_record(tokens, row, attr_class=name) for name, row in scores.items()]
    ).data

    assert all(row.shape == ids.shape and row.isfinite().all() for row in scores.values())
    gained = preference(embeddings) - preference(torch.zeros_like(embeddings))
    torch.testing.assert_close(integrated.sum(1), gained, rtol=0.01, atol=0.01)  # completeness
    assert (saliency > 0).all()
    for row in (attention, zeroing, rollout):
        assert (row >= 0).all()
        torch.testing.assert_close(row.sum(1), torch.ones(1))
    assert all(name in page for name in scores)
    assert all(page.count(f"> {token} ") == len(scores) * tokens.count(token) for token in tokens)
