"""Base class of the methods that join the maps of several layers into one map, and what they share."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import Any, Literal, TypeAlias

import torch
from captum.attr import Attribution, PerturbationAttribution
from torch import Tensor

from captum_vz._private import TargetType, forward_pre_hooks
from captum_vz.attr._base import MapRun, mark_unreached
from captum_vz.attr._call import ForwardPassAttribution, as_layers, check_one_of, logged, warn
from captum_vz.attr._call.arguments import Arguments, Inputs, by_input
from captum_vz.attr._call.further_calls import check_target
from captum_vz.attr._call.target import PADDED_TARGET, WantedTokens
from captum_vz.errors import ArgumentError, UnsupportedLayerError
from captum_vz.functional import Residual, normalize_rows, pool_groups, receptive_fields
from captum_vz.functional.groups import numbered

OtherMixingRule: TypeAlias = Literal["refuse", "ignore"]


def of_maps(name: str) -> Any:
    """A property that reads and writes the attribute `name` of `maps`."""
    return property(
        lambda method: getattr(method.maps, name),
        lambda method, value: setattr(method.maps, name, value),
        doc=f"`{name}` of `maps`.",
    )


def refuse_other_mixing(name: str, layer: Any, run: MapRun) -> None:
    """Refuse layers if something other than attention mixes tokens in them or between them, or may do so."""
    if run.mixing is None:
        return
    layers = as_layers(layer)
    names = [f"{index} ({type(one).__name__})" for index, one in enumerate(layers)]
    advice = "Pass other_mixing='ignore' to treat this as acting on each token alone"
    # Maps of different shapes, as in an encoder and its decoder, are not multiplied.
    shape = {index: one.shape for index, one in run.maps}
    pairs = [pair for pair in run.mixing.pairs if shape[pair[0]] == shape[pair[1]]]
    if pairs:
        between = _some([f"{names[before]} and {names[after]}" for before, after in pairs])
        hooks = [hook for _, after in pairs for hook in list(forward_pre_hooks(layers[after]).values())]
        found = _some([getattr(hook, "__qualname__", type(hook).__name__) for hook in hooks])
        cause = f"the forward_pre_hook {found}" if hooks else "an omitted layer, or a recurrent or convolutional module"
        raise UnsupportedLayerError(
            f"{name} joins layers that follow each other, but {cause}, runs between the layers {between}. {advice}, or "
            "pass all layers."
        )
    for indices, what in (
        (run.mixing.mixers, "mix their tokens in another way as well (a recurrent or convolutional module)"),
        (run.mixing.untested, "do not run on changed inputs, so they may mix their tokens in another way as well"),
    ):
        if indices:
            raise UnsupportedLayerError(
                f"{name}: the layers {_some([names[one] for one in indices])} {what}. {advice}."
            )


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (" and others" if len(names) > 3 else "")


class MapAggregation(ForwardPassAttribution):
    """Base of the methods that join the maps of a stack of layers into one map `(batch, out, in)`.

    As Captum's input methods do, `attribute` returns a tensor for a tensor and a tuple for a tuple. A subclass defines
    in :meth:`join` how maps are joined. `forward_func`, `layer` and `device_ids` are attributes of `maps`.

    Args:
        maps: The method that computes the layers' maps.
        residual: How each map accounts for the residual connection, see
            :func:`~captum_vz.functional.add_residual`.
        per_receptive_field: Whether to divide the scores of each input token by the number of output tokens that the
            token reaches (:func:`~captum_vz.functional.receptive_fields`). Rows are normalised after that. Abnar &
            Zuidema recommend this for causal models: the first token reaches all tokens, the last token only itself.
        other_mixing: How to treat token mixing outside the attention of the given layers (recurrent or convolutional
            modules, omitted layers). "refuse": raise an error. "ignore": treat these as acting on each token alone.
            Mixing inside a module that computes attention inline is not detected.

    >>> from captum_vz import LayerAttention, find_layers
    >>> from captum_vz.attr import MapAggregation
    >>> from captum_vz.testbed import load_model
    >>> class MeanMap(MapAggregation):
    ...     def join(self, maps, rows):
    ...         means = torch.stack(maps).cumsum(0) / torch.arange(1, len(maps) + 1)[:, None, None, None]
    ...         return [one if rows is None else one.gather(1, rows[..., None].expand_as(one[:, :1])) for one in means]
    >>> model, tokenizer = load_model()
    >>> inputs = tokenizer("some hat [MASK] scaring marcus.", return_tensors="pt")
    >>> row = MeanMap(LayerAttention(model, find_layers(model))).attribute(inputs, token=3)  # (batch, in)
    >>> row.shape == inputs["input_ids"].shape, round(row.sum().item(), 4)
    (True, 1.0)
    """

    def __init__(
        self,
        maps: Attribution,
        *,
        residual: Residual = None,
        per_receptive_field: bool = False,
        other_mixing: OtherMixingRule = "refuse",
    ) -> None:
        """See the class for the arguments."""
        check_one_of("other_mixing", other_mixing, "refuse", "ignore")
        self.maps: Any = maps  # LayerMaps, or a method without a model that gives maps in the same form
        PerturbationAttribution.__init__(self, maps.forward_func)
        self.residual: Residual = residual
        self.per_receptive_field = per_receptive_field
        self.other_mixing: OtherMixingRule = other_mixing

    forward_func = of_maps("forward_func")
    layer = of_maps("layer")
    device_ids = of_maps("device_ids")

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
        *,
        token: Any = None,
        all_layers: bool = False,
        run: int | None = None,
    ) -> Any:
        """How much each output *token* of the last layer depends on each input token.

        Args:
            inputs: See :meth:`LayerMaps.attribute`, which describes the arguments that have one short line here.
            target: An index into the output of `forward_func` `(batch, tokens, ...)`, in Captum's forms. The first
                index names an output token, whose row is returned. If the output has no axis of the last layer's
                tokens, pass `token`. If `maps` explain an output, `target` is the explained number.
            additional_forward_args: Further arguments for `forward_func`.
            feature_mask: Integers `(1 or batch, in)`. Tokens with the same number form one feature. Each map is pooled
                to features before the maps are joined. A feature's row is the mean of its tokens' rows. All tokens of a
                feature have its row and its score.
            attribute_to_layer_input: Must be False, because a map belongs to the attention of the layers.
            perturbations_per_eval: The number of sources that are zeroed at a time.
            show_progress: Whether to show a progress bar.
            token: The positions of the output tokens whose rows are returned. None: all tokens.
            all_layers: Whether to return a list with the result after each layer. Its last entry is the final result.
            run: The number of the explained input.

        Returns:
            A map `(batch, out, in)`, or `(batch, in)` with one output token for each example. A tuple if `inputs` is a
            tuple, with the columns of each input's tokens, see :meth:`ValueZeroingEffect.attribute`. A list of these
            with `all_layers`. Rows sum to 1, over all inputs, and over features if there is a `feature_mask`. Rows and
            columns of padding are 0.

        Raises:
            RefusedError: Wrong arguments. A layer that `forward_func` does not run, whose attention cannot be read, or
                that cannot be replayed. Dropout in train mode. Values that are not finite. Layers that are not listed
                in the order in which they run, or whose maps have different shapes. With `other_mixing="refuse"`,
                layers that do not follow each other, or that mix tokens outside their attention. The model is
                unchanged after an error.
        """
        self._check_layer_input(attribute_to_layer_input)
        wanted = self.maps._wanted(token, target)
        arguments = Arguments(inputs, additional_forward_args, feature_mask, perturbations_per_eval, show_progress, run)
        self._check_options()
        found = self.maps._run(replace(wanted, rows=None), arguments, self.other_mixing == "refuse")
        maps = self._joined(found, wanted, feature_mask, all_layers)
        if found.tokens:
            last = found.tokens[found.maps[-1][0]]
            if wanted.target is not None:
                check_target(wanted, found.output, [last], self.forward_func, arguments, self.get_name())
        else:
            wanted.check_without_output(self.get_name())
        results = by_input(maps, inputs, run, self._stacks(found))
        return results if all_layers else results[-1]

    def join_run(
        self, run: MapRun, *, token: Any = None, all_layers: bool = False, feature_mask: Tensor | None = None
    ) -> list[Tensor]:
        """Join maps that :meth:`LayerMaps.run` has computed. Several methods can join the same maps.

        Args:
            run: All rows of all maps, computed with `find_other_mixing` unless `other_mixing` is "ignore".
            token: The output tokens whose rows are returned.
            all_layers: Whether to return the result after each layer, or only the final result.
            feature_mask: The feature of each token, with which the maps were computed.

        Returns:
            The results, `(batch, out, in)` or `(batch, in)` each.
        """
        self._check_options()
        return self._joined(run, WantedTokens.parse(token, None), feature_mask, all_layers)

    def _stacks(self, run: MapRun) -> list[int]:
        """The numbers of sources of several stacks, if the columns of the result are those of several."""
        return []

    @abstractmethod
    def join(self, maps: list[Tensor], rows: Tensor | None) -> list[Tensor]:
        """Join maps `(batch, tokens, tokens)`.

        Args:
            maps: The maps of the layers, in the order in which the layers run.
            rows: The positions of the wanted rows, `(batch, row)`. None: all rows.

        Returns:
            The result after each layer, `(batch, row, tokens)` each.
        """

    def join_last(self, maps: list[Tensor], rows: Tensor | None) -> Tensor:
        """The last result of `join`."""
        return self.join(maps, rows)[-1]

    def _check_options(self) -> None:
        """Refuse maps of cross-attention and of heads, and options that were reassigned to unknown values."""
        check_one_of("other_mixing", self.other_mixing, "refuse", "ignore")
        if getattr(self.maps, "reduce_heads", "") is None:
            raise ArgumentError(
                f"{self.get_name()} joins one map for each layer, but reduce_heads is None. Choose a reduction."
            )
        if getattr(self.maps, "attention", "self") != "self":
            raise ArgumentError(
                f"{self.get_name()} multiplies maps of self-attention, and those of other attentions lead from one "
                "sequence to another. Pass attention='self', or use ALTIPlus for an encoder and its decoder."
            )

    def _joined(self, run: MapRun, wanted: WantedTokens, feature_mask: Any, all_layers: bool) -> list[Tensor]:
        """The wanted rows of the joined maps, after each layer or only after the last."""
        order = list(dict.fromkeys(index for index, _ in run.maps))
        if order != sorted(order):
            raise ArgumentError(f"layer lists the layers in another order than {order}, in which they run. Sort them.")
        maps = [one.to(run.maps[0][1].device) for _, one in run.maps]
        self._check(maps)
        if self.residual == "add" and run.tokens:
            there = run.tokens[run.maps[0][0]].real.to(maps[0].device)
            maps = [mark_unreached(one, there) for one in maps]
        if self.other_mixing == "refuse":
            refuse_other_mixing(self.get_name(), self.layer, run)
        rows = wanted.positions(maps[-1].shape[0], maps[-1].shape[1], maps[-1].device)
        return [wanted.select(one) for one in self._join_features(maps, rows, feature_mask, all_layers)]

    def _check(self, maps: list[Tensor]) -> None:
        """Refuse maps that cannot be joined."""
        shapes = {tuple(one.shape) for one in maps}
        if len(shapes) != 1 or maps[0].shape[1] != maps[0].shape[2]:
            advice = "If the model merges tokens between stages, pass the layers of one stage."
            if any(one.shape[1] < one.shape[2] for one in maps):
                advice = "They have more sources than tokens (a cache, a prefix): pass the whole sequence without it."
            raise ArgumentError(
                f"{self.get_name()} multiplies square maps of one size, but the layers' maps are {sorted(shapes)}. "
                + advice
            )

    def _join_features(
        self, maps: list[Tensor], rows: Tensor | None, feature_mask: Any, all_layers: bool
    ) -> list[Tensor]:
        """Join the maps of features instead of tokens. Each token has the row and the score of its feature."""
        # A row of zeros in the first layer is padding. Padding belongs to no feature and has no residual.
        there = maps[0].sum(-1) != 0
        if feature_mask is None:
            member = torch.arange(there.shape[1], device=there.device).expand_as(there)
        else:
            mask = numbered(feature_mask)
            features = mask.to(there.device).unique(return_inverse=True)[1].expand_as(there)
            member = features.where(there, features.max() + 1).unique(return_inverse=True)[1]
            maps = [pool_groups(one, member) for one in maps]
        places = None if rows is None else member.gather(1, rows)
        joined = self.join(maps, places) if all_layers else [self.join_last(maps, places)]
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
