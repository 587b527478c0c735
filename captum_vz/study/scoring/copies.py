"""Copies of a model with random layers, or with word embeddings that are moved a little."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from captum_vz.errors import ArgumentError


def randomized_copies(
    model: nn.Module, layers: Sequence[nn.Module], *, cascading: bool = True, seed: int = 0
) -> Iterator[tuple[int, nn.Module, list[nn.Module]]]:
    r"""Copies of a model with random layers.

    .. math:: W_{ij} \sim \mathcal N\big(\operatorname{mean}(W), \operatorname{std}(W)\big)

    for each parameter W of the random layers, for the sanity check of `Adebayo et al. 2018
    <https://arxiv.org/abs/1810.03292>`_. A method whose scores do not depend on these layers' weights gives the same
    scores for the copy. Embeddings and the head stay as they are.

    Args:
        model: The trained model, which is not changed.
        layers: Its layers, in the order in which they run.
        cascading: Whether layers become random from the last to the first, one more in each copy. Otherwise there is
            one copy, in which all are random.
        seed: The same seed gives the same copies. Layers that are random in two copies are the same in both.

    Yields:
        The number of random layers, the copy, and its layers.

    Raises:
        ArgumentError: A layer is not in the model, or there is none.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    >>> for count, random, layers in randomized_copies(model, list(model)):
    ...     print(count, [bool((one.weight == other.weight).all()) for one, other in zip(random, model)])
    1 [True, False]
    2 [False, False]
    """
    places = {id(module): name for name, module in model.named_modules()}
    missing = [type(layer).__name__ for layer in layers if id(layer) not in places]
    if missing or not layers:
        raise ArgumentError(f"layers is {missing or 'empty'}: pass layers of the model.")
    names = list(dict.fromkeys(places[id(layer)] for layer in layers))
    changed = copy.deepcopy(model)
    for count, name in enumerate(reversed(names), start=1):
        _randomize(changed.get_submodule(name), seed * len(names) + count)
        if cascading or count == len(names):
            yield count, changed, [changed.get_submodule(places[id(layer)]) for layer in layers]


@torch.no_grad()
def _randomize(layer: nn.Module, seed: int) -> None:
    """Replace the parameters of a layer by random numbers with the mean and standard deviation of each."""
    generator = torch.Generator().manual_seed(seed)
    for values in layer.parameters():
        drawn: Any = torch.randn(values.shape, generator=generator, dtype=torch.float64)
        spread = values.double().std(correction=0)
        values.copy_((values.double().mean() + spread * drawn.to(values.device)).to(values.dtype))


@torch.no_grad()
def moved_copies(model: Any, radius: float, samples: int, seed: int) -> Iterator[nn.Module]:
    """The model with each of the noises on its word embeddings, one copy that is changed in place.

    Raises:
        ArgumentError: See :func:`~captum_vz.study.sensitivity`.
    """
    if not radius > 0 or samples < 1:
        raise ArgumentError(f"radius is {radius} and samples {samples}: pass numbers above 0.")
    embedding = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    if not isinstance(embedding, nn.Embedding):
        raise ArgumentError(
            f"the word embeddings of {type(model).__name__} are {type(embedding).__name__}: pass a model of "
            "transformers whose `get_input_embeddings` returns an `nn.Embedding`."
        )
    changed, own = copy.deepcopy(model), copy.deepcopy(embedding)
    changed.set_input_embeddings(own)  # a matrix of its own, which no output layer shares
    clean = embedding.weight.double()
    for number in range(samples):
        generator = torch.Generator().manual_seed(seed * samples + number)
        noise: Any = 2 * torch.rand(clean.shape, generator=generator, dtype=torch.float64) - 1
        own.weight.copy_(clean + radius * clean.std(correction=0) * noise.to(clean.device))
        yield changed
