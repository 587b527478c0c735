"""Hidden Token Attribution (Brunner et al., ICLR 2020)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from captum_vz._engine import AttentionSite, budget_of
from captum_vz._private import batched
from captum_vz.attr._base import LayerMaps
from captum_vz.attr._call.target import Wanted
from captum_vz.errors import ArgumentError, UnsupportedLayerError
from captum_vz.functional import widen


class HiddenTokenAttribution(LayerMaps):
    r"""How much each output *token* of a layer changes with small changes of each token's input vector of the stack.

    .. math:: C^l_{ij} = \Big\lVert \frac{\partial h^l_i}{\partial x^0_j} \Big\rVert_F, \qquad
        \hat C^l_{ij} = C^l_{ij} \big/ \textstyle\sum_k C^l_{ik}

    where :math:`h^l_i` is the output of layer l at token i and :math:`x^0_j` is the input of the first layer at token
    j. For BERT, :math:`x^0_j` is the normed sum of word, position and token type embeddings. For a vision model,
    :math:`x^0` holds the patches. `Brunner et al. 2020 <https://openreview.net/forum?id=BJg1f6EFDB>`_, section 5. The
    map includes all layers up to this layer, as a rollout does. Maps of other methods describe one layer.

    The exact map takes d backward passes for each row, where d is the layer's width. Several passes run at once, and
    all examples of a batch share the passes. With `probes=n`, each row takes n backward passes. For a vector g of
    independent standard normal numbers, :math:`\lVert J^\top g \rVert^2` is an unbiased estimate of :math:`\lVert J
    \rVert_F^2`. The relative standard deviation of its mean is at most :math:`\sqrt{2 / n}`, and half as much for C.
    The deviation is smaller if many directions contribute to the Jacobian.

    With one `token`, one row is computed. With `feature_mask`, the norm is taken over all vectors of a group. Gradients
    are computed in the precision of the model, also inside `torch.no_grad`. Parameters get no gradients. At most
    `perturbations_per_eval` backward passes run at once. With 1, operations whose backward pass cannot be batched are
    supported. :meth:`attribute` describes its arguments, results and errors.

    Args:
        forward_func, layer, device_ids: See :class:`~captum_vz.attr.LayerMaps`. All runs on one device, in one thread.
        embeddings: The module whose output `(batch, tokens, d)` replaces :math:`x^0`. Its tokens are the columns of the
            map. Pass `model.get_input_embeddings()` for the words alone, or `model.get_encoder().embed_tokens` for the
            encoder tokens of a decoder layer. None: the input of the stack that contains `layer`. The stack is the
            list of modules that holds `layer`, and must begin with a layer of the same class.
        probes: The number of probes for each row, the same for all rows and examples. None: the exact map.
        seed: The seed of the probes. The same seed gives the same estimates.
        multiply_by_inputs: Whether each derivative is multiplied by its entry of :math:`x^0_j`, as in gradient times
            input. With the layer below as `embeddings`, this is the local form that `Modarressi et al. 2022
            <https://aclanthology.org/2022.naacl-main.19>`_ compare with: the norm of :math:`J \odot x^{l-1}`.
        normalize: Whether to divide each row by its sum. False returns the norms themselves.

    >>> from captum_vz import HiddenTokenAttribution, find_layers
    >>> from captum_vz.testbed import load_model
    >>> model, tokenizer = load_model()
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
        layer: Any = None,
        device_ids: list[int] | None = None,
        *,
        embeddings: nn.Module | None = None,
        probes: int | None = None,
        seed: int = 0,
        multiply_by_inputs: bool = False,
        normalize: bool = True,
    ) -> None:
        super().__init__(forward_func, layer, device_ids, normalize=normalize)
        if probes is not None and not (type(probes) is int and probes >= 1):
            raise ArgumentError(f"probes is {probes!r}: pass an integer of at least 1, or None for the exact map.")
        self.embeddings = embeddings
        self.probes = probes
        self.seed = seed
        self.multiply_by_inputs = multiply_by_inputs

    def layer_scores(self, site: AttentionSite, wanted: Wanted) -> Tensor:
        """The norms of the Jacobians, `(batch, row, group)`."""
        output, vectors, rows, groups = site.output, wanted.leaf, wanted.rows, wanted.groups
        assert output is not None and vectors is not None  # narrows the types: LayerMaps checks both
        if not output.requires_grad:
            raise UnsupportedLayerError(
                f"The output of {site.layer.name} does not depend on the vectors by any gradient. Pass a forward_func "
                "without torch.no_grad and detach, and a layer that runs after the module that returns the vectors."
            )
        # The input of the first layer has the axes of that layer.
        tokens_first = site.attention.tokens_first and self.embeddings is None
        size = (vectors.transpose(0, 1) if tokens_first else vectors).shape[:2]
        if groups is not None and groups.shape != size:
            raise ArgumentError(
                f"feature_mask has {groups.shape[1]} tokens, but the map has {size[1]} columns, the tokens of "
                "`embeddings`. Leave feature_mask None."
            )
        tokens = site.target_mask
        if rows is None:
            rows = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        squares = self._squares(output, vectors, tokens_first, rows, wanted.max_groups)
        squares = squares * tokens.gather(1, rows)[:, :, None]
        if site.source_mask.shape == size:
            squares = squares * site.source_mask[:, None]
        return wanted.pool_sources(squares).sqrt()

    def _squares(
        self, hidden: Tensor, vectors: Tensor, tokens_first: bool, rows: Tensor, at_most: int | None
    ) -> Tensor:
        """The squared Frobenius norms of the Jacobians `(batch, row, in)`, by one backward pass a row and direction."""
        batch, _, width = hidden.shape
        directions = torch.eye(width)
        if self.probes is not None:  # on the CPU in float64, so that all devices use the same numbers
            drawn = torch.Generator().manual_seed(self.seed)
            directions = torch.randn(self.probes, width, generator=drawn, dtype=torch.float64)
        directions = directions.to(hidden)
        squares = widen(vectors.new_zeros(batch, rows.shape[1], vectors.shape[not tokens_first]))
        example = torch.arange(batch, device=rows.device)

        def backward(seed: Tensor) -> Tensor:
            return torch.autograd.grad(hidden, vectors, seed, retain_graph=True, materialize_grads=True)[0]

        at_once = at_most or budget_of(hidden.device).items_in_chunk(hidden, hidden.numel() + vectors.numel())
        for passes in torch.arange(rows.shape[1] * len(directions), device=rows.device).split(at_once):
            row, direction = passes // len(directions), passes % len(directions)
            seeds = hidden.new_zeros(len(passes), *hidden.shape)
            number = torch.arange(len(passes), device=rows.device)[:, None]
            seeds[number, example, rows.T[row]] = directions[direction][:, None]
            # A single pass is not batched, because some operations have no batched backward pass. Unlike
            # `is_grads_batched`, torch.func has batched kernels for norms, activations and softmax.
            found = widen(backward(seeds[0])[None] if len(passes) == 1 else batched(backward, seeds))
            if self.multiply_by_inputs:
                found = found * widen(vectors.detach())
            found = found.square().sum(-1)
            squares.index_add_(1, row, (found.mT if tokens_first else found).transpose(0, 1))
        return squares / (self.probes or 1)
