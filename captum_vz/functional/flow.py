"""Attention flow: layers as a network of pipes, and how much one token can send to another."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from captum_vz.functional.rollout import Residual, add_residual
from captum_vz.functional.rows import normalize_rows

# Capacities are counted in units of 2**-53, float64's own step below 1. Python's integers have no limit, so the flow is
# exact and the search for it ends. With floats, what a path leaves over may be a rounding error, and networkx promises
# nothing: its Dinitz fails on one pair of tokens in ten.
_UNITS = 2**53


def attention_flow(
    maps: Iterable[Tensor],
    rows: Sequence[int] | None = None,
    residual: Residual = 0.5,
    normalize: bool = True,
) -> Tensor:
    r"""How much each input token can send to each token after the last layer, when weights are the widths of pipes.

    .. math:: F_{ij} = \operatorname{maxflow}\big((L, i) \to (0, j)\big), \qquad
        \operatorname{capacity}\big((l{+}1, i) \to (l, j)\big) = \tfrac12 A_{l,ij} + \tfrac12 [i = j]

    for each pair by itself, then rows are normalised (`Abnar & Zuidema 2020
    <https://aclanthology.org/2020.acl-main.385>`_). Before that, flow is never less than rollout, which is one flow of
    many, and never more than 1. The flow after an earlier layer is that of the maps up to it.

    The flows come from networkx, by shortest augmenting paths: the fastest of its solvers on these networks, about
    20 ms for a pair at 12 layers and 32 tokens. Ask for the rows you need.

    Args:
        maps: One map `(batch, tokens, tokens)` for each layer, in the order in which the layers run; or all of them in
            one tensor `(layers, batch, tokens, tokens)`. Rows should sum to 1.
        rows: The output tokens to compute, negative ones counted from the end; None: all.
        residual: None, 0.5 or "renormalize", see :func:`add_residual`.
        normalize: False leaves the flows as they are.

    Returns:
        `(batch, rows, tokens)` in float64. Rows sum to 1 if normalised.

    Raises:
        AssertionError: No map, maps of different shapes, a weight that is negative or not finite, a row out of range,
            or another residual.

    >>> halfway = torch.tensor([[[0.5, 0.5], [0.0, 1.0]]])
    >>> attention_flow([halfway, halfway], rows=[0], normalize=False)
    tensor([[[0.7500, 0.5000]]], dtype=torch.float64)
    """
    layers = [add_residual(scores.double(), residual) for scores in maps]
    assert layers, "attention_flow needs the map of at least one layer, got none."
    shapes = {tuple(layer.shape) for layer in layers}
    assert len(shapes) == 1, f"All maps need one shape, got {sorted(shapes)}."
    capacities = torch.stack(layers, dim=1)
    assert torch.all((capacities >= 0) & capacities.isfinite()), "Weights must be finite and not negative."
    tokens = capacities.shape[-1]
    rows = range(tokens) if rows is None else rows
    assert all(-tokens <= row < tokens for row in rows), f"rows is {list(rows)}, but there are {tokens} tokens."
    rows = [row % tokens for row in rows]
    flows = [_flow_of_example(example.tolist(), rows) for example in capacities.cpu()]
    flow = capacities.new_tensor(flows).reshape(len(flows), len(rows), tokens)
    return normalize_rows(flow) if normalize else flow


def _flow_of_example(capacities: list[list[list[float]]], rows: list[int]) -> list[list[float]]:
    """Flows (rows, tokens) through capacities (layers, tokens, tokens) of one example."""
    import networkx as nx  # comes with torch; here, so that importing captum_vz does not wait for it
    from networkx.algorithms.flow import build_residual_network, shortest_augmenting_path

    tokens = range(len(capacities[0]))
    network = nx.DiGraph()
    network.add_nodes_from((layer, token) for layer in range(len(capacities) + 1) for token in tokens)
    for layer, scores in enumerate(capacities):
        for out, row in enumerate(scores):
            for source, weight in enumerate(row):
                if units := round(weight * _UNITS):
                    network.add_edge((layer + 1, out), (layer, source), capacity=units)
    residual = build_residual_network(network, "capacity")  # built once: each flow starts by clearing it

    def flow(row: int) -> list[float]:
        top = (len(capacities), row)
        reached = nx.descendants(network, top)
        return [
            shortest_augmenting_path(network, top, (0, token), residual=residual).graph["flow_value"] / _UNITS
            if (0, token) in reached
            else 0.0
            for token in tokens
        ]

    return [flow(row) for row in rows]
