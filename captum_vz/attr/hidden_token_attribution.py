"""Hidden Token Attribution (Brunner et al., ICLR 2020)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from captum_vz._engine import AttentionSite, budget_of
from captum_vz.attr._layer_maps import LayerMaps
from captum_vz.attr._wanted import Wanted
from captum_vz.errors import ArgumentError, RefusedError, UnsupportedLayerError
from captum_vz.functional import widen


class HiddenTokenAttribution(LayerMaps):
    r"""How strongly each output *token* of a layer answers to small changes of what the stack is given for each token.

    .. math:: C^l_{ij} = \Big\lVert \frac{\partial h^l_i}{\partial x^0_j} \Big\rVert_F, \qquad
        \hat C^l_{ij} = C^l_{ij} \big/ \textstyle\sum_k C^l_{ik}

    where :math:`h^l_i` is the output of layer l at token i and :math:`x^0_j` what goes into the first layer at token j:
    for BERT the normed sum of word, position and token type, for a vision model its patches. `Brunner et al. 2020
    <https://openreview.net/forum?id=BJg1f6EFDB>`_, section 5. Unlike the other maps of a layer this one goes through
    all layers below, as a rollout does.

    The exact map costs d backward passes a row, as many as the layer is wide, of which several are run at once; all
    examples of a batch share them. With `probes`, they are that many: for g of independent standard normal numbers,
    :math:`\lVert J^\top g \rVert^2` is an unbiased estimate of :math:`\lVert J \rVert_F^2`. Its relative standard
    deviation is at most :math:`\sqrt{2 / n}` for n probes (that of C half of it), and smaller the more directions the
    Jacobian has that matter.

    One `token` costs one row in place of all. With `feature_mask`, :math:`x^0` is all vectors of a group together.
    Gradients are computed also where the caller has switched them off, none of them for parameters, and in the
    precision of the model. The arguments of `attribute`, what comes back and what is raised are described in
    :class:`~captum_vz.attr.LayerMaps`, At most `perturbations_per_eval` backward passes are run at once (with 1, the
    model's backward pass need not know how to be batched).

    Args:
        forward_func: A model, or any function that runs the layers, in one thread and on one device.
        layer: A layer (a whole Transformer block) or a list of layers, for which `attribute` returns a list of maps.
            `captum_vz.find_layers(model)` gives all layers.
        device_ids: Not used.
        embeddings: The module whose output `(batch, tokens, d)` takes the place of :math:`x^0`, and whose tokens are
            the columns: `model.get_input_embeddings()` for the words alone, `model.get_encoder().embed_tokens` for
            what the layers of a decoder draw on the tokens of its encoder. None: :math:`x^0` itself, of the stack that
            `layer` belongs to (of a decoder, its own tokens): the list of modules that holds `layer`, which has to
            begin with a layer of the same class.
        probes: None: exact; a number: estimated with so many probes a row, the same for all rows and examples.
        seed: Of the probes; estimates with the same one are the same.
        normalize: Whether each row is divided by its sum. False gives the norms themselves.

    >>> from captum_vz import HiddenTokenAttribution, find_layers
    >>> from captum_vz.testbed import load_agreement_model
    >>> model, tokenizer = load_agreement_model()
    >>> inputs = tokenizer("the pictures of some hat [MASK] scaring marcus.", return_tensors="pt")
    >>> method = HiddenTokenAttribution(model, find_layers(model)[-1])
    >>> row = method.attribute(inputs["input_ids"], target=6)  # (batch, in)
    >>> row.shape == inputs["input_ids"].shape, round(row.sum().item(), 4)
    (True, 1.0)
    """

    needs_graph = True

    def __init__(
        self,
        forward_func: Callable[..., Any],
        layer: Any,
        device_ids: list[int] | None = None,
        *,
        embeddings: nn.Module | None = None,
        probes: int | None = None,
        seed: int = 0,
        normalize: bool = True,
    ) -> None:
        super().__init__(forward_func, layer, device_ids, normalize=normalize)
        if probes is not None and not (type(probes) is int and probes >= 1):
            raise ArgumentError(f"probes is {probes!r}: pass an integer of at least 1, or None for the exact map.")
        self.embeddings = embeddings
        self.probes = probes
        self.seed = seed

    def layer_scores(self, site: AttentionSite, wanted: Wanted) -> Tensor:
        """The norms of the Jacobians, `(batch, row, group)`."""
        output, vectors, rows, groups = site.output, wanted.leaf, wanted.rows, wanted.groups
        assert output is not None and vectors is not None  # narrows the types: the shell saw to both
        if not output.isfinite().all():
            raise RefusedError(
                f"{site.layer.name} returned values that are not finite (NaN or infinity) in {output.dtype}. float16 "
                "overflows above 65504: load the model in bfloat16 or float32, and check its weights and inputs."
            )
        if not output.requires_grad:
            raise UnsupportedLayerError(
                f"The output of {site.layer.name} does not depend on the vectors by any gradient: forward_func must "
                "not switch gradients off (torch.no_grad, detach), and the layer has to run after the module that the "
                "vectors were taken from."
            )
        # What went into the first layer has its axes in that layer's order.
        tokens_first = site.attention.tokens_first and self.embeddings is None
        size = (vectors.transpose(0, 1) if tokens_first else vectors).shape[:2]
        if groups is not None and groups.shape != size:
            raise ArgumentError(
                f"feature_mask is one of {groups.shape[1]} tokens, those that the layer's attention sees, but the map "
                f"has columns for the {size[1]} tokens of `embeddings` or of the first layer: leave feature_mask out."
            )
        tokens = site.target_mask
        if rows is None:
            rows = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        hidden = site.attention.batch_first(output)
        squares = self._squares(hidden, vectors, tokens_first, rows, wanted.max_groups)
        squares = squares * tokens.gather(1, rows)[:, :, None]
        if site.source_mask.shape == size:
            squares = squares * site.source_mask[:, None]
        return wanted.pool_sources(squares).sqrt()

    def _squares(
        self, hidden: Tensor, vectors: Tensor, tokens_first: bool, rows: Tensor, at_most: int | None
    ) -> Tensor:
        """The squared Frobenius norms of the Jacobians `(batch, row, in)`: a backward pass a row and direction."""
        batch, _, width = hidden.shape
        directions = torch.eye(width) if self.probes is None else self._probes(width)
        directions = directions.to(hidden)
        squares = widen(vectors.new_zeros(batch, rows.shape[1], vectors.shape[not tokens_first]))
        example = torch.arange(batch, device=rows.device)
        at_once = at_most or budget_of(hidden.device).items_in_chunk(hidden, hidden.numel() + vectors.numel())
        for passes in torch.arange(rows.shape[1] * len(directions), device=rows.device).split(at_once):
            row, direction = passes // len(directions), passes % len(directions)
            seeds = hidden.new_zeros(len(passes), *hidden.shape)
            seeds[torch.arange(len(passes), device=rows.device)[:, None], example, rows.T[row]] = directions[direction][
                :, None
            ]
            # A single one is run as ever, for models with an operation whose backward pass cannot be batched.
            many = len(passes) > 1
            (found,) = torch.autograd.grad(
                hidden,
                vectors,
                seeds if many else seeds[0],
                retain_graph=True,
                is_grads_batched=many,
                materialize_grads=True,
            )
            found = widen(found if many else found[None]).square().sum(-1)
            squares.index_add_(1, row, (found.mT if tokens_first else found).transpose(0, 1))
        return squares / (1 if self.probes is None else self.probes)

    def _probes(self, width: int) -> Tensor:
        """Normal numbers `(probe, d)`, drawn on the CPU in float64, that they are the same everywhere."""
        assert self.probes is not None  # narrows the type
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randn(self.probes, width, generator=generator, dtype=torch.float64)
