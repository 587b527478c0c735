"""A small random model of any type, and inputs for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from tests.sweep.configs import tiny_config
from tests.sweep.inputs import SHORT, candidate_inputs

LARGEST = 200_000_000  # parameters


def small_models(model_type: str, released: str = "") -> Iterator[nn.Module]:
    """Models of this type: first a narrow one, then one of full width with few layers.

    Raises:
        Exception: The constructor's error, if no model can be built.
    """
    problem = None
    for shallow in (False, True):
        try:
            model = _build(model_type, shallow, released)
        except Exception as error:  # a constructor may raise anything on sizes that do not fit
            problem = problem or error
            continue
        yield model
        problem = None if shallow else problem
    if problem is not None:
        raise problem


def _build(model_type: str, shallow: bool, released: str) -> nn.Module:
    config = tiny_config(model_type, shallow, released)
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
    """Draw weights with which attention matters: matrices keep the size of their input, norms scale by about one."""
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


def working_inputs(model: nn.Module, lengths: tuple[int, ...] = SHORT) -> tuple[dict[str, Any], Exception | None]:
    """The first inputs that the model runs on; if there are none, {} and the error of the most likely ones."""
    problem: Exception | None = None
    for inputs in candidate_inputs(model, lengths):
        try:
            with torch.no_grad():
                model(**inputs)
            return inputs, None
        except Exception as error:  # a model may raise anything on inputs that do not fit
            problem = problem or error
    return {}, problem or ValueError("the sweep knows no inputs for the arguments of its forward")
