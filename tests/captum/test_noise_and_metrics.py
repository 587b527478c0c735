"""Captum's NoiseTunnel, sensitivity_max and infidelity on our classes, against what they are defined to compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from captum.attr import NoiseTunnel
from captum.metrics import infidelity, sensitivity_max
from torch import Tensor

from captum_vz import ValueZeroing, ValueZeroingRollout, to_embeddings
from tests.captum.configurations import LAYER_METHODS, METHODS, STACK_METHODS, Configuration, tensors

each_method = pytest.mark.parametrize("method", METHODS)

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


@pytest.mark.parametrize("nt_samples_batch_size", [None, 1, 2])
@pytest.mark.parametrize("nt_type", ["smoothgrad", "smoothgrad_sq", "vargrad"])
@pytest.mark.parametrize("method", [ValueZeroing, ValueZeroingRollout])
def test_noise_tunnel_averages_over_noisy_copies(method: Any, nt_type: str, nt_samples_batch_size: int | None) -> None:
    samples, deviation, target = 5, 0.3, [2, 0, 1]
    configuration = on_embeddings(method)
    attribution = configuration.build()
    embeddings, further = configuration.arguments.values()

    torch.manual_seed(7)
    smoothed = NoiseTunnel(attribution).attribute(
        embeddings,
        nt_type=nt_type,
        nt_samples=samples,
        nt_samples_batch_size=nt_samples_batch_size,
        stdevs=deviation,
        target=target,
        additional_forward_args=further,
    )

    torch.manual_seed(7)
    batch, size = len(embeddings), nt_samples_batch_size or samples
    answers = []  # one a sample, drawn in NoiseTunnel's order: so many copies of an example at a time, side by side
    for start in range(0, samples, size):
        copies = min(size, samples - start)
        noise = torch.normal(0, torch.full((batch * copies, *embeddings.shape[1:]), deviation))
        for copy in range(copies):
            noisy = embeddings + noise.unflatten(0, (batch, copies))[:, copy]
            answers.append(attribution.attribute(noisy, target=target, additional_forward_args=further))
    mean, square = sum(answers) / samples, sum(answer**2 for answer in answers) / samples
    expected = {"smoothgrad": mean, "smoothgrad_sq": square, "vargrad": square - mean**2}[nt_type]
    torch.testing.assert_close(smoothed, expected, rtol=1e-8, atol=1e-12)
    assert not torch.allclose(smoothed, configuration.run(target=target))


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


@pytest.mark.parametrize("form", ["int", "list", "all"])
@each_method
def test_sensitivity_max_is_relative_change(method: Any, form: str) -> None:
    """Also by `to_embeddings`, which returns a tuple for Captum's tuple, for layer methods too."""
    configuration = on_embeddings(method)
    attribution = configuration.build()
    embeddings, further = configuration.arguments.values()
    keywords = {"target": TARGETS[form], "additional_forward_args": further}

    def spread(inputs: Any, **keywords: Any) -> Any:
        (row,) = tensors(attribution.attribute(inputs, **keywords))
        return to_embeddings(row, inputs)

    before, after = (attribution.attribute(x, **keywords) for x in (embeddings, moved(embeddings)))
    expected = (before - after).flatten(1).norm(dim=1) / before.flatten(1).norm(dim=1)
    assert (expected > 0).all()
    for explain in (attribution.attribute, *([] if form == "all" else [spread])):
        found = sensitivity_max(explain, embeddings, perturb_func=moved, n_perturb_samples=2, **keywords)
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=0)


@pytest.mark.parametrize("examples", [1, 2])
@pytest.mark.parametrize("samples", [1, 3])
@each_method
def test_sensitivity_max_of_the_method_itself(method: Any, samples: int, examples: int) -> None:
    """It takes the answer for a tuple. Of one example and one sample, it would compare single rows without a word."""
    configuration = on_embeddings(method)
    attribution = configuration.build()
    embeddings, further = configuration.arguments.values()
    keywords = {"target": 1, "additional_forward_args": further[:examples]}

    def by_hand(inputs: Any, **keywords: Any) -> Any:
        return tuple(tensors(attribution.attribute(inputs, **keywords)))

    found, expected = (
        sensitivity_max(
            explain,
            embeddings[:examples],
            perturb_func=moved,
            n_perturb_samples=samples,
            max_examples_per_batch=2,
            **keywords,
        )
        for explain in (attribution.attribute, by_hand)
    )
    assert torch.equal(found, expected)
    assert (found > 0).all()


@each_method
def test_infidelity_of_a_row(method: Any) -> None:
    configuration = on_embeddings(method)
    embeddings, further = configuration.arguments.values()
    row = configuration.run(target=2)
    spread = to_embeddings(row, embeddings)

    def value(embeddings: Tensor, mask: Tensor) -> Tensor:
        """One number an example, as infidelity wants it."""
        return configuration.forward_func(embeddings, mask).last_hidden_state[:, 2, 0]

    def perturb(inputs: Tensor) -> tuple[Tensor, Tensor]:
        return inputs - moved(inputs), moved(inputs)

    found = infidelity(value, perturb, embeddings, spread, additional_forward_args=further, n_perturb_samples=2)

    change = embeddings - moved(embeddings)
    dropped = value(embeddings, *further) - value(moved(embeddings), *further)
    for b in range(len(embeddings)):
        told = sum((change[b, j] * row[b, j] / embeddings.shape[-1]).sum().item() for j in range(row.shape[1]))
        assert found[b].item() == pytest.approx((told - dropped[b].item()) ** 2, rel=1e-8)
