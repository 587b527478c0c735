"""The shell that methods share which join the maps of many layers into one."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import nullcontext
from typing import Any, Literal

import torch
from captum._utils.common import _format_output
from captum._utils.typing import TargetType
from torch import Tensor, nn

from captum_vz.attr._arguments import Arguments, Inputs, as_layers
from captum_vz.attr._captum import WhileRunning, logged, warn
from captum_vz.attr._layer_maps import PADDED_TARGET, LayerMaps
from captum_vz.attr._noting import noting_other_mixing
from captum_vz.attr._target import WantedTokens
from captum_vz.attr._without_model import WithoutModel
from captum_vz.functional import Residual, normalize_rows, pool_groups, receptive_fields


class RolledOut(WhileRunning):
    """Base of the methods that join the maps of a stack of layers into one map `(batch, out, in)`.

    An input method in Captum's sense: a tensor in, a tensor out; a tuple in, a tuple out. A subclass gives the layers'
    maps and says in `_join` how they are joined.

    Args:
        maps: The method that computes the layers' maps.
        residual: What is added to each map for the residual connection, see
            :func:`~captum_vz.functional.add_residual`.
        per_receptive_field: Whether each input token's scores are divided by the number of output tokens that it
            reaches (:func:`~captum_vz.functional.receptive_fields`), and rows by their sums after that. In a causal
            model the first token reaches all others and the last but itself, so that scores favour early tokens: Abnar
            & Zuidema advise this for them. Where every token reaches every other it changes nothing.
    """

    def __init__(
        self, maps: LayerMaps | WithoutModel, *, residual: Residual = None, per_receptive_field: bool = False
    ) -> None:
        super().__init__(maps.forward_func, maps.layer, maps.device_ids)
        self.maps = maps
        self.residual = residual
        self.per_receptive_field = per_receptive_field

    @logged
    def attribute(
        self,
        inputs: Inputs,
        target: TargetType = None,
        additional_forward_args: Any = None,
        feature_mask: Tensor | None = None,
        attribute_to_layer_input: bool = False,
        perturbations_per_eval: int | None = None,
        show_progress: bool = False,
        all_layers: bool = False,
        between: Literal["identity"] | None = None,
        *,
        token: Any = None,
    ) -> Any:
        """How much each output *token* of the last layer draws on each input token.

        Args:
            inputs: See :meth:`LayerMaps.attribute`, like all arguments but `feature_mask`, `all_layers` and
                `between`.
            target: An index into what `forward_func` returned, whose first index is an output token.
            additional_forward_args: Further arguments for `forward_func`.
            feature_mask: Integers `(1 or batch, in)`: tokens with the same number are one feature. Each layer's map is
                pooled to features (a feature's row is the mean of its tokens' rows) before the maps are joined, and
                all tokens of a feature carry its row and its score.
            attribute_to_layer_input: Only False.
            perturbations_per_eval: At most that many sources are zeroed at a time.
            show_progress: Whether to show a progress bar, one step a layer.
            all_layers: Whether to return the list of what comes out after each layer, the last one last.
            between: What stands for what mixes tokens besides the attention of these layers: that which runs between
                them where a layer is not given what the one before it returned (recurrent layers of a hybrid model,
                layers left out of `layer`), and what runs beside the attention in a layer (Falcon-H1's, a Conformer's
                convolution), but unseen inside of a module that computes its attention inline. None: nothing does, this
                is an error. "identity": each token is taken to draw on itself alone there.
            token: The output tokens whose rows are returned.

        Returns:
            A map `(batch, out, in)`, or, with one token for each example, `(batch, in)`; a tuple with one of them if
            `inputs` is a tuple; a list of either with `all_layers`. Rows sum to 1, over features where there is a
            `feature_mask`; rows and columns of padding are 0.

        Raises:
            AssertionError: As in :meth:`LayerMaps.attribute`; layers given in another order than that in which they
                run, or whose maps do not fit each other, or, without `between`, that do not follow each other or mix
                their tokens by more than attention.
        """
        assert between in (None, "identity"), f"between is {between!r}: pass None or 'identity'."
        assert not attribute_to_layer_input, (
            f"{self.get_name()} attributes to input tokens; attribute_to_layer_input=True has no meaning here."
        )
        assert getattr(self.maps, "attention", "self") == "self", (
            f"{self.get_name()} multiplies maps of one sequence onto itself; those of cross-attention lead from one "
            "sequence to another, and no product of them means anything. ValueZeroing and LayerAttention give them "
            "layer by layer, ALTIPlus joins them with those of the encoder and the decoder."
        )
        layers = as_layers(self.layer)
        wanted = WantedTokens.parse(token, target)
        arguments = Arguments(inputs, additional_forward_args, feature_mask, perturbations_per_eval, show_progress)
        # Told "identity", there is nothing to look for: it would run every layer once more.
        with noting_other_mixing() if between is None else nullcontext() as gaps:
            run = self.maps._maps(layers, wanted.all_rows, arguments)
        runs = run.maps
        order = list(dict.fromkeys(index for index, _ in runs))
        assert order == sorted(order), (
            f"The layers ran in the order {order} of the list given as `layer`: pass them in the order in which they "
            "run."
        )
        maps = [one.to(runs[0][1].device) for _, one in runs]
        self._check(maps)
        if gaps is not None:
            shape = {index: one.shape for index, one in runs}
            # Maps of different shapes are not multiplied with each other: those of an encoder and of its decoder.
            pairs = [pair for pair in gaps.pairs if shape[pair[0]] == shape[pair[1]]]
            refuse_other_mixers(self.get_name(), layers, pairs, gaps.mixers)
        rows = wanted.positions(maps[-1].shape[0], maps[-1].shape[1], maps[-1].device)
        if run.tokens:
            wanted.check(run.output, maps[-1].shape[1], self.get_name())
        else:
            wanted.check_without_output(self.get_name())
        joined = self._by_feature(maps, rows, feature_mask, all_layers)
        results = [_format_output(isinstance(inputs, tuple), (wanted.select(one),)) for one in joined]
        return results if all_layers else results[-1]

    @abstractmethod
    def _join(self, maps: list[Tensor], rows: Tensor | None, all_layers: bool) -> list[Tensor]:
        """Join maps `(batch, tokens, tokens)`, first layer first: the result after each layer, or only the last.

        `rows` `(batch, row)` are the rows wanted, results being `(batch, row, tokens)`; None: all.
        """

    def _check(self, maps: list[Tensor]) -> None:
        """Refuse maps that cannot be joined."""
        shapes = {tuple(one.shape) for one in maps}
        assert len(shapes) == 1 and maps[0].shape[1] == maps[0].shape[2], (
            f"{self.get_name()} multiplies square maps of one size, but the layers' maps are {sorted(shapes)}. Where a "
            "model merges its tokens on the way, pass the layers of one stage."
        )

    def _by_feature(self, maps: list[Tensor], rows: Tensor | None, feature_mask: Any, all_layers: bool) -> list[Tensor]:
        """Join the maps of features in place of those of tokens, and give each token its feature's row and score."""
        # What draws on nothing in the first layer is padding: it belongs to no feature, and no residual revives it.
        there = maps[0].sum(-1) != 0
        if feature_mask is None:
            member = torch.arange(there.shape[1], device=there.device).expand_as(there)
        else:
            mask = feature_mask[0] if isinstance(feature_mask, tuple) else feature_mask
            features = mask.to(there.device).unique(return_inverse=True)[1].expand_as(there)
            member = features.where(there, features.max() + 1).unique(return_inverse=True)[1]
            maps = [pool_groups(one, member) for one in maps]
        joined = self._join(maps, None if rows is None else member.gather(1, rows), all_layers)
        if self.per_receptive_field:
            fields = [field.clamp_min(1)[:, None] for field in receptive_fields(maps, self.residual)[-len(joined) :]]
            joined = [normalize_rows(one / field) for one, field in zip(joined, fields, strict=True)]
        kept = there if rows is None else there.gather(1, rows)
        if rows is not None and not kept.all():
            warn(f"{self.get_name()}: {PADDED_TARGET}.")
        results = []
        for one in joined:
            if rows is None:
                one = one.gather(1, member[..., None].expand(-1, -1, one.shape[2]))
            one = one.gather(2, member[:, None, :].expand(-1, one.shape[1], -1))
            results.append((one * (kept[:, :, None] & there[:, None, :])).to(maps[0].dtype))
        return results


def refuse_other_mixers(name: str, layers: list[nn.Module], pairs: list[tuple[int, int]], mixers: list[int]) -> None:
    """Refuse to join layers between which, or in which, tokens are mixed by anything but attention."""
    kinds = [f"{index} ({type(layer).__name__})" for index, layer in enumerate(layers)]
    told = "between='identity', if each token is to count as drawing on itself alone there"
    gaps = [f"{kinds[before]} and {kinds[after]}" for before, after in pairs]
    assert not gaps, (
        f"{name} joins layers that follow each other, but something else runs between the layers {_some(gaps)}: the "
        "second is not given what the first returned. Another mixer (recurrent, a convolution) or a layer that was "
        f"left out has a share that no map shows. Pass all layers; or {told}."
    )
    assert not mixers, (
        f"{name} joins what the layers' attention does, but the layers {_some([kinds[i] for i in mixers])} mix their "
        f"tokens in another way as well (recurrent, a convolution), whose share no map shows. Pass {told}."
    )


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (" and others" if len(names) > 3 else "")
