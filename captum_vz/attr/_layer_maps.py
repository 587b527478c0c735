"""The shell that all layer methods share: one pass, one map `(batch, out, in)` a layer, Captum's arguments."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from captum._utils.common import _format_tensor_into_tuples, _run_forward
from captum._utils.progress import NullProgress, progress
from captum._utils.typing import TargetType
from captum.attr import LayerAttribution
from torch import Tensor, nn
from torch.nn.parallel.scatter_gather import scatter

from captum_vz._engine.collect import collect
from captum_vz._engine.recording import AttentionCall, Recording
from captum_vz._engine.sites import attention_call, valid_positions
from captum_vz.attr._captum import WhileRunning, logged
from captum_vz.attr._target import TokenTarget
from captum_vz.functional import normalize_rows

# A tensor or a tuple of tensors, as in Captum; or a mapping, such as a tokenizer's BatchEncoding, passed as keywords.
Inputs = Tensor | tuple[Tensor, ...] | Mapping[str, Any]

PADDED_TARGET = "the target token of an example is padding, its row stays zero"


class LayerMaps(LayerAttribution, WhileRunning):
    """Base of the methods that compute one map `(batch, out, in)` for each layer.

    A map answers: how much does output token i of the layer depend on source token j? `target` names an output
    *token*, never a class. A subclass says in `_layer_map` what one layer's map is; what is described here is shared.

    Args:
        forward_func: A model, or any function that runs the layers.
        layer: A layer (a whole Transformer block) or a list of layers; `find_layers(model)` gives them all. A
            ModuleList is taken as the list it is.
        device_ids: Needed only if `forward_func` runs a DataParallel model without being one.
        attention: "self", or "cross" for the second attention of a decoder block.
        normalize: Whether each row is divided by its sum.
    """

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
    ) -> Tensor | list[Tensor]:
        r"""How much each output *token* of the layer (`target`: a token, never a class) depends on each source token.

        Args:
            inputs: What `forward_func` takes (token ids, embeddings, pixels, audio): a tensor or a tuple of tensors,
                passed by position, or a mapping such as a tokenizer's output, passed by keyword. Dimension 0 is the
                batch.
            target: The output tokens whose rows are wanted, each by its position; negative ones count from the end of
                the sequence as given. None: all; an int or 1-element tensor: that one in every example; a list of
                ints or a 1-D tensor: one for each example or, of a single example, several, `(1, row, in)`. Tuples
                `(out, in)` pick single scores, `(slice,)` a range of rows. Rows cost what they are, not a whole map.
            additional_forward_args: Further arguments for `forward_func`, after `inputs`: a tuple, or one object.
            feature_mask: Integers `(1 or batch, in)`: tokens with the same number are one feature (a word, a span, an
                image region), treated together; all of them carry its score, and rows sum to 1 over features.
                `captum_vz.functional.pool_groups` collapses such a map to one column a feature.
            attribute_to_layer_input: Only False: a map belongs to a layer's attention, not to its input or output.
            perturbations_per_eval: At most that many sources are zeroed at a time; None lets the engine choose by
                memory. The numbers are the same for any value. (Methods that zero nothing ignore it.)
            show_progress: Whether to show a progress bar, one step a layer.

        Returns:
            A map `(batch, out, in)`, or, with `target`, `(batch, in)`, in at least float32; a list of them if `layer`
            is a list. Rows sum to 1 (unless `normalize=False`). Rows and columns of padding are 0; padding is what
            the model's own attention mask says it is. Any other row that is all zero stays zero, with a warning.

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
        wanted = TokenTarget.parse(target)
        maps: dict[int, Tensor] = {}
        for index, layer_map in self._maps(
            layers, inputs, wanted, additional_forward_args, feature_mask, perturbations_per_eval, show_progress
        ):
            maps[index] = layer_map  # a layer that runs more than once keeps its last run
        results = [wanted.select(maps[index]) for index in range(len(layers))]
        return results if isinstance(self.layer, (list, tuple, nn.ModuleList)) else results[0]

    @abstractmethod
    def _layer_map(
        self,
        index: int,
        recording: Recording,
        call: AttentionCall,
        rows: Tensor | None,
        groups: Tensor | None,
        at_most: int | None,
    ) -> Tensor:
        """The scores of layer `index`, `(batch, row, group)`, not normalised; padded sources are 0.

        `rows` `(batch, row)` are the positions wanted (None: all); `groups` `(batch, in)` the groups of the sources,
        counted from 0 (None: each its own).
        """

    def _maps(
        self,
        layers: Sequence[nn.Module],
        inputs: Inputs,
        target: TokenTarget,
        additional_forward_args: Any = None,
        feature_mask: Tensor | None = None,
        perturbations_per_eval: int | None = None,
        show_progress: bool = False,
    ) -> list[tuple[int, Tensor]]:
        """(index of the layer, its map `(batch, row, in)`), in the order in which the layers ran."""
        check_per_eval(perturbations_per_eval)
        forward = _forward(self.forward_func, inputs, additional_forward_args)
        device_ids = self.device_ids or getattr(self.forward_func, "device_ids", None)
        masks = _Groups(feature_mask, device_ids)
        shares = bool(device_ids) and isinstance(target.rows, list)
        notes: list[str] = []
        title = f"{self.get_name()} attribution"
        with progress(desc=title, total=len(layers)) if show_progress else NullProgress() as bar:

            def compute(index: int, recording: Recording) -> Tensor:
                call = attention_call(recording, self.attention)
                batch, _, out, _ = call.size
                # A replica does not know which examples it has: all rows then, the wanted ones picked at the end.
                rows = None if shares else target.places(batch, out, call.values.device)
                groups = masks.of(call)
                scores = self._layer_map(index, recording, call, rows, groups, perturbations_per_eval)
                notes.extend(recording.notes)
                notes.extend(_zero_rows(scores, recording, call, rows, index))
                scores = normalize_rows(scores) if self.normalize else scores
                bar.update()
                if groups is None:
                    return scores
                spread = scores.gather(2, groups[:, None, :].expand(-1, scores.shape[1], -1))
                return spread * valid_positions(recording, call)[1][:, None, :]

            runs = collect(forward, layers, compute, device_ids)
        if shares:
            runs = [(index, target.rows_of(one)) for index, one in runs]
        if notes:
            warnings.warn(f"{self.get_name()}: {'; '.join(dict.fromkeys(notes))}.", stacklevel=4)
        return runs


def check_per_eval(perturbations_per_eval: Any) -> None:
    """Refuse what is no number of sources."""
    assert perturbations_per_eval is None or (type(perturbations_per_eval) is int and perturbations_per_eval >= 1), (
        f"perturbations_per_eval is {perturbations_per_eval!r}: pass an integer of at least 1, or None."
    )


def as_layers(layer: Any) -> list[nn.Module]:
    """The layers that `layer` names: itself, or the modules of a list."""
    layers = list(layer) if isinstance(layer, (nn.ModuleList, list, tuple)) else [layer]
    wrong = [type(entry).__name__ for entry in layers if not isinstance(entry, nn.Module)]
    assert layers and not wrong, (
        f"layer is {'empty' if not layers else 'of type ' + ', '.join(wrong)}: pass a module of the model, or a list "
        "of modules; captum_vz.find_layers(model) gives all its Transformer layers."
    )
    assert len({id(entry) for entry in layers}) == len(layers), (
        "layer lists the same module more than once. A layer that runs several times in a pass is listed once."
    )
    parts = {id(module) for entry in layers for module in entry.modules() if module is not entry}
    inside = [type(entry).__name__ for entry in layers if id(entry) in parts]
    assert not inside, (
        f"layer lists modules that are part of others in it: {', '.join(inside)}. Pass either, in calls of their own."
    )
    return layers


def _forward(forward_func: Callable[..., Any], inputs: Inputs, additional_forward_args: Any) -> Callable[[], Any]:
    """The user's call, ready to be made."""
    if isinstance(inputs, Mapping):
        assert additional_forward_args is None, (
            "inputs is a mapping, which is passed by keyword: put further arguments into it, "
            "and leave additional_forward_args None."
        )
        tensors = {str(name): value for name, value in inputs.items()}
        _refuse_empty(tensors.values())
        return lambda: forward_func(**tensors)
    formatted = _format_tensor_into_tuples(inputs)
    _refuse_empty(formatted)
    return lambda: _run_forward(forward_func, formatted, None, additional_forward_args)


def _refuse_empty(inputs: Any) -> None:
    for value in inputs:
        assert not isinstance(value, Tensor) or 0 not in value.shape[:2], (
            f"inputs holds an empty tensor {tuple(value.shape)}: there is no token to explain. Pass at least one."
        )


class _Groups:
    """A feature_mask, its groups counted from 0, on the device of each layer and cut to each replica's share."""

    def __init__(self, feature_mask: Any, device_ids: list[int] | None) -> None:
        if isinstance(feature_mask, tuple) and len(feature_mask) == 1:
            feature_mask = feature_mask[0]
        self.mask: Tensor | None = None
        self.shares: dict[torch.device, Tensor] = {}
        if feature_mask is None:
            return
        assert (
            isinstance(feature_mask, Tensor)
            and feature_mask.dim() == 2
            and not feature_mask.is_floating_point()
            and not feature_mask.is_complex()
        ), (
            f"feature_mask is {_describe(feature_mask)}: pass integers of shape (1 or batch, source tokens), "
            "the same number for tokens that belong together."
        )
        self.mask = feature_mask.unique(return_inverse=True)[1]
        if device_ids and len(self.mask) > 1:
            self.shares = {share.device: share for share in scatter(self.mask, device_ids)}

    def of(self, call: AttentionCall) -> Tensor | None:
        """The groups of the sources of one attention, `(batch, in)`."""
        if self.mask is None:
            return None
        batch, _, _, sources = call.size
        mask = self.shares.get(call.values.device, self.mask).to(call.values.device)
        assert mask.shape[0] in (1, batch) and mask.shape[1] == sources, (
            f"feature_mask is {tuple(mask.shape)}, but the layer's attention has {batch} examples of {sources} source "
            f"tokens: pass integers of shape (1, {sources}) or ({batch}, {sources})."
        )
        return mask.expand(batch, sources)


def _describe(value: Any) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else f"of type {type(value).__name__}"


def _zero_rows(scores: Tensor, recording: Recording, call: AttentionCall, rows: Tensor | None, index: int) -> list[str]:
    """What to tell of rows that are all zero: those that were asked for, and those that are not padding."""
    valid, _ = valid_positions(recording, call)
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
            f"{int(unmoved.sum())} row(s) of layer {index} ({type(recording.layer).__name__}) stay zero, "
            "for no source changes them"
        )
    return notes
