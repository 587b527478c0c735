"""The same call and the same pictures for Captum's methods and the methods of this package."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import matplotlib.pyplot as plt
import pytest
import torch
from captum.attr import (
    IntegratedGradients,
    LayerAttribution,
    LayerGradientXActivation,
    LayerIntegratedGradients,
    Saliency,
    visualization,
)
from torch import Tensor

from captum_vz import LayerAttention, ValueZeroing, ValueZeroingRollout, find_layers, token_scores
from captum_vz.testbed import load_model
from captum_vz.visualization import text_record
from tests.captum.configurations import LAYER_METHODS, Configuration, each_method

model, tokenizer = load_model()
encoding = tokenizer("the pictures of some hat [MASK] scaring marcus.", return_tensors="pt")
ids, tokens = encoding["input_ids"], encoding.tokens()
mask, are = tokens.index("[MASK]"), tokenizer.convert_tokens_to_ids("are")
words, layers = model.get_input_embeddings(), find_layers(model)
MAPS = ("Layer Attention", "Value Zeroing", "Value Zeroing Rollout")


def one_call(captums: dict[str, Any], forward_func: Any, inputs: Tensor) -> dict[str, Tensor]:
    """The same call for each method: the logit of "are" at the mask, and the token whose logit that is."""
    methods = captums | {
        "Layer Attention": LayerAttention(forward_func, layers[-1]),
        "Value Zeroing": ValueZeroing(forward_func, layers[-1]),
        "Value Zeroing Rollout": ValueZeroingRollout(forward_func, layers),
    }
    return {name: method.attribute(inputs, target=(mask, are)) for name, method in methods.items()}


def from_embeddings() -> dict[str, Tensor]:
    def logits(embeddings: Tensor) -> Tensor:
        return model(inputs_embeds=embeddings).logits  # (batch, tokens, vocabulary)

    captums = {"Integrated Gradients": IntegratedGradients(logits), "Saliency": Saliency(logits)}
    return one_call(captums, logits, words(ids).detach().requires_grad_())


def from_ids() -> dict[str, Tensor]:
    def logits(ids: Tensor) -> Tensor:
        return model(ids).logits

    gradient = LayerGradientXActivation(logits, words, multiply_by_inputs=False)  # Saliency of a layer
    captums = {"Integrated Gradients": LayerIntegratedGradients(logits, words), "Saliency": gradient}
    return one_call(captums, logits, ids)


def test_one_call_from_ids_and_embeddings() -> None:
    scores, others = from_ids(), from_embeddings()
    whole = model(ids).logits[:, mask, are]
    blank = model(torch.full_like(ids, 0)).logits[:, mask, are]  # Captum's baseline of ids is id 0
    nothing = model(inputs_embeds=torch.zeros_like(words(ids))).logits[:, mask, are]
    for given, lost in ((scores, blank), (others, nothing)):  # completeness
        torch.testing.assert_close(given["Integrated Gradients"].sum((1, 2)), whole - lost, rtol=0.01, atol=0.01)
    torch.testing.assert_close(scores["Saliency"].abs(), others["Saliency"])
    assert (token_scores(others["Saliency"], "l2") > 0).all()
    for name in MAPS:
        torch.testing.assert_close(scores[name], others[name])


def test_maps_are_rows_of_the_mask() -> None:
    scores = from_ids()
    for name in MAPS:
        row = scores[name]
        assert row.shape == ids.shape
        assert (row >= 0).all()
        torch.testing.assert_close(row.sum(1), torch.ones(1))
    map_of_layer = ValueZeroing(model, layers[-1]).attribute(ids)
    torch.testing.assert_close(scores["Value Zeroing"], map_of_layer[:, mask])


def test_all_methods_in_one_picture() -> None:
    scores = from_ids()
    rows = {name: one if name in MAPS else token_scores(one, "l2") for name, one in scores.items()}
    page = visualization.visualize_text([text_record(tokens, row, attr_class=name) for name, row in rows.items()]).data
    assert all(row.shape == ids.shape and row.isfinite().all() for row in rows.values())
    assert all(name in page for name in scores)
    assert all(page.count(f"> {token} ") == len(scores) * tokens.count(token) for token in tokens)


# What Captum draws takes our maps as they are, and shows their numbers.


@pytest.fixture(autouse=True)
def close_figures() -> Iterator[None]:
    yield
    plt.close("all")


@pytest.mark.parametrize("way", ["heat_map", "blended_heat_map", "masked_image", "alpha_scaling"])
@each_method
def test_visualize_image_attr_draws_cls(method: Any, way: str) -> None:
    configuration = Configuration(method, "vit", layers=2 if method in LAYER_METHODS else None)
    image = configuration.case.inputs["pixel_values"][0].permute(1, 2, 0).numpy()  # (8, 8, 3), four patches
    row = configuration.run(token=0)[:1]  # what [CLS], the first token, draws on
    patches = row[:, 1:].reshape(1, 1, 2, 2)
    attributions = LayerAttribution.interpolate(patches, (8, 8))[0].permute(1, 2, 0).numpy()
    figure, axes = visualization.visualize_image_attr(
        attributions,
        original_image=(image - image.min()) / (image.max() - image.min()),
        method=way,
        sign="positive",
        outlier_perc=1e-3,
        use_pyplot=False,
    )
    figure.canvas.draw()
    (drawn,) = axes.images[-1:]
    assert drawn.get_array().shape[:2] == (8, 8)
    if way == "heat_map":
        corners = torch.tensor(drawn.get_array()[::4, ::4])  # one pixel a patch
        torch.testing.assert_close(corners, patches[0, 0] / patches.max(), rtol=1e-6, atol=0)
