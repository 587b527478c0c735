"""Maps of consecutive layers joined: rollout, their product; receptive fields; attention flow, the largest flow."""

from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from captum_vz.errors import ArgumentError
from captum_vz.functional.scores import normalize_rows, widen

Residual: TypeAlias = float | Literal["renormalize", "add"] | None


def add_residual(scores: Tensor, residual: Residual) -> Tensor:
    r"""Adds to a map the share that each token keeps of itself along the residual connection.

    ============= ======================================== ==============================
    `residual`    formula                                  rows sum to
    ============= ======================================== ==============================
    None          :math:`S`                                1, if those of :math:`S` do
    0.5           :math:`\tfrac12 S + \tfrac12 I`          1, if those of :math:`S` do
    "renormalize" :math:`S + I`, divided by its row sums   1
    "add"         :math:`S + I`                            2, if those of :math:`S` sum to 1
    ============= ======================================== ==============================

    0.5 is the choice of `Abnar & Zuidema 2020 <https://aclanthology.org/2020.acl-main.385>`_. "add" is the choice of
    `Chefer et al. 2021 <https://arxiv.org/abs/2103.15679>`_. A row of zeros belongs to padding. It gets no residual and
    stays zero.

    Args:
        scores: A map `(batch, tokens, tokens)`.
        residual: None, 0.5, "renormalize" or "add".

    Returns:
        A map of the same shape, in at least float32.

    Raises:
        ArgumentError: `residual` is unknown, or `scores` is not such a map.

    >>> add_residual(torch.tensor([[[0.2, 0.8], [0.0, 0.0]]]), 0.5)
    tensor([[[0.6000, 0.4000],
             [0.0000, 0.0000]]])
    """
    if residual not in (None, 0.5, "renormalize", "add"):
        raise ArgumentError(f"residual is {residual!r}: pass None, 0.5, 'renormalize' or 'add'.")
    if scores.ndim != 3 or scores.shape[1] != scores.shape[2]:
        raise ArgumentError(f"Expected a map (batch, tokens, tokens), got {tuple(scores.shape)}.")
    scores = widen(scores)
    if residual is None:
        return scores
    present = (scores != 0).any(-1)
    total = scores + torch.diag_embed(present.to(scores))
    if residual == "renormalize":
        return normalize_rows(total)
    return total if residual == "add" else total / 2


def rollout(maps: Iterable[Tensor], residual: Residual = None) -> list[Tensor]:
    r"""How much each token draws on each input token, through all layers up to each layer.

    .. math:: R_0 = S_0, \qquad R_l = S_l R_{l-1}

    :math:`S_l` is the map of layer l with its residual added (`Abnar & Zuidema 2020
    <https://aclanthology.org/2020.acl-main.385>`_, equation 1). Maps of ALTI include the residual, so leave `residual`
    None for them. For maps of Value Zeroing see :class:`~captum_vz.ValueZeroingRollout`.

    Args:
        maps: One map `(batch, tokens, tokens)` for each layer, first layer first, or all maps in one tensor
            `(layers, batch, tokens, tokens)`.
        residual: None, 0.5, "renormalize" or "add", see :func:`add_residual`.

    Returns:
        The rollout after each layer, `(batch, tokens, tokens)`. It is in float64, because it is a product of many small
        numbers. Rows sum to 1 if the rows of all maps do, except for "add".

    Raises:
        ArgumentError: There is no map, the maps differ in shape, or `residual` is unknown.

    >>> halfway = torch.tensor([[[0.5, 0.5], [0.0, 1.0]]])
    >>> rollout([halfway, halfway])[-1]
    tensor([[[0.2500, 0.7500],
             [0.0000, 1.0000]]], dtype=torch.float64)
    """
    rollouts: list[Tensor] = []
    for scores in maps:
        step = add_residual(scores.double(), residual)
        _check_shape(step, rollouts)
        rollouts.append(step @ rollouts[-1] if rollouts else step)
    if not rollouts:
        raise ArgumentError("rollout needs the map of at least one layer, got none.")
    return rollouts


def receptive_fields(maps: Iterable[Tensor], residual: Residual = None) -> list[Tensor]:
    r"""How many output tokens each input token reaches, through all layers up to each layer.

    .. math:: n_{lj} = \textstyle\sum_i \big[ (S_l S_{l-1} \cdots S_0)_{ij} \neq 0 \big]

    :math:`S_l` is the map of layer l with its residual added. In a causal stack of n tokens, :math:`n_{lj} = n - j`.
    Rollout and flow, summed over output tokens, therefore favour early input tokens there. `Abnar & Zuidema 2020
    <https://aclanthology.org/2020.acl-main.385>`_ advise to divide by the receptive field.

    Args:
        maps: One map `(batch, tokens, tokens)` for each layer, first layer first, or all maps in one tensor
            `(layers, batch, tokens, tokens)`.
        residual: None, 0.5, "renormalize" or "add", see :func:`add_residual`.

    Returns:
        The counts after each layer, `(batch, tokens)` in float64. They are 0 for padding.

    Raises:
        ArgumentError: There is no map, the maps differ in shape, or `residual` is unknown.

    >>> causal = torch.tensor([[[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.2, 0.2, 0.6]]])
    >>> receptive_fields([causal, causal])[-1]
    tensor([[3., 2., 1.]], dtype=torch.float64)
    """
    reached: list[Tensor] = []
    for scores in maps:
        step = (add_residual(scores, residual) != 0).double()
        _check_shape(step, reached)
        # Numbers of paths, clamped to 1. Products of the maps themselves would underflow in a deep stack.
        reached.append((step @ reached[-1]).clamp_max(1) if reached else step)
    if not reached:
        raise ArgumentError("receptive_fields needs the map of at least one layer, got none.")
    return [tokens.sum(-2) for tokens in reached]


def _check_shape(step: Tensor, before: list[Tensor]) -> None:
    if before and step.shape != before[-1].shape:
        raise ArgumentError(
            f"All maps need one shape: map {len(before)} is {tuple(step.shape)}, "
            f"the maps before it are {tuple(before[-1].shape)}."
        )


def encoder_decoder_rollout(encoder: Tensor | None, decoder: Iterable[Tensor]) -> list[Tensor]:
    r"""How much each token of a decoder draws on each token of its encoder and on each of its own inputs.

    .. math:: R_l = \big[\, S_l^{\text{src}} E + S_l^{\text{tgt}} R_{l-1}^{\text{src}} \;\big|\;
        S_l^{\text{tgt}} R_{l-1}^{\text{tgt}} \,\big], \qquad R_{-1} = [\, 0 \mid I \,]

    :math:`E` is the rollout of the encoder. :math:`S_l = [S_l^{\text{src}} \mid S_l^{\text{tgt}}]` is the map of layer
    l of the decoder (`Ferrando et al. 2022, ALTI+ <https://aclanthology.org/2022.emnlp-main.599>`_).

    Args:
        encoder: `(batch, source, source)`. None: the sources are the encoder's outputs.
        decoder: One map `(batch, out, source + out)` for each layer, first layer first. The columns are the encoder's
            outputs, then the layer's inputs.

    Returns:
        The rollout after each layer, `(batch, out, source + out)` in float64. Rows sum to 1 if the rows of all maps do.

    Raises:
        ArgumentError: There is no map, or the maps do not fit each other.

    >>> encoder = torch.tensor([[[0.5, 0.5], [0.0, 1.0]]])
    >>> layer = torch.tensor([[[0.5, 0.0, 0.5]]])  # two source tokens, one of the decoder's own
    >>> encoder_decoder_rollout(encoder, [layer, layer])[-1]
    tensor([[[0.3750, 0.3750, 0.2500]]], dtype=torch.float64)
    """
    rollouts: list[Tensor] = []
    for scores in decoder:
        out = scores.shape[1]
        source = scores.shape[2] - out
        encoder_tokens = source if encoder is None else encoder.shape[1]
        shape = (len(scores), out, encoder_tokens + out)
        before = tuple(rollouts[-1].shape) if rollouts else shape
        if source < 0 or source != encoder_tokens or before != shape:
            raise ArgumentError(
                f"Map {len(rollouts)} is {tuple(scores.shape)}, (batch, out, source + out), but the encoder has "
                f"{encoder_tokens} tokens and the rollout before it is {before}."
            )
        drawn, own = scores.double().split([source, out], dim=2)
        if encoder is not None:
            drawn = drawn @ encoder.double()
        if rollouts:
            own = own @ rollouts[-1]
            rollouts.append(torch.cat([drawn + own[..., :source], own[..., source:]], dim=2))
        else:
            rollouts.append(torch.cat([drawn, own], dim=2))
    if not rollouts:
        raise ArgumentError("encoder_decoder_rollout needs the map of at least one layer of a decoder, got none.")
    return rollouts


# Capacities are integers in units of 2**-53, the step of float64 below 1. Python's integers have no limit, so the flow
# is exact and the search ends. With floats, rounding errors remain as capacity: networkx's Dinitz then fails on one
# pair of tokens in ten.
_UNITS = 2**53


def attention_flow(
    maps: Iterable[Tensor], rows: Sequence[int] | None = None, residual: Residual = 0.5, normalize: bool = True
) -> Tensor:
    r"""The largest flow from each input token to each token after the last layer, with weights as capacities.

    .. math:: F_{ij} = \operatorname{maxflow}\big((L, i) \to (0, j)\big), \qquad
        \operatorname{capacity}\big((l{+}1, i) \to (l, j)\big) = \tfrac12 A_{l,ij} + \tfrac12 [i = j]

    Each pair of tokens is computed alone. Then rows are normalised (`Abnar & Zuidema 2020
    <https://aclanthology.org/2020.acl-main.385>`_). Before that, flow is at most 1 if the rows of the maps sum to 1.
    It is never less than rollout, which is one of the possible flows. To get the flow after an earlier layer, pass the
    maps up to that layer.

    The flows are computed by networkx with shortest augmenting paths, the fastest of its solvers on these networks. One
    pair takes about 20 ms at 12 layers and 32 tokens, so ask only for the rows that you need.

    Args:
        maps: One map `(batch, tokens, tokens)` for each layer, first layer first, or all maps in one tensor
            `(layers, batch, tokens, tokens)`. Rows should sum to 1.
        rows: The output tokens to compute. Negative positions count from the end. None: all tokens.
        residual: None, 0.5, "renormalize" or "add", see :func:`add_residual`.
        normalize: Whether to divide each row by its sum.

    Returns:
        `(batch, rows, tokens)` in float64. Rows sum to 1 if normalised.

    Raises:
        ArgumentError: There is no map, or the maps differ in shape. A weight is negative or not finite. A row is out of
            range. `residual` is unknown.

    >>> halfway = torch.tensor([[[0.5, 0.5], [0.0, 1.0]]])
    >>> attention_flow([halfway, halfway], rows=[0], normalize=False)
    tensor([[[0.7500, 0.5000]]], dtype=torch.float64)
    """
    layers = [add_residual(scores.double(), residual) for scores in maps]
    if not layers:
        raise ArgumentError("attention_flow needs the map of at least one layer, got none.")
    shapes = {tuple(layer.shape) for layer in layers}
    if len(shapes) != 1:
        raise ArgumentError(f"All maps need one shape, got {sorted(shapes)}.")
    capacities = torch.stack(layers, dim=1)
    if not torch.all((capacities >= 0) & capacities.isfinite()):
        lowest, highest = (bound.item() for bound in capacities.aminmax())
        raise ArgumentError(
            "Weights must be finite and not negative, because they are capacities. "
            f"The lowest is {lowest:.3g}, the highest is {highest:.3g}."
        )
    tokens = capacities.shape[-1]
    rows = range(tokens) if rows is None else rows
    if not all(-tokens <= row < tokens for row in rows):
        raise ArgumentError(
            f"rows is {list(rows)}, but there are {tokens} tokens: pass positions from {-tokens} to {tokens - 1}."
        )
    rows = [row % tokens for row in rows]
    flows = [_flow_of_example(example.tolist(), rows) for example in capacities.cpu()]
    flow = capacities.new_tensor(flows).reshape(len(flows), len(rows), tokens)
    return normalize_rows(flow) if normalize else flow


def _flow_of_example(capacities: list[list[list[float]]], rows: list[int]) -> list[list[float]]:
    """Flows `(rows, tokens)` of one example with capacities `(layers, tokens, tokens)`."""
    import networkx as nx  # a dependency of torch; imported here because its import is slow
    from networkx.algorithms.flow import build_residual_network, shortest_augmenting_path

    tokens = range(len(capacities[0]))
    network = nx.DiGraph()
    network.add_nodes_from((layer, token) for layer in range(len(capacities) + 1) for token in tokens)
    for layer, scores in enumerate(capacities):
        for out, row in enumerate(scores):
            for source, weight in enumerate(row):
                if units := round(weight * _UNITS):
                    network.add_edge((layer + 1, out), (layer, source), capacity=units)
    residual = build_residual_network(network, "capacity")  # reused: each flow clears it first
    flows = [[0.0 for _ in tokens] for _ in rows]
    for out, flow in zip(rows, flows, strict=True):
        top = (len(capacities), out)
        for layer, token in sorted(nx.descendants(network, top)):
            if layer == 0:
                found = shortest_augmenting_path(network, top, (layer, token), residual=residual)
                flow[token] = found.graph["flow_value"] / _UNITS
    return flows
