"""The shell that all layer methods share: one pass, one map `(batch, out, in)` a layer, Captum's arguments."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from captum._utils.progress import NullProgress, progress
from captum._utils.typing import TargetType
from captum.attr import LayerAttribution
from torch import Tensor, nn

from captum_vz._engine import AttentionSite, LayerRecord, attention_site, run_and_record
from captum_vz.attr._arguments import Arguments, Groups, Inputs, as_layers, check_per_eval, tokens_of, user_call
from captum_vz.attr._captum import WhileRunning, logged, warn
from captum_vz.attr._target import WantedTokens
from captum_vz.functional import normalize_rows

PADDED_TARGET = "the target token of an example is padding, its row stays zero"


@dataclass(frozen=True)
class MapRun:
    """The maps of one pass.

    Attributes:
        maps: (index of the layer, its map), in the order in which the layers ran.
        tokens: For each layer that ran, how many output tokens it has.
        output: What `forward_func` returned; None: the model was not run.
    """

    maps: list[tuple[int, Tensor]]
    tokens: dict[int, int]
    output: Any = None

    def check(self, wanted: WantedTokens, name: str) -> None:
        """Refuse an output of the model that `target` does not index."""
        for tokens in dict.fromkeys(self.tokens.values()):
            wanted.check(self.output, tokens, name)


class LayerMaps(LayerAttribution, WhileRunning):
    """Base of the methods that compute one map `(batch, out, in)` for each layer.

    A map answers: how much does output token i of the layer depend on source token j? A subclass says in `_layer_map`
    what one layer's map is; what is described here is shared.

    Args:
        forward_func: A model, or any function that runs the layers.
        layer: A layer (a whole Transformer block) or a list of layers; `find_layers(model)` gives them all. A
            ModuleList is taken as the list it is.
        device_ids: Needed only if `forward_func` runs a DataParallel model without being one.
        attention: "self", or "cross" for the second attention of a decoder block.
        normalize: Whether each row is divided by its sum.
    """

    _replays = False  # whether layers are run again, and what their modules made is to be kept for it
    _of_streams = False  # whether a layer's tokens may have several vectors each

    def __init__(
        self,
        forward_func: Callable[..., Any],
        layer: Any,
        device_ids: list[int] | None = None,
        *,
        attention: str = "self",
        normalize: bool = True,
    ) -> None:
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
                `captum_vz.functional.pool_groups` collapses such a map to one column a feature.
            attribute_to_layer_input: Only False: a map belongs to a layer's attention, not to its input or output.
            perturbations_per_eval: At most that many sources are zeroed at a time; None lets the engine choose by
                memory. The numbers are the same for any value. (Methods that zero nothing ignore it.)
            show_progress: Whether to show a progress bar, one step a layer.
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
            AssertionError: Bad arguments; a layer that `forward_func` does not run, whose attention cannot be read, or
                that cannot be replayed; dropout in train mode; values that are not finite. The model is left as it
                was.
        """
        assert not attribute_to_layer_input, (
            f"{self.get_name()} attributes to source tokens through the layer's attention; "
            "attribute_to_layer_input=True has no meaning here. Leave it False."
        )
        layers = as_layers(self.layer)
        wanted = WantedTokens.parse(token, target)
        arguments = Arguments(inputs, additional_forward_args, feature_mask, perturbations_per_eval, show_progress)
        run = self._maps(layers, wanted, arguments)
        run.check(wanted, self.get_name())
        maps = dict(run.maps)  # of a layer that runs more than once, its last run
        results = [wanted.select(maps[index]) for index in range(len(layers))]
        return results if isinstance(self.layer, (list, tuple, nn.ModuleList)) else results[0]

    @abstractmethod
    def _layer_map(
        self,
        site: AttentionSite,
        rows: Tensor | None,
        groups: Tensor | None,
        at_most: int | None,
    ) -> Tensor:
        """The scores of layer `index`, `(batch, row, group)`, not normalised; padded sources are 0.

        `rows` `(batch, row)` are the positions wanted (None: all); `groups` `(batch, in)` the groups of the sources,
        counted from 0 (None: each its own).
        """

    def _maps(self, layers: Sequence[nn.Module], wanted: WantedTokens, arguments: Arguments) -> MapRun:
        """The layers' maps, `(batch, row, in)` each, of one pass."""
        at_most = arguments.perturbations_per_eval
        check_per_eval(at_most)
        forward = user_call(self.forward_func, arguments.inputs, arguments.additional_forward_args)
        device_ids = self.device_ids or getattr(self.forward_func, "device_ids", None)
        masks = Groups(arguments.feature_mask, device_ids)
        shares = bool(device_ids) and wanted.depends_on_example
        notes: list[str] = []
        outputs: list[Any] = []
        lengths: dict[int, int] = {}
        title = f"{self.get_name()} attribution"
        with progress(desc=title, total=len(layers)) if arguments.show_progress else NullProgress() as bar:

            from captum_vz.attr._noting import _noting
            mixing = _noting.get()
            note = None if mixing is None else mixing.note

            def compute(record: LayerRecord) -> Tensor:
                site, index = attention_site(record, self.attention, self._of_streams), record.index
                batch, _, out, _ = site.shape
                end = site.end_of_inputs(tokens_of(arguments.inputs))
                # A replica does not know which examples it has: all rows then, the wanted ones picked at the end.
                rows = None if shares else wanted.positions(batch, end or out, site.attention.values.device)
                lengths[index] = end or out
                groups = masks.of(site, end)
                scores = self._layer_map(site, rows, groups, at_most)
                notes.extend(site.layer.warnings)
                notes.extend(_zero_rows(scores, site, rows, index))
                scores = normalize_rows(scores) if self.normalize else scores
                bar.update()
                if groups is not None:
                    spread = scores.gather(2, groups[:, None, :].expand(-1, scores.shape[1], -1))
                    scores = spread * (site.target_mask, site.source_mask)[1][:, None, :]
                return scores[:, : end if rows is None else None, :end]

            runs = run_and_record(lambda: outputs.append(forward()), layers, compute, device_ids=device_ids, replays=self._replays, on_record=note)
        if shares:
            runs = [(index, wanted.rows_of(one)) for index, one in runs]
        if notes:
            warn(f"{self.get_name()}: {'; '.join(dict.fromkeys(notes))}.")
        return MapRun(runs, lengths, *outputs)


def _zero_rows(scores: Tensor, site: AttentionSite, rows: Tensor | None, index: int) -> list[str]:
    """What to tell of rows that are all zero: those that were asked for, and those that are not padding."""
    valid, _ = (site.target_mask, site.source_mask)
    zero = scores.sum(-1) == 0
    if rows is None:
        padding, unmoved = zero & False, zero & valid
    else:
        padding, unmoved = zero & ~valid.gather(1, rows), zero & valid.gather(1, rows)
    notes = []
    if padding.any():
        notes.append(PADDED_TARGET)
    if unmoved.any():
        notes.append(
            f"{int(unmoved.sum())} row(s) of layer {index} ({site.layer.name}) stay zero, for no source changes them"
        )
    return notes
