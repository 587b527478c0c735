"""Several methods on one text, in one table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from captum_vz import find_layers
from captum_vz.study.methods import METHODS, Batch, check_methods, part_of
from captum_vz.study.table import Table
from captum_vz.study.targets import find_target, longest_text
from captum_vz.visualization import readable_tokens


def compare(
    model: Any,
    tokenizer: Any,
    inputs: str | Mapping[str, Any],
    methods: Iterable[str] | None = None,
    target: int | str | None = None,
    *,
    layer: int = -1,
    answer: int | str | None = None,
    foil: int | str | None = None,
    layers: list[nn.Module] | None = None,
) -> Table:
    """How much a token of a text draws on each of its tokens, by several methods: one table, tokens by methods.

    Every method's scores are shares: not negative, summing to 1. Those of gradient methods are the Euclidean norms of
    the tokens' vectors.

    Args:
        model: A model of transformers in eval mode; of one with encoder and decoder, the encoder is explained.
        tokenizer: Its tokenizer.
        inputs: A text, in which ``[MASK]`` stands for the tokenizer's own mask token, or what the tokenizer has made of
            one, with tensors `(1, tokens)`.
        methods: Names of :data:`~captum_vz.study.METHODS`. None: all but gradients and flow, those left out that this
            model does not have; the table says which and why.
        target: The token that is explained, by its position (negative ones count from the end) or as it is written.
            None: the mask or, where there is none, the last token that is no special one.
        layer: Of methods with a map for each layer the layer, from 0; of rollouts the layer up to which they go.
            Negative ones count from the end.
        answer: The token whose logit at the target gradient methods explain, by its id or as it is written. None: the
            model's own answer.
        foil: The token whose logit is subtracted from it. None: none.
        layers: The layers of the model, if :func:`~captum_vz.find_layers` does not find them.

    Returns:
        A table that prints, draws itself (`plot`) and is exported (`to_pandas`, `to_csv`, `to_json`, `to_markdown`).

    Raises:
        ValueError: An unknown method, a target, layer or answer that is not there, or a text too long or empty.
        AssertionError: A method that was named and that the model does not have.

    >>> from captum_vz.study import compare
    >>> from captum_vz.testbed import load_agreement_model
    >>> model, tokenizer = load_agreement_model()
    >>> print(compare(model, tokenizer, "the pictures of some hat [MASK].", ["value-zeroing", "attention", "position"]))
                 value
                 zeroing  attention  position
    ...
    > 6  [MASK]  0...
    ...
    """
    names = check_methods(methods)
    model = part_of(model)
    layers = find_layers(model) if layers is None else layers
    tensors = _tensors(model, tokenizer, inputs)
    ids = tensors["input_ids"][0].tolist()
    tokens = readable_tokens(tokenizer, ids)
    masks = [number == tokenizer.mask_token_id for number in ids]
    place = find_target(target, tokens, masks, [number in tokenizer.all_special_ids for number in ids])
    answers, foils = (None if word is None else [_id(tokenizer, word)] for word in (answer, foil))
    batch = Batch(model, tokenizer, layers, tensors, [place], answers, foils)
    found, refused = _rows(batch, names, skip=methods is None)
    depth = max((len(rows) for name, rows in found.items() if METHODS[name].layered), default=1)
    if not -depth <= layer < depth:
        raise ValueError(f"layer {layer} is out of range: the model has {depth} layers, {-depth} to {depth - 1}.")
    scores = {name: rows[layer if METHODS[name].layered else 0][0].double().cpu() for name, rows in found.items()}
    return Table(tuple(tokens), place, scores, layer % depth, refused)


def _rows(batch: Batch, names: tuple[str, ...], skip: bool) -> tuple[dict[str, list[Tensor]], dict[str, str]]:
    """The rows of the methods, and why some have none, if these may be skipped."""
    if not skip:
        return batch.rows(names), {}
    found: dict[str, list[Tensor]] = {}
    refused: dict[str, str] = {}
    for name in sorted(names, key=lambda name: not METHODS[name].joins):
        try:
            found |= batch.rows([name])
        except AssertionError as error:  # with which every method of this package refuses a model
            refused[name] = str(error)
    if not found:
        raise AssertionError(f"No method can explain this model: {next(iter(refused.values()))}")
    return {name: found[name] for name in names if name in found}, refused


def _tensors(model: Any, tokenizer: Any, inputs: str | Mapping[str, Any]) -> dict[str, Tensor]:
    encoding: Any = inputs
    if isinstance(inputs, str):
        text = inputs.replace("[MASK]", tokenizer.mask_token) if tokenizer.mask_token else inputs
        encoding = tokenizer(text, return_tensors="pt", verbose=False)
    ids = encoding.get("input_ids") if isinstance(encoding, Mapping) else None
    if not isinstance(ids, Tensor) or ids.ndim != 2 or len(ids) != 1 or not ids.numel():
        shape = f"input_ids {tuple(ids.shape)}" if isinstance(ids, Tensor) else f"of type {type(encoding).__name__}"
        raise ValueError(
            f"inputs is {shape}: pass one text that is not empty, or what the tokenizer makes of one with "
            "return_tensors='pt', a mapping with input_ids (1, tokens)."
        )
    longest = longest_text(model, tokenizer)
    if longest is not None and ids.shape[1] > longest:
        raise ValueError(f"the text is {ids.shape[1]} tokens long, but the model takes at most {longest}.")
    device = next(model.parameters()).device
    return {name: value.to(device) for name, value in encoding.items() if isinstance(value, Tensor)}


def _id(tokenizer: Any, word: int | str) -> int:
    """The id of a token that is given by its id or as it is written, with or without the space before it."""
    if isinstance(word, int):
        return word
    for written in (f" {word}", word):
        ids = tokenizer.encode(written, add_special_tokens=False)
        if len(ids) == 1 and ids[0] != tokenizer.unk_token_id:
            number: int = ids[0]
            return number
    raise ValueError(f"{word!r} is not a single token of the tokenizer: pass another word, or the id of a token.")
