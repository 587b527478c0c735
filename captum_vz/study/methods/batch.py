"""A batch of inputs with the token to explain in each, and the layers' maps that several methods share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from captum_vz.attr import LayerMaps, MapAggregation, MapRun

#: A class of layer maps, or a function with its options, called with the model and the layers.
MapsClass = Callable[..., LayerMaps]

#: A class that joins the maps of many layers, or a function, called with the model and the layers.
JoinedClass = Callable[..., MapAggregation]


class Batch:
    """A model and some of its inputs, with the token that is explained in each.

    Args:
        model: A model of transformers in eval mode, or any that is called with the inputs by keyword.
        tokenizer: Its tokenizer.
        layers: The layers that are explained, in the order in which they run.
        inputs: What the model takes, by keyword; `input_ids` among them.
        token: The position of one token in each example, not negative.
        targets: The class (a token id) that is explained by methods that explain the model's output, one for each
            example. None: the class that the model predicts.
        foils: The class whose logit is subtracted from the target's logit, one for each example. None: no class.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        layers: Sequence[nn.Module],
        inputs: Mapping[str, Tensor],
        token: Sequence[int],
        targets: Sequence[int] | None = None,
        foils: Sequence[int] | None = None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.layers = list(layers)
        self.inputs = dict(inputs)
        self.token = list(token)
        self.targets = targets
        self.foils = foils
        self._runs: dict[MapsClass, MapRun] = {}

    def layer_rows(self, maps: MapsClass) -> list[Tensor]:
        """The row of each example's token in each layer's map, `(batch, tokens)`, in the order of the layers' runs.

        Whole maps are used where another method has computed them. Otherwise only the wanted rows are computed.
        """
        if maps in self._runs:
            examples = torch.arange(len(self.token))
            return [one[examples, self.token] for one in self.whole_maps(maps)]
        run = maps(self.model, self.layers).run(self.inputs, token=self.token)
        return [one[:, 0] for _, one in run.maps]

    def whole_maps(self, maps: MapsClass) -> list[Tensor]:
        """All maps `(batch, out, in)`, one for each run of a layer: ALBERT's only layer runs many times."""
        return [one for _, one in self._run(maps).maps]

    def joined_rows(self, kind: JoinedClass, maps: MapsClass, all_layers: bool) -> list[Tensor]:
        """The row of each example's token in the joined maps, up to each layer or through all layers."""
        return kind(self.model, self.layers).join_run(self._run(maps), token=self.token, all_layers=all_layers)

    def joined_maps(self, kind: JoinedClass, maps: MapsClass, all_layers: bool) -> list[Tensor]:
        """The joined maps `(batch, out, in)`, up to each layer or through all layers."""
        return kind(self.model, self.layers).join_run(self._run(maps), all_layers=all_layers)

    def _run(self, maps: MapsClass) -> MapRun:
        if maps not in self._runs:
            self._runs[maps] = maps(self.model, self.layers).run(self.inputs, find_other_mixing=True)
        return self._runs[maps]


def encoder_of(model: Any) -> Any:
    """The encoder of a model that has an encoder and a decoder; any other model as it is."""
    both = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    return model.get_encoder() if both else model
