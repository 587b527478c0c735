"""Base class of the layer methods: one forward pass, one map `(batch, out, in)` for each layer."""

from __future__ import annotations

import functools
import itertools
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from captum.attr import LayerAttribution
from torch import Tensor, nn

from captum_vz._engine import (
    AttentionSite,
    EmbeddingLeaf,
    LayerPass,
    LayerRecord,
    LayerResults,
    OtherMixing,
    Readings,
    attention_site,
)
from captum_vz._private import NullProgress, TargetType, progress
from captum_vz.attr._base.runs import Runs
from captum_vz.attr._call import (
    Attention,
    ForwardPassAttribution,
    attentions_of_layers,
    check_gradients,
    check_one_of,
    default_layers,
    logged,
    values_of_layers,
    warn,
)
from captum_vz.attr._call.arguments import Arguments, Inputs, bind_forward, check_numbers, end_of_inputs
from captum_vz.attr._call.further_calls import LayerTokens, check_target
from captum_vz.attr._call.output import Question
from captum_vz.attr._call.target import FeatureGroups, Wanted, WantedTokens
from captum_vz.errors import ArgumentError


class LayerMaps(LayerAttribution, ForwardPassAttribution):
    """Base of the methods that compute one map `(batch, out, in)` for each layer.

    Entry (i, j) of a map says how much output token i of the layer depends on source token j. A subclass defines the
    scores of one layer in :meth:`layer_scores`.

    Args:
        forward_func: A model, or a function that runs the layers.
        layer: A layer (a whole Transformer block), or a list or ModuleList of layers. None: all layers of the model, as
            `captum_vz.find_layers` returns them.
        device_ids: Not used.
        attention: "self", or "cross" for the cross-attention of a decoder block. If a layer has others (SAM 3's decoder
            has three attentions), the attention module of the layer; for several layers, a list of such modules.
        normalize: Whether to divide each row by its sum.

    >>> from captum_vz import find_layers
    >>> from captum_vz.attr import LayerMaps
    >>> from captum_vz.testbed import load_model
    >>> class LargestWeight(LayerMaps):
    ...     def layer_scores(self, site, wanted):
    ...         return wanted.pool(site.weights().amax(1))  # weights (batch, head, out, in)
    >>> model, tokenizer = load_model()
    >>> inputs = tokenizer("some hat [MASK] scaring marcus.", return_tensors="pt")
    >>> LargestWeight(model, find_layers(model)[-1]).attribute(inputs).sum(-1).round(decimals=4)  # (batch, out)
    tensor([[1., 1., 1., 1., 1., 1., 1., 1.]])
    """

    #: Whether the method runs layers again. The outputs of a layer's modules are then kept until the layer is done.
    replays_layers: bool = False
    #: Whether the method needs the steps of layers. Copies of hidden states are then kept until the layer is done.
    needs_steps: bool = False
    #: Whether the method accepts layers that have several vectors for each token.
    accepts_streams: bool = False
    #: Whether the method explains a number of the output. `target` then names this number, and `token` alone the rows.
    explains_output: bool = False
    #: Whether the forward pass records gradients, starting at the input of the stack.
    needs_graph: bool = False
    #: The module whose output is the leaf of the graph. None: the input of the stack's first layer is the leaf.
    embeddings: nn.Module | None = None

    def __init__(
        self,
        forward_func: Callable[..., Any],
        layer: Any = None,
        device_ids: list[int] | None = None,
        *,
        attention: Attention = "self",
        normalize: bool = True,
    ) -> None:
        """See the class for the arguments."""
        super().__init__(forward_func, default_layers(forward_func) if layer is None else layer, device_ids)
        self.attention = attention
        self.normalize = normalize

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
        run: int | None = None,
    ) -> Tensor | list[Tensor]:
        r"""How much each output *token* of the layer depends on each source token.

        Args:
            inputs: The inputs of `forward_func` (token ids, embeddings, pixels, audio). A tensor or a tuple of tensors
                is passed by position, a mapping (a tokenizer's output) by keyword. Dimension 0 is the batch.
            target: An index into the output of `forward_func` `(batch, tokens, ...)`, in Captum's forms. The first
                index names a token, whose row is returned. So `target=(token, entry)` is the same call as for Captum's
                gradient methods. The tokens must be those of the layer. Unless the structure of the model shows this,
                `forward_func` runs once more, with noise in the token. If this shows other tokens, pass `token`.
            additional_forward_args: Further arguments for `forward_func`, after `inputs`: a tuple, or one object.
            feature_mask: Integers `(1 or batch, in)`. Tokens with the same number form one feature (a word, a span, an
                image region). For one text also a list, such as `encoding.word_ids()`, in which None is a feature of
                its own. See :func:`~captum_vz.word_mask` and :func:`~captum_vz.patch_mask`. All tokens of a feature
                have its score, and rows sum to 1 over features.
                `captum_vz.functional.pool_groups` reduces such a map to one column for each feature.
            attribute_to_layer_input: Must be False, because a map belongs to the attention of a layer.
            perturbations_per_eval: The number of sources that are zeroed at a time. None: as many as fit in memory. The
                scores are the same for any value. Methods that zero no values ignore this argument.
            show_progress: Whether to show a progress bar, with one step for each layer. A long layer has its own bar.
            token: The positions of the output tokens whose rows are returned. Negative positions count from the end of
                the sequence. None: all tokens. An int: this position in every example. A list or 1-D tensor: one
                position for each example. A tensor `(batch, k)`, a list of lists or a slice: several rows, `(batch, k,
                in)`. One row costs less than a map, unless the layer runs once for each source: where attention is
                computed inline, or positions are mixed after the attention.
            run: The number of the explained input, if `forward_func` runs the layers on several unrelated inputs (the
                texts of a bi-encoder): 0 for the first, -1 for the last. None: several such inputs are refused. A layer
                that runs again on its own output (ALBERT) has one input. Its last run is explained.

        Returns:
            A map `(batch, out, in)`, or `(batch, in)` with one output token for each example, in at least float32. A
            list of maps if `layer` is a list. Rows sum to 1, unless `normalize=False`. Rows and columns of padding are
            0. Padding is a token that none sees, and that a mask of tokens hides or that sees nothing. Tokens that a
            model appends to fill its windows (Longformer) are left out. Any other zero row stays zero, with a warning.

        Raises:
            RefusedError: Wrong arguments. A layer that does not run, cannot be replayed, or hides its attention.
                Dropout, or other random numbers. Values that are not finite. The model is unchanged after an error.
        """
        self._check_layer_input(attribute_to_layer_input)
        wanted = self._wanted(token, target)
        arguments = Arguments(inputs, additional_forward_args, feature_mask, perturbations_per_eval, show_progress, run)
        return self._selected(wanted, self._run(wanted, arguments), arguments)

    def _wanted(self, token: Any, target: Any, foil: Any = None) -> WantedTokens:
        """The rows and the explained number that `token` and `target` name."""
        if not self.explains_output:
            return WantedTokens.parse(token, target)
        return replace(WantedTokens.parse(token, None), question=Question.parse(target, foil))

    def _selected(self, wanted: WantedTokens, found: MapRun, arguments: Arguments) -> Tensor | list[Tensor]:
        """The wanted rows of each layer's last run."""
        if wanted.target is not None:
            check_target(wanted, found.output, [*found.tokens.values()], self.forward_func, arguments, self.get_name())
        maps = dict(found.maps)  # the last run of a layer that runs more than once
        results = [wanted.select(maps[index]) for index in range(len(maps))]
        return results if isinstance(self.layer, (list, tuple, nn.ModuleList)) else results[0]

    @abstractmethod
    def layer_scores(self, site: AttentionSite, wanted: Wanted) -> Tensor | Callable[[Any], Tensor]:
        """The scores of one layer.

        Args:
            site: The attention that is explained, and the record of the layer.
            wanted: The wanted rows and groups. `wanted.pool(scores)` selects the rows and sums the groups of scores
                `(batch, out, in)`.

        Returns:
            Scores `(batch, row, group)`, not normalised, 0 for padding, with an axis of heads after the batch if the
            method returns a map for each head. Or a function that computes the scores from
            the model's output. This function is called after `forward_func` has returned.
        """

    def run(
        self,
        inputs: Inputs,
        additional_forward_args: Any = None,
        feature_mask: Tensor | None = None,
        perturbations_per_eval: int | None = None,
        show_progress: bool = False,
        *,
        token: Any = None,
        target: Any = None,
        foil: Any = None,
        find_other_mixing: bool = False,
    ) -> MapRun:
        """The maps `(batch, row, in)` of all runs of the layers, in the order of the runs, for :class:`MapAggregation`.

        Args:
            inputs: See :meth:`attribute`, which describes all arguments except the last.
            additional_forward_args: Further arguments for `forward_func`.
            feature_mask: The feature of each source token.
            perturbations_per_eval: The number of sources that are zeroed at a time.
            show_progress: Whether to show a progress bar.
            token: The output tokens whose rows are returned.
            target: The explained number, in methods that explain an output.
            foil: The number that is subtracted from it.
            find_other_mixing: Whether to look for modules that mix tokens outside the layers' attention. This takes
                one extra run of each layer.
        """
        arguments = Arguments(inputs, additional_forward_args, feature_mask, perturbations_per_eval, show_progress)
        return self._run(self._wanted(token, target, foil), arguments, find_other_mixing)

    def _run(self, wanted: WantedTokens, arguments: Arguments, find_other_mixing: bool = False) -> MapRun:
        layers = self._layers()
        this = MapPass(self, wanted, arguments, layers, find_other_mixing)
        bar = progress(desc=this.title, total=len(layers)) if arguments.show_progress else NullProgress()
        with bar as this.bar, this.runs.checked(whole_blocks=self.replays_layers):
            run = LayerPass(
                layers,
                this.compute,
                replays=self.replays_layers,
                steps=self.needs_steps,
                given=values_of_layers(self.values, layers),
                chosen=this.runs.chosen,
            )
            output = run.run(bind_forward(this.forward_func, *arguments[:2]))
            this.runs.output = output if this.later else None
        return this.end(output, run.results)


@dataclass(frozen=True)
class MapRun:
    """The maps of one forward pass."""

    maps: list[tuple[int, Tensor]]  #: (index of the layer, its map), in the order in which the layers ran
    tokens: dict[int, LayerTokens]  #: the output tokens of each layer that ran; empty if the model was not run
    output: Any = None  #: the output of `forward_func`
    mixing: OtherMixing | None = None  #: where something else than the attention mixes tokens; None: not searched


class MapPass:
    """One forward pass of a method. Each map is computed when its layer returns."""

    bar: Any  # the progress bar, while the pass runs

    def __init__(
        self,
        method: LayerMaps,
        wanted: WantedTokens,
        arguments: Arguments,
        layers: list[nn.Module],
        find_other_mixing: bool,
    ) -> None:
        self.method, self.wanted, self.arguments = method, wanted, arguments
        self.layers = layers
        self.attentions = attentions_of_layers(method.attention, layers)
        check_one_of("normalize", method.normalize, True, False)
        check_numbers(arguments.perturbations_per_eval, arguments.run)
        self.forward_func = method.forward_func
        if method.needs_graph:
            if arguments.run:
                raise ArgumentError(f"run is {arguments.run}, but gradients start at the first input. Pass run=0.")
            check_gradients(method.get_name())
            self.forward_func = EmbeddingLeaf(self.forward_func, layers, method.embeddings)
        self.groups = FeatureGroups(arguments.feature_mask)
        self.positions = functools.cache(wanted.positions)  # one tensor for all layers
        self.mixing = OtherMixing(method.forward_func, layers) if find_other_mixing else None
        self.runs = Runs(bind_forward(method.forward_func, *arguments[:2]), layers, arguments.run)
        self.readings = Readings()
        self.warnings: list[list[str]] = []  # of each run of a layer
        self.tokens: dict[int, LayerTokens] = {}
        self.later: dict[int, tuple[Wanted, Callable[[Any], Tensor]]] = {}  # by the number of the run
        self.title = f"{method.get_name()} attribution"

    def compute(self, record: LayerRecord) -> Tensor:
        """The map of one run of a layer, or a placeholder."""
        method = self.method
        if self.mixing is not None:
            self.mixing.note(record)
        self.runs.note(record)
        record.inputs = self.arguments[:2]
        site = attention_site(record, self.attentions[record.index], method.accepts_streams)
        self.runs.note_padding(site)
        asked = self.begin(site)
        scores = method.layer_scores(site, asked)
        self.bar.update()
        if isinstance(scores, Tensor):
            self.warnings.append(record.warnings)
            return asked.finish(scores, method.normalize, self.readings)
        self.later[len(self.warnings) + len(self.later)] = asked, scores
        return torch.empty(0)  # to be replaced after the model has returned

    def begin(self, site: AttentionSite) -> Wanted:
        """What is wanted of a run of a layer."""
        record, out = site.layer, site.shape.out
        end = end_of_inputs(site, self.arguments.inputs, self.wanted.token)
        real = site.target_mask if end is None else site.target_mask[:, :end]
        self.tokens[record.index] = LayerTokens(
            self.layers[record.index], record.number, end or out, real, site.attention.tokens_first
        )
        rows = self.positions(site.shape.batch, end or out, site.attention.values.device)
        leaf = self.forward_func.vectors if isinstance(self.forward_func, EmbeddingLeaf) else None
        steps = partial(progress, None, f"{self.title}, layer {record.index}", leave=False)
        return Wanted(
            site,
            rows,
            self.groups.of(site, end),
            self.arguments.perturbations_per_eval,
            end,
            leaf,
            self.wanted.question,
            steps if self.arguments.show_progress else None,
        )

    def end(self, output: Any, maps: LayerResults) -> MapRun:
        """The maps, after the model has returned, and the warnings."""
        method, notes = self.method, [*self.runs.warnings]
        for place, (asked, scores) in self.later.items():
            with torch.set_grad_enabled(method.needs_graph):
                maps[place] = maps[place][0], asked.finish(scores(output), method.normalize, self.readings)
            self.warnings.append(asked.site.layer.warnings)
        self.readings.read()
        notes.extend(itertools.chain.from_iterable(self.warnings))
        if notes:
            warn(f"{method.get_name()}: {'; '.join(dict.fromkeys(notes))}.")
        return MapRun(maps, self.tokens, output, self.mixing)


def mark_unreached(scores: Tensor, there: Tensor) -> Tensor:
    """A map whose zero rows are padding only. Other zero rows get the smallest positive number on the diagonal.

    In the last layer, gradients reach few tokens. The other tokens depend on themselves, by the residual connection.
    """
    unreached = there & (scores == 0).all(-1)
    return scores + torch.diag_embed(unreached.to(scores) * torch.finfo(scores.dtype).tiny)
