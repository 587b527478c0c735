"""Attention maps, rollout and flow (Abnar & Zuidema 2020) in plain loops."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tests.reference.case import Case
from tests.reference.naive import real_positions, record, run_of, site_of


def naive_attention(case: Case, layer_index: int, **options: object) -> Tensor:
    """The attention map of a layer's last run, ``(batch, out, in)``. See `attention_of_run` for the options."""
    return attention_of_run(case, run_of(case, layer_index), **options)


def naive_attention_maps(case: Case, **options: object) -> list[Tensor]:
    """The attention maps of all runs of all layers, in order."""
    runs, _ = record(case)
    return [attention_of_run(case, number, **options) for number in range(len(runs))]


def attention_of_run(
    case: Case,
    number: int,
    *,
    heads: str | int | Sequence[int] = "mean",
    normalize: bool = True,
    attention: str = "self",
) -> Tensor:
    """The attention weights of the model, reduced over heads.

    Args:
        heads: "mean" or "max" over all heads, the number of one head, or the numbers of the heads to average.
        normalize: whether to divide each row by its sum. With "max" or attention sinks, this sum is not 1.
        attention: "self" or "cross".
    """
    runs, output = record(case, output_attentions=True)
    weights = output[site_of(case, attention).weights][number].double().numpy()
    targets, sources = real_positions(case, runs[number], attention)
    chosen = range(weights.shape[1]) if isinstance(heads, str) else [heads] if isinstance(heads, int) else heads
    result = np.zeros((len(weights), *weights.shape[2:]))
    for b, i in np.argwhere(targets):
        for j in np.flatnonzero(sources[b]):
            values = [float(weights[b, head, i, j]) for head in chosen]
            result[b, i, j] = max(values) if heads == "max" else sum(values) / len(values)
        total = sum(result[b, i])
        if normalize and total > 0:
            result[b, i] /= total
    return torch.from_numpy(result)


def with_residual(row: np.ndarray, i: int, residual: float | str | None) -> np.ndarray:
    """Row i of a map with the residual added, see `captum_vz.functional.add_residual`."""
    unit = np.array([float(j == i) for j in range(len(row))])
    if residual is None:
        return row
    if residual == "add":
        return row + unit
    if residual == "renormalize":
        return (row + unit) / sum(row + unit)
    return (1.0 - residual) * row + residual * unit


def naive_rollout(maps: Sequence[Tensor], residual: float | str | None = None) -> list[Tensor]:
    """The rollout after each layer: ``R_0 = S_0``, ``R_l = S_l R_(l-1)``; a row of zeros (padding) stays zero.

    Args:
        maps: ``(batch, token, token)`` of each run, in order.
        residual: None, the share of the identity (0.5), "renormalize" or "add".
    """
    batch, length, _ = maps[0].shape
    rollouts: list[np.ndarray] = []
    for layer_map in maps:
        factor = layer_map.double().numpy()
        rollout = np.zeros((batch, length, length))
        for b in range(batch):
            for i in range(length):
                if not factor[b, i].any():
                    continue
                row = with_residual(factor[b, i], i, residual)
                if not rollouts:
                    rollout[b, i] = row
                    continue
                for k in range(length):
                    for j in range(length):
                        rollout[b, i, j] += row[k] * rollouts[-1][b, k, j]
        rollouts.append(rollout)
    return [torch.from_numpy(rollout) for rollout in rollouts]


def naive_flow(maps: Sequence[Tensor], residual: float | str | None = 0.5, normalize: bool = True) -> list[Tensor]:
    """The maximum flow from each token after each layer to each input token, computed for each pair alone.

    Node ``(l, i)`` is token i after l layers. The edge from ``(l + 1, i)`` to ``(l, j)`` has the capacity ``S_l[i, j]``
    with the residual added.
    """
    batch, length, _ = maps[0].shape
    flows = [np.zeros((batch, length, length)) for _ in maps]
    for b in range(batch):
        capacity: dict[tuple[int, int], dict[tuple[int, int], float]] = {}
        for level, layer_map in enumerate(maps):
            rows = layer_map[b].double().numpy()
            for i in range(length):
                if rows[i].any():
                    mixed = with_residual(rows[i], i, residual)
                    capacity[level + 1, i] = {(level, j): float(mixed[j]) for j in range(length) if mixed[j] > 0}
        for level, flow in enumerate(flows):
            for i in range(length):
                if (level + 1, i) in capacity:
                    for j in range(length):
                        flow[b, i, j] = maximum_flow(capacity, (level + 1, i), (0, j))
                    if normalize:
                        flow[b, i] /= sum(flow[b, i])
    return [torch.from_numpy(flow) for flow in flows]


def maximum_flow(
    capacity: dict[tuple[int, int], dict[tuple[int, int], float]], source: tuple[int, int], sink: tuple[int, int]
) -> float:
    """The algorithm of Edmonds and Karp (1972): augment along shortest paths until there is none."""
    room = {(u, v): c for u, edges in capacity.items() for v, c in edges.items()}
    neighbours: dict[tuple[int, int], set[tuple[int, int]]] = {}
    for u, v in list(room):
        room.setdefault((v, u), 0.0)
        neighbours.setdefault(u, set()).add(v)
        neighbours.setdefault(v, set()).add(u)
    flow = 0.0
    while True:
        parent = {source: source}
        queue = deque([source])
        while queue and sink not in parent:
            u = queue.popleft()
            for v in neighbours.get(u, ()):
                if v not in parent and room[u, v] > 1e-15:
                    parent[v] = u
                    queue.append(v)
        if sink not in parent:
            return flow
        path = [sink]
        while path[-1] != source:
            path.append(parent[path[-1]])
        edges = [(parent[v], v) for v in path[:-1]]
        push = min(room[edge] for edge in edges)
        for u, v in edges:
            room[u, v] -= push
            room[v, u] += push
        flow += push
