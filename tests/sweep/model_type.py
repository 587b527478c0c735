"""One model type of the sweep: build a model, find its stacks, compare their layers with the twin."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from captum_vz import find_layers
from tests.sweep.compare import compare, describe
from tests.sweep.exceptions import RELEASED
from tests.sweep.inputs import LONG, SHORT, first_example
from tests.sweep.models import small_models, working_inputs
from tests.sweep.replays import folded_wherever_possible
from tests.sweep.rows import BUGS, OUTCOMES, Row
from tests.sweep.twin import record


def sweep_type(model_type: str, long: bool = False) -> list[Row]:
    """All rows of one model type, for sentences of seven tokens or for `long` ones, with folding wherever possible."""
    with folded_wherever_possible() if long else nullcontext():
        return [
            replace(row, stack=", ".join(filter(None, [row.stack, released])))
            for released in ("", *RELEASED.get(model_type, ()))
            for row in _sweep_type(model_type, long, released)
        ]


def _sweep_type(model_type: str, long: bool, released: str) -> list[Row]:
    rows: list[Row] = []
    models = small_models(model_type, released)
    while True:
        try:
            model = next(models, None)
        except Exception as error:  # a constructor may raise anything on sizes that do not fit
            return rows or [Row(model_type, "", "not built", note=describe(error))]
        if model is None:
            return rows
        found = sweep_model(model_type, model, long)
        rows = rows or found
        if any(row.outcome != "not run" for row in found):
            return found


def sweep_model(model_type: str, model: nn.Module, long: bool) -> list[Row]:
    """A row for every stack.

    The model itself runs the stack if its inputs reach it, else the submodule that holds the stack.
    """
    rows: list[Row] = []
    done: set[nn.Module] = set()
    missed: dict[Row, list[nn.Module]] = {}
    for name, part in model.named_modules():
        if not isinstance(part, PreTrainedModel):
            continue
        try:
            stacks = stacks_of(part)
        except AssertionError as error:
            if not name:
                missed[Row(model_type, "", "no layers", note=describe(error))] = []
            continue
        stacks = {stack: layers for stack, layers in stacks.items() if not done.intersection(layers)}
        inputs, problem = working_inputs(part, LONG if long else SHORT) if stacks else ({}, None)

        def forward(part: nn.Module = part, **inputs: object) -> object:
            torch.manual_seed(0)  # some models mask tokens at random
            return part(**inputs)

        for stack, layers in stacks.items():
            label = ", ".join(filter(None, [name, stack]))
            runs = record(lambda inputs=inputs: forward(**inputs), layers) if inputs else []
            if runs:
                done.update(layers)
                found = [row for run in runs for row in compare(model_type, label, forward, inputs, run, long)]
                rows += worst_of_each_kind(found)
                if not long:
                    sweep_alone(rows, label, forward, first_example(inputs), layers)
            else:
                note = describe(problem) if problem else "its inputs do not reach it"
                missed[Row(model_type, label, "not run", note=note)] = layers
    missed = {row: layers for row, layers in missed.items() if not done.intersection(layers)}
    if rows:
        return rows + [row for row, layers in missed.items() if layers]
    return sorted(missed, key=lambda row: row.outcome == "no layers")[:1]


def sweep_alone(
    rows: list[Row], label: str, forward: Callable[..., Any], inputs: dict[str, Any] | None, layers: list[nn.Module]
) -> None:
    """Note in each of these rows what comes out for a batch of one example: the worst outcome of its attention."""
    if inputs is None:
        return
    try:
        runs = record(lambda: forward(**inputs), layers)
    except Exception:  # some models run on several examples only
        return
    ranks = [*BUGS, *(outcome for outcome in OUTCOMES if outcome not in BUGS)]
    alone = [row for run in runs for row in compare("", label, forward, inputs, run)]
    for row in rows:
        found = [one for one in alone if one.stack == row.stack]
        if found:
            worst = min(found, key=lambda one: ranks.index(one.outcome))
            row.alone = worst.outcome
            row.note = row.note or worst.note


def stacks_of(model: nn.Module) -> dict[str, list[nn.Module]]:
    """The layers of each stack of a model, by the stack's name."""
    try:
        return {"": find_layers(model)}
    except AssertionError:
        sides = {}
        for side in ("encoder", "decoder"):
            try:
                sides[side] = find_layers(model, stack=side)
            except AssertionError:
                continue
        if not sides:
            raise
        return sides


def worst_of_each_kind(rows: list[Row]) -> list[Row]:
    """Of the layers of a stack, the row with the largest difference for each outcome and replay."""
    worst: dict[tuple[str, str, str], Row] = {}
    for row in rows:
        key = row.stack, row.outcome, row.way
        if key not in worst or (row.difference or 0) > (worst[key].difference or 0):
            worst[key] = row
    return list(worst.values())
