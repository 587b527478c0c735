"""Run the fast lane and the general way on the same model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from captum_vz import ValueZeroing
from captum_vz._engine import value_zeroing
from captum_vz._engine.numerics.tolerance import CannotReplayError
from tests.reference import FAMILIES, Case
from tests.reference.inputs import noise, padded_tokens

LENGTHS = (24, 17, 9)


class Lanes:
    """`fast` and `general` give maps; `used` counts the layers that went the fast way, `reasons` says why not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.used = 0
        self.reasons: set[str] = set()
        self.monkeypatch = monkeypatch

    def fast(self, model: nn.Module, layers: Any, inputs: Any, **options: Any) -> list[Tensor]:
        def counted(*args: Any) -> Tensor:
            try:
                scores = value_zeroing._folded_pairs(*args)
            except CannotReplayError as error:
                self.reasons.add(str(error))
                raise
            self.used += 1
            return scores

        self.monkeypatch.setattr(value_zeroing, "REPLAYS", (counted, *value_zeroing.REPLAYS[1:]))
        return self._maps(model, layers, inputs, **options)

    def general(self, model: nn.Module, layers: Any, inputs: Any, **options: Any) -> list[Tensor]:
        self.monkeypatch.setattr(value_zeroing, "REPLAYS", WAYS[1:])
        return self._maps(model, layers, inputs, **options)

    def _maps(self, model: nn.Module, layers: Any, inputs: Any, **options: Any) -> list[Tensor]:
        of_call = {key: options.pop(key) for key in list(options) if key in OF_CALL}
        return ValueZeroing(model, layers, normalize=False, **options).attribute(inputs, **of_call)

    def agree(self, model: nn.Module, layers: Any, inputs: Any, **options: Any) -> None:
        """Every layer goes the fast way and gives the numbers of the general one."""
        self.used = 0
        fast = self.fast(model, layers, inputs, **options)
        assert self.used == len(layers), self.reasons
        for one, other in zip(fast, self.general(model, layers, inputs, **options), strict=True):
            assert other.any()
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-14)


WAYS = value_zeroing.REPLAYS


def set_chunk_rows(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Run so many rows at a time."""
    for room in ("packed", "folded.replay"):
        monkeypatch.setattr(f"captum_vz._engine.replay.{room}.chunk_rows", lambda record, output: rows)


OF_CALL = ("target", "feature_mask", "perturbations_per_eval")


def long_case(name: str) -> Case:
    """A family's tiny model on sentences long enough to fold for, and windows as long."""
    family = FAMILIES[name]
    config = dict(family.config)
    if "sliding_window" in config:
        config["sliding_window"] = 14
    if "local_attention" in config:
        config["local_attention"] = 28
    if "image_size" in config:
        config["image_size"] = 16
    return replace(family, config=config, inputs=lambda: lengthened(family.inputs())).build()


def lengthened(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Inputs of the same kind, longer."""
    if "pixel_values" in inputs:
        return {"pixel_values": noise(2, 3, 16, 16)}
    if "input_values" in inputs:
        return {"input_values": noise(2, 100)}
    decoder = padded_tokens((26, 20, 9), prefix="decoder_") if "decoder_input_ids" in inputs else {}
    return padded_tokens(LENGTHS) | decoder
