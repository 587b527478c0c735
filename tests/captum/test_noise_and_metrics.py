"""Captum's NoiseTunnel and sensitivity_max on our classes, against what they are defined to compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from captum.attr import NoiseTunnel
from captum.metrics import sensitivity_max
from torch import Tensor

from captum_vz import to_embeddings
from tests.captum.configurations import LAYER_METHODS, STACK_METHODS, Configuration, each_method, tensors

# Positions that hold a token in each of the three examples (7, 5 and 3 long).
TARGETS: dict[str, Any] = {
    "all": None,
    "int": 2,
    "list": [2, 0, 1],
    "tensor": torch.tensor([1, 2, 0]),
    "pairs": [(1, 0), (0, 2), (2, 2)],
}


def on_embeddings(method: Any, **options: Any) -> Configuration:
    """Noise needs floating point, so embeddings go in; NoiseTunnel takes no list, so one layer unless it is a stack."""
    layers = 1 if method in LAYER_METHODS else None
    return Configuration(method, inputs="embeddings", layers=layers, options=options)


@pytest.mark.parametrize("form", TARGETS)
@each_method
def test_noise_tunnel_without_noise(method: Any, form: str) -> None:
    configuration = on_embeddings(method)
    tunnel = NoiseTunnel(configuration.build())
    smoothed = tunnel.attribute(**configuration.arguments, nt_samples=3, stdevs=0.0, target=TARGETS[form])
    torch.testing.assert_close(smoothed, configuration.run(target=TARGETS[form]), rtol=1e-10, atol=1e-13)


@each_method
def test_noise_tunnel_repeats_feature_mask(method: Any) -> None:
    configuration = on_embeddings(method)
    masks = torch.tensor([[0, 0, 1, 1, 2, 2, 3], [0, 1, 1, 2, 3, 4, 5], [0, 0, 0, 1, 2, 3, 4]])
    (embeddings, further), stack = configuration.arguments.values(), method in STACK_METHODS
    smoothed = NoiseTunnel(configuration.build()).attribute(
        (embeddings,) if stack else embeddings,  # a stack answers a tuple for a tuple
        nt_samples=2,
        stdevs=0.0,
        target=2,
        feature_mask=masks,
        additional_forward_args=further,
    )
    expected = configuration.run(target=2, feature_mask=masks)
    torch.testing.assert_close(smoothed[0] if stack else smoothed, expected, rtol=1e-10, atol=1e-13)
    assert not torch.allclose(expected, configuration.run(target=2))


def moved(embeddings: Tensor) -> Tensor:
    """A perturbation without chance. Captum hands over one input as a tensor, without its tuple."""
    return embeddings + 0.1 * embeddings.cos()


@pytest.mark.parametrize(("form", "examples", "samples"), [("int", 1, 1), ("int", 3, 2), ("list", 3, 2), ("all", 3, 2)])
@each_method
def test_sensitivity_max_is_relative_change(method: Any, form: str, examples: int, samples: int) -> None:
    """Also by `to_embeddings`, which returns a tuple for Captum's tuple, for layer methods too.

    Of one example and one sample, Captum would compare single rows of what is no tuple, without a word.
    """
    configuration = on_embeddings(method)
    attribution = configuration.build()
    embeddings, (further,) = configuration.arguments.values()
    embeddings, further = embeddings[:examples], further[:examples]
    keywords = {"target": TARGETS[form], "additional_forward_args": further}

    def spread(inputs: Any, **keywords: Any) -> Any:
        (row,) = tensors(attribution.attribute(inputs, **keywords))
        return to_embeddings(row, inputs)

    before, after = (attribution.attribute(x, **keywords) for x in (embeddings, moved(embeddings)))
    expected = (before - after).flatten(1).norm(dim=1) / before.flatten(1).norm(dim=1)
    assert (expected > 0).all()
    for explain in (attribution.attribute, *([] if form == "all" else [spread])):
        found = sensitivity_max(explain, embeddings, perturb_func=moved, n_perturb_samples=samples, **keywords)
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=0)
