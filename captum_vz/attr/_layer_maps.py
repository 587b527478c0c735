"""The shell of all layer methods: one pass, one map `(batch, out, in)` for each layer, Captum's arguments."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from captum._utils.progress import NullProgress, progress
from captum._utils.typing import TargetType
from captum.attr import LayerAttribution
from torch import Tensor, nn

from captum_vz._engine import (
    AttentionSite,
    EmbeddingLeaf,
    LayerRecord,
    OtherMixing,
    attention_site,
    run_and_record,
)
from captum_vz.attr._arguments import (
    Arguments,
    FeatureGroups,
    Inputs,
    as_layers,
    bind_forward,
    check_per_eval,
    tokens_of,
)
from captum_vz.attr._captum import ForwardPassAttribution, logged, warn
from captum_vz.attr._map_run import MapRun, RunOrder
from captum_vz.attr._target import WantedTokens
from captum_vz.attr._wanted import Wanted
from captum_vz.errors import ArgumentError, UnsupportedLayerError


class LayerMaps(LayerAttribution, ForwardPassAttribution):
    """Base of the methods that compute one map `(batch, out, in)` for each layer.

    A map answers: how much does output token i of the layer depend on source token j? A subclass states in
    :meth:`layer_scores` the scores of one layer.

    Args:
        forward_func: A model, or any function that runs the layers.
        layer: A layer (a whole Transformer block) or a list of layers; `find_layers(model)` gives them all. A
            ModuleList is taken as the list it is.
        device_ids: Needed only if `forward_func` runs a DataParallel model without being one.
        attention: "self", or "cross" for the second attention of a decoder block.
        normalize: Whether each row is divided by its sum.
    """

    #: Whether layers are run again: what their modules returned is kept until then.
    replays_layers: bool = False
    #: Whether a token may have several vectors in a layer.
    accepts_streams: bool = False
    #: Whether the pass runs with gradients, from the input of the stack on.
    needs_graph: bool = False
    #: Where the graph begins: the module whose output is its leaf. None: the input of the stack's first layer.
    embeddings: nn.Module | None = None

    def __init__(
        self,
        forward_func: Callable[..., Any],
        layer: Any,
        device_ids: list[int] | None = None,
        *,
        attention: str = "self",
        normalize: bool = True,
    ) -> None:
        """See the class for the arguments."""
        super().__init__(forward_func, layer, device_ids)
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
    ) -> Tensor | list[Tensor]:
        r"""How much each output *token* of the layer depends on each source token.

        Args:
            inputs: What `forward_func` takes (token ids, embeddings, pixels, audio): a tensor or a tuple of tensors,
                passed by position, or a mapping such as a tokenizer's output, passed by keyword. Dimension 0 is the
                batch.
            target: An index into what `forward_func` returned, in Captum's forms, if that has a token axis `(batch,
                tokens, ...)`: the row of the token that its first index names is returned. So `target=(token, entry)`
                is the same call as for Captum's gradient methods. An output without a token axis is refused: pass
                `token`.
            additional_forward_args: Further arguments for `forward_func`, after `inputs`: a tuple, or one object.
            feature_mask: Integers `(1 or batch, in)`: tokens with the same number are one feature (a word, a span, an
                image region), treated together; all of them carry its score, and rows sum to 1 over features.
                `captum_vz.functional.pool_groups` collapses such a map to one column for each feature.
            attribute_to_layer_input: Only False: a map belongs to a layer's attention, not to its input or output.
            perturbations_per_eval: The number of sources that are zeroed at a time. None: as many as fit in memory.
                The numbers are the same for any value. (Methods that zero nothing ignore it.)
            show_progress: Whether to show a progress bar, one step for each layer.
            token: The output tokens whose rows are returned, each by its position; negative positions count from the
                end of the sequence as given. None: all. An int: this position in every example. A list or 1-D tensor:
                one position for each example. A tensor `(batch, k)`, a list of lists or a slice: several rows, `(batch,
                k, in)`. A row costs less than a map, unless whole sequences are replayed: where attention is computed
                inline, or where positions mix after the attention.

        Returns:
            A map `(batch, out, in)`, or, with one token for each example, `(batch, in)`, in at least float32; a list of
            them if `layer` is a list. Rows sum to 1 (unless `normalize=False`). Rows and columns of padding are 0;
            padding is what the model's own attention mask says it is. What a model puts behind the inputs to fill its
            windows (Longformer) is left out. Any other row that is all zero stays zero, with a warning.

        Raises:
            RefusedError: Bad arguments; a layer that `forward_func` does not run, whose attention cannot be read, or
                that cannot be replayed; dropout in train mode; values that are not finite. The model is left as it
                was.
        """
        if attribute_to_layer_input:
            raise ArgumentError(
                f"{self.get_name()} attributes to source tokens through the layer's attention; "
                "attribute_to_layer_input=True has no meaning here. Leave it False."
            )
        wanted = WantedTokens.parse(token, target)
        arguments = Arguments(inputs, additional_forward_args, feature_mask, perturbations_per_eval, show_progress)
        run = self._run(wanted, arguments)
        for tokens in dict.fromkeys(run.tokens.values()):
            wanted.check(run.output, tokens, self.get_name())
        maps = dict(run.maps)  # the last run of a layer that runs more than once
        results = [wanted.select(maps[index]) for index in range(len(maps))]
        return results if isinstance(self.layer, (list, tuple, nn.ModuleList)) else results[0]

    @abstractmethod
    def layer_scores(self, site: AttentionSite, wanted: Wanted) -> Tensor | Callable[[Any], Tensor]:
        """The scores of one layer.

        Args:
            site: The attention that is explained, with the layer's run.
            wanted: The rows and groups that are wanted. `wanted.pool(scores)` makes them of scores `(batch, out, in)`.

        Returns:
            Scores `(batch, row, group)`, not normalised, 0 for padding. Or a function that computes the scores from
            the model's output, which is called when `forward_func` has returned.
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
        find_other_mixing: bool = False,
    ) -> MapRun:
        """The maps of all runs of the layers, in the order in which they ran, as :class:`MapAggregation` joins them.

        Args:
            inputs: See :meth:`attribute`, like all arguments but the last.
            additional_forward_args: Further arguments for `forward_func`.
            feature_mask: The feature of each source token.
            perturbations_per_eval: The number of sources that are zeroed at a time.
            show_progress: Whether to show a progress bar.
            token: The output tokens whose rows are wanted.
            find_other_mixing: Whether to look for what mixes tokens beside the layers' attention. Each layer is run
                once more for this.

        Returns:
            The maps `(batch, row, in)`.
        """
        arguments = Arguments(inputs, additional_forward_args, feature_mask, perturbations_per_eval, show_progress)
        return self._run(WantedTokens.parse(token, None), arguments, True, find_other_mixing)

    def _run(
        self, wanted: WantedTokens, arguments: Arguments, find_restart: bool = False, find_other_mixing: bool = False
    ) -> MapRun:
        """One pass. With `find_restart`, it looks for a second run of the layers."""
        layers = as_layers(self.layer)
        if self.attention not in ("self", "cross"):
            raise ArgumentError(f"attention is {self.attention!r}: pass 'self' or 'cross'.")
        check_per_eval(arguments.perturbations_per_eval)
        forward_func = self._with_graph(layers) if self.needs_graph else self.forward_func
        forward = bind_forward(forward_func, arguments.inputs, arguments.additional_forward_args)
        device_ids = self.device_ids or getattr(self.forward_func, "device_ids", None)
        groups = FeatureGroups(arguments.feature_mask, device_ids)
        # A replica does not know which examples it has: it computes all rows, and the wanted ones are taken at the end.
        shares = bool(device_ids) and wanted.depends_on_example
        outputs: list[Any] = []
        notes: list[str] = []
        lengths: dict[int, int] = {}
        later: dict[int, tuple[Wanted, Callable[[Any], Tensor]]] = {}  # by the place of the run
        order = RunOrder()
        count = itertools.count()
        title = f"{self.get_name()} attribution"
        with progress(desc=title, total=len(layers)) if arguments.show_progress else NullProgress() as bar:

            def compute(record: LayerRecord) -> Tensor:
                site = attention_site(record, self.attention, self.accepts_streams)
                batch, _, out, _ = site.shape
                end = site.end_of_inputs(tokens_of(arguments.inputs))
                lengths[record.index] = end or out
                rows = None if shares else wanted.positions(batch, end or out, site.attention.values.device)
                leaf = forward_func.vectors if isinstance(forward_func, EmbeddingLeaf) else None
                of_layer = groups.of(site, end)
                asked = Wanted(site, rows, of_layer, arguments.perturbations_per_eval, end, leaf)
                scores = self.layer_scores(site, asked)
                if find_restart:
                    order.note(site, end)
                bar.update()
                place = next(count)
                if isinstance(scores, Tensor):
                    result = asked.finish(scores, self.normalize)
                    notes.extend(record.warnings)
                    return result
                later[place] = asked, scores
                return self._placeholder(record)

            mixing = OtherMixing() if find_other_mixing else None
            maps = run_and_record(
                lambda: outputs.append(forward()),
                layers,
                compute,
                device_ids=device_ids,
                replays=self.replays_layers,
                on_record=None if mixing is None else mixing.note,
            )
        for place, (asked, scores) in later.items():
            with torch.set_grad_enabled(self.needs_graph):
                maps[place] = maps[place][0], asked.finish(scores(outputs[0]), self.normalize)
            notes.extend(asked.site.layer.warnings)
        if shares:
            maps = [(index, wanted.rows_of(one)) for index, one in maps]
        if notes:
            warn(f"{self.get_name()}: {'; '.join(dict.fromkeys(notes))}.")
        return MapRun(maps, lengths, outputs[0], mixing, order.restart, order.there)

    def _with_graph(self, layers: Sequence[nn.Module]) -> EmbeddingLeaf:
        """The forward function, in which the vectors that the stack starts from are the leaf of a graph."""
        if torch.is_inference_mode_enabled():
            raise ArgumentError(
                f"{self.get_name()} needs gradients, which inference mode rules out: use torch.no_grad() instead."
            )
        return EmbeddingLeaf(self.forward_func, layers, self.embeddings)

    def _placeholder(self, record: LayerRecord) -> Tensor:
        """What stands for a map until the model has returned."""
        if getattr(record.layer, "_is_replica", False):
            raise UnsupportedLayerError(
                f"{self.get_name()} reads the output of the whole model, of which a replica has a part: pass the "
                "module that DataParallel wraps."
            )
        return torch.empty(0)
