"""Attention flow: the largest flow from one token to another through all layers."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from captum_vz.errors import ArgumentError
from captum_vz.functional.rollout import Residual, add_residual
from captum_vz.functional.rows import normalize_rows

# Capacities are integers in units of 2**-53, the step of float64 below 1. Python's integers have no limit, so the flow
# is exact and the search ends. With floats, rounding errors remain as capacity: networkx's Dinitz then fails on one
# pair of tokens in ten.
_UNITS = 2**53


def attention_flow(
    maps: Iterable[Tensor],
    rows: Sequence[int] | None = None,
    residual: Residual = 0.5,
    normalize: bool = True,
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
