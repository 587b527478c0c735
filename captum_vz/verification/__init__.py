"""Compare the maps of a user's own model with the definition of Value Zeroing, and report what was found."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from captum_vz._engine import find_layers
from captum_vz._private import tree_leaves, tree_map
from captum_vz.attr import ValueZeroing
from captum_vz.attr._call import as_layers
from captum_vz.attr._call.arguments import Inputs, bind_forward, examples_of
from captum_vz.errors import ArgumentError, RefusedError
from captum_vz.subjects import Subject, text_subject_of
from captum_vz.subjects.texts import prepare_text
from captum_vz.verification.checks import FAILED, PASSED, SKIPPED, Check, LayerVerification, Rows, VerificationReport
from captum_vz.verification.recorded import plain_run

__all__ = ["Check", "VerificationReport", "verify"]


def verify(
    model: Any,
    inputs: Inputs | str,
    layers: Any = None,
    *,
    tokenizer: Any = None,
    additional_forward_args: Any = None,
    attention: str = "self",
    max_sources: int = 32,
    advance: Callable[[str], object] | None = None,
) -> VerificationReport:
    """Compare the maps of :class:`~captum_vz.ValueZeroing` with the definition, on a model and inputs of your own.

    The definition runs a copy of each layer again, once for each source token, with the projected value row of the
    token zeroed. It shares no code with the computation of the maps. These are the checks:

    - *rerun*: a copy of the layer, run on its recorded input, returns the output of the plain run of the model.
    - *map*: the map equals the definition in float64.
    - *replay: NAME*: each way to compute the map that holds for the layer gives the same map, if used alone.
    - *rows*: scores are finite and not negative, and rows sum to 1.
    - *zeros*: where the definition is exactly 0, such as later tokens in a causal model, the map is 0.
    - *rounding*: how far the definition in float32 (of a float64 model, in float64) is from that in float64.
    - *chunk sizes*: `perturbations_per_eval` changes no score.
    - *batch*: the map of an example is the same alone and in a batch.
    - *padding*: padding changes no score. This needs a mapping of inputs with an `attention_mask`. If padding on the
      left moves the positions of tokens, a failed check *positions* says so.

    A map may differ by rounding. 0.2 % of the largest score of the row are allowed in float32, and 1e-5 in float64. Ten
    times the difference that *rounding* finds for the row are added. Each layer takes two runs for each source, and the
    model takes about ten runs for each layer.

    Args:
        model: A model, a function that runs the layers, or what :func:`captum_vz.explain` takes.
        inputs: A text, or inputs as in `attribute`. Long inputs are computed in other ways than short ones, so use
            sentences of the length that you explain.
        layers: A layer or a list of layers. None: all layers that `captum_vz.find_layers(model)` returns.
        tokenizer: The tokenizer of a model that is passed alone, for a text.
        additional_forward_args: Further arguments of `model`, as in `attribute`.
        attention: "self", or "cross" for the cross-attention of decoder blocks.
        max_sources: The largest number of sources that the definition zeroes in a layer. If there are more, evenly
            spaced ones are taken.
        advance: Called with the name of the next thing to check, such as "layer 0", for a progress bar.

    Returns:
        A report. `report.passed` says whether all checks passed, `report.verdict` says what to do, `str(report)` is a
        table, and `report.to_json()` has all numbers.

    >>> from captum_vz import verify
    >>> verify("agreement", "some hat [MASK] small.").passed
    True
    >>> from captum_vz.testbed import load_model
    >>> model, tokenizer = load_model()
    >>> verify(model, tokenizer(["some hat [MASK] small.", "it [MASK]."], padding=True, return_tensors="pt")).passed
    True
    """
    if type(max_sources) is not int or max_sources < 1:
        raise ArgumentError(f"max_sources is {max_sources!r}: pass an integer of at least 1.")
    if attention not in ("self", "cross"):
        shown = repr(attention) if isinstance(attention, str) else f"of type {type(attention).__name__}"
        raise ArgumentError(f"attention is {shown}: pass 'self' or 'cross', which are all that can be verified.")
    if isinstance(inputs, str) or isinstance(model, (str, Path, tuple, Subject)) or not callable(model):
        named = text_subject_of(model, tokenizer)
        model, layers = named.forward, named.layers if layers is None else layers
        if isinstance(inputs, str):
            inputs = prepare_text(named.model, named.tokenizer, inputs).inputs
    inputs = dict(inputs) if isinstance(inputs, Mapping) else inputs
    if layers is None:
        if not isinstance(model, nn.Module):
            raise ArgumentError("model is a function, in which no layers can be found: pass layers=.", "model")
        layers = find_layers(model)
    modules = as_layers(layers)
    subject = _Subject(model, inputs, additional_forward_args, attention)
    runs = plain_run(bind_forward(model, inputs, additional_forward_args), modules)
    checks: list[Check] = []
    rows: dict[int, Rows] = {}
    for index, layer in enumerate(modules):
        if advance is not None:
            advance(f"layer {index}")
        one = LayerVerification(index, partial(subject.map, layer), mask_of(inputs), attention, max_sources)
        checks += one.checks(runs.get(index))
        if one.rows is not None:
            rows[index] = one.rows
    if rows:
        if advance is not None:
            advance("chunk sizes, batches and padding")
        checks += _model_checks(subject, [modules[index] for index in rows], rows)
    names = tuple(type(layer).__name__ for layer in modules)
    dtype = next((str(run.hidden.dtype).removeprefix("torch.") for run in runs.values()), "")
    return VerificationReport(names, dtype, tuple(checks))


@dataclass(frozen=True)
class _Subject:  # of a verification
    model: Any
    inputs: Any
    more: Any
    attention: str

    def maps(self, layers: list[Any], given: Any = None, normalize: bool = False, **options: Any) -> list[Tensor]:
        """The maps of some layers, for `given (inputs, additional_forward_args)`. None: for the user's inputs.

        The report says in numbers what maps warn of, except for padding without a mask. Normalized maps warn of this.
        """
        inputs, more = (self.inputs, self.more) if given is None else given
        method = ValueZeroing(self.model, layers, attention=self.attention, normalize=normalize)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if normalize:
                warnings.filterwarnings("default", ".* that no mask hides")
            maps = method.attribute(inputs, additional_forward_args=more, **options)
        return [one.cpu() for one in maps]  # the layers may be on several devices

    def map(self, layer: nn.Module) -> Tensor:
        """The map of one layer, not normalized."""
        return self.maps([layer])[0]


def _model_checks(subject: _Subject, layers: list[nn.Module], rows: dict[int, Rows]) -> Iterator[Check]:
    """The checks that compare maps of all layers with each other, for inputs or options in another form."""
    batch, _, count = next(iter(rows.values())).found.shape
    for index, one in zip(rows, subject.maps(layers, normalize=True), strict=True):
        difference = (one.double().sum(-1) - 1).abs().masked_fill((one == 0).all(-1), 0).nan_to_num(torch.inf).max()
        good = bool(one.isfinite().all() and (one >= 0).all() and difference <= 1e-4)
        note = "" if good else f"a row sums to {1 + float(difference)}, or has entries that are negative or not finite"
        yield Check("rows", PASSED if good else FAILED, index, float(difference), 1e-4, note)

    def compared(name: str, given: Any, place: Callable[[Tensor], Tensor], **options: Any) -> Iterator[Check]:
        """`place` selects from a map of `rows` what the maps of `given` hold."""
        try:
            maps = subject.maps(layers, given, **options)
        except Exception as error:  # a model may not take such inputs
            kind = "refused" if isinstance(error, RefusedError) else type(error).__name__
            yield Check(name, SKIPPED, note=f"the model does not run on inputs in this form ({kind}: {error})")
            return
        for (index, known), found in zip(rows.items(), maps, strict=True):
            yield known.compare(name, index, found, place)

    for chunk in {1 if count <= 32 else count // 8, count // 2 + 1}:
        yield from compared("chunk sizes", None, lambda x: x, perturbations_per_eval=chunk)
    given = (subject.inputs, subject.more)
    sizes = [len(x) for x in tree_leaves(subject.inputs) if isinstance(x, Tensor) and x.dim()]
    if batch not in sizes[:1]:
        note = f"dimension 0 of the inputs is not the batch: it is {sizes[:1]}, and maps have {batch} examples"
        yield Check("batch", SKIPPED, note=note)
    elif batch == 1:
        yield from compared("batch", paired(given), lambda x: x)
    for index in range(min(batch, 4) if sizes[:1] == [batch] != [1] else 0):
        yield from compared("batch", examples_of(*given, [index], batch), partial(_tokens_of, index, slice(None)))
    mask = mask_of(subject.inputs)
    if mask is None or mask.shape != (batch, count) or subject.more is not None:
        yield Check("padding", SKIPPED, note="the inputs are no mapping with an attention_mask (batch, tokens)")
    elif mask.bool().all():
        pad_id = getattr(getattr(subject.model, "config", None), "pad_token_id", None)
        yield from compared("padding", (padded(subject.inputs, mask, pad_id or 0), None), lambda x: x)
    else:
        yield from _positions(subject, mask, layers[0])
        for index, known in rows.items():
            real = mask.bool().cpu()
            scores = known.found.masked_fill(real[:, :, None] & real[:, None], 0)
            if scores.any():
                yield Check("padding", FAILED, index, note="tokens that attention_mask hides have scores")
        for index in range(min(batch, 4)):
            inputs, kept = unpadded(subject.inputs, mask, index)
            yield from compared("padding", (inputs, None), partial(_tokens_of, index, kept.cpu()))


def _positions(subject: _Subject, mask: Tensor, layer: nn.Module) -> Iterator[Check]:
    """A failed check if padding on the left changes the vectors that the first layer is given."""
    index = int((mask.cumsum(1) == 0).sum(1).argmax())
    inputs, kept = unpadded(subject.inputs, mask, index)
    if mask[index, 0] or not len(kept):
        return
    with suppress(Exception):  # a model may not take such inputs
        padded, alone = (plain_run(bind_forward(subject.model, x, None), [layer]) for x in (subject.inputs, inputs))
        found, expected = padded[0].states[0][index, kept], alone[0].states[0][0]
        change = float((found - expected).abs().amax() / expected.abs().amax().clamp_min(1e-30))
        # Models of any precision may rotate queries and keys in float32.
        if change > max(torch.finfo(found.dtype).eps, torch.finfo(torch.float32).eps) ** 0.5:
            count = int((mask[:, 0] == 0).sum())
            yield Check(
                "positions",
                FAILED,
                note=f"{count} example(s) begin with padding, and the model gives the first layer other vectors of "
                f"their tokens than without padding. They differ by {change:.2g} of the largest entry. Pass "
                "position_ids=(attention_mask.cumsum(1) - 1).clamp(0) if the model takes them, or pad on the right",
            )


def _tokens_of(index: int, kept: Tensor | slice, x: Tensor) -> Tensor:
    """The rows and columns of some tokens of one example, of a map or of one number for each row."""
    return x[index : index + 1, kept] if x.dim() == 2 else x[index : index + 1, kept][:, :, kept]


def _changed(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    return tree_map(lambda x: change(x) if isinstance(x, Tensor) else x, value)


def paired(value: Any) -> Any:
    """One example, and after it the same tokens in reverse order as a second example."""
    return _changed(lambda x: torch.cat([x, x.flip(1)]) if x.dim() > 1 and len(x) == 1 else x, value)


def mask_of(inputs: Any) -> Tensor | None:
    """The mask of padding in the inputs, `(batch, tokens)`, if they are a mapping that has one."""
    mask = inputs.get("attention_mask") if isinstance(inputs, Mapping) else None
    return mask if isinstance(mask, Tensor) and mask.dim() == 2 else None


def padded(inputs: Mapping[str, Any], mask: Tensor, pad_id: int) -> dict[str, Any]:
    """The inputs with padding tokens after the others, which the mask marks."""

    def longer(name: str, x: Tensor) -> Tensor:
        sides, fill = (0, 0) * (x.dim() - 2) + (0, 2), pad_id if name == "input_ids" else 0
        return pad(x, sides, value=fill) if x.shape[:2] == mask.shape else x

    return {name: _changed(partial(longer, name), one) for name, one in inputs.items()}


def unpadded(inputs: Any, mask: Tensor, index: int) -> tuple[Any, Tensor]:
    """One example of a padded batch without its padding, and the positions of its tokens in the batch."""
    kept = mask[index].nonzero()[:, 0]
    cut = _changed(lambda x: x[:, kept.to(x.device)] if x.shape[:2] == mask.shape else x, inputs)
    return examples_of(cut, None, [index], len(mask))[0], kept
