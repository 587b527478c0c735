"""Run the folded replay and the packed replay on the same model."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from captum_vz import ValueZeroing
from captum_vz._engine import traced_replays
from captum_vz.errors import UnsupportedLayerError
from tests.reference import FAMILIES, Case
from tests.reference.inputs import noise, padded_tokens

LENGTHS = (24, 17, 9)
FOLDED = "folded pairs"
_ARGUMENTS_OF_CALL = ("token", "feature_mask", "perturbations_per_eval")


class Replays:
    """Maps by the folded replay and by the packed replay.

    Attributes:
        count: How many maps the folded replay gave.
        reasons: Why it gave no others.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.reasons: set[str] = set()
        self.monkeypatch = monkeypatch

    def folded(self, model: nn.Module, layers: Any, inputs: Any, **options: Any) -> list[Tensor]:
        """Maps by all replays, as users get them."""
        with traced_replays() as traces:
            maps = raw_maps(model, layers, inputs, **options)
        self.count += sum(trace.replay is not None and trace.replay.name == FOLDED for trace in traces)
        self.reasons |= {trace.failed[FOLDED] for trace in traces if FOLDED in trace.failed}
        return maps

    def packed(self, model: nn.Module, layers: Any, inputs: Any, **options: Any) -> list[Tensor]:
        """Maps without the folded replay: by packed pairs, or by the definition."""
        with suppress(UnsupportedLayerError), traced_replays("packed pairs"):
            return raw_maps(model, layers, inputs, **options)
        with traced_replays("definition"):
            return raw_maps(model, layers, inputs, **options)

    def check_agree(self, model: nn.Module, layers: Any, inputs: Any, **options: Any) -> None:
        """Check that every layer folds and that its map is the same without folding."""
        self.count = 0
        folded = self.folded(model, layers, inputs, **options)
        assert self.count == len(layers), self.reasons
        for one, other in zip(folded, self.packed(model, layers, inputs, **options), strict=True):
            assert other.any()
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-14)


def raw_maps(model: nn.Module, layers: Any, inputs: Any, **options: Any) -> list[Tensor]:
    """Maps of distances that are not normalized."""
    of_call = {key: options.pop(key) for key in list(options) if key in _ARGUMENTS_OF_CALL}
    return ValueZeroing(model, layers, normalize=False, **options).attribute(inputs, **of_call)


def set_chunk_rows(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Run `rows` positions in one chunk."""
    monkeypatch.setattr("captum_vz._engine.capture.LayerRecord.rows_in_chunk", lambda layer, output: rows)


def long_case(name: str) -> Case:
    """A family's tiny model on sentences that are long enough to fold, with windows in proportion."""
    family = FAMILIES[name]
    config = dict(family.config)
    if "sliding_window" in config:
        config["sliding_window"] = 16  # the last padding of each sentence sees a token
    if "local_attention" in config:
        config["local_attention"] = 28
    if "image_size" in config:
        config["image_size"] = 16
    return replace(family, config=config, inputs=lambda: lengthened(family.inputs())).build()


def lengthened(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Longer inputs of the same kind."""
    if "pixel_values" in inputs:
        return {"pixel_values": noise(2, 3, 16, 16)}
    if "input_values" in inputs:
        return {"input_values": noise(2, 100)}
    decoder = padded_tokens((26, 20, 9), prefix="decoder_") if "decoder_input_ids" in inputs else {}
    return padded_tokens(LENGTHS) | decoder
