"""A small random model of any type, and inputs that it takes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from tests.sweep.configs import tiny_config
from tests.sweep.inputs import candidate_inputs

LARGEST = 200_000_000  # parameters


def small_models(model_type: str) -> Iterator[nn.Module]:
    """Models of this type: first one of tiny width, then one that is only shallow.

    Raises:
        Exception: Whatever the constructors raise, if none can be built.
    """
    problem = None
    for shallow in (False, True):
        try:
            model = _build(model_type, shallow)
        except Exception as error:  # sizes that do not fit together fail in any manner
            problem = problem or error
            continue
        yield model
        problem = None if shallow else problem
    if problem is not None:
        raise problem


def _build(model_type: str, shallow: bool) -> nn.Module:
    config = tiny_config(model_type, shallow)
    config._attn_implementation = "eager"
    model_class = MODEL_MAPPING[type(config)]
    if isinstance(model_class, list | tuple):
        model_class = model_class[0]
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in model_class(config).parameters())
    assert size < LARGEST, f"{size / 1e6:.0f} million parameters"
    model = model_class(config).float().eval()
    randomise(model)
    return model


@torch.no_grad()
def randomise(model: nn.Module) -> None:
    """Weights at which attention matters: products keep the size of what they are given, norms scale by about one."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point():
            continue
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() > 1:
            parameter.copy_(noise / max(parameter[0].numel(), 1) ** 0.5)
        elif "bias" in name:
            parameter.copy_(noise * 0.1)
        elif "norm" in name.lower() or "ln" in name.lower():
            parameter.add_(noise * 0.1)
        elif not parameter.isfinite().all():
            parameter.copy_(noise)


def working_inputs(model: nn.Module) -> tuple[dict[str, Any], Exception | None]:
    """The first inputs that the model runs on, or none, and what it said to the likeliest."""
    problem: Exception | None = None
    for inputs in candidate_inputs(model):
        try:
            with torch.no_grad():
                model(**inputs)
            return inputs, None
        except Exception as error:  # inputs that do not fit fail in any manner
            problem = problem or error
    return {}, problem or ValueError("no inputs are known for what its forward takes")
