"""Several methods on one text, in one table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from captum_vz import find_layers
from captum_vz.errors import RefusedError
from captum_vz.study.examples.text import prepare_text, word_id
from captum_vz.study.methods import METHODS, Batch, check_methods, encoder_of, joined_first
from captum_vz.study.one_text.table import Table


def compare(
    model: Any,
    tokenizer: Any,
    inputs: str | Mapping[str, Any],
    methods: Iterable[str] | None = None,
    target: int | str | None = None,
    *,
    foil: int | str | None = None,
    layer: int = -1,
    layers: list[nn.Module] | None = None,
    token: int | str | None = None,
    truth: bool = False,
    advance: Callable[[str], object] | None = None,
) -> Table:
    """How much a token of a text draws on each of its tokens, by several methods: one table, tokens by methods.

    Every method's scores are shares: not negative, summing to 1. Scores of gradient methods are the Euclidean norms
    of the tokens' vectors.

    Args:
        model: A model of transformers in eval mode. Of a model with encoder and decoder, the encoder is explained.
        tokenizer: Its tokenizer.
        inputs: A text, in which ``[MASK]`` stands for the tokenizer's own mask token, or what the tokenizer returned
            for one text, with tensors `(1, tokens)`.
        methods: Names of :data:`~captum_vz.study.METHODS`. None: :data:`~captum_vz.study.DEFAULT_METHODS`, without
            methods that refuse this model. The table lists them with the reason.
        target: The class whose logit is explained by the methods that explain the output. It is the id of a token of
            the vocabulary, or this token as text. The logit is read at `token`. None: the model's prediction.
        foil: The class whose logit is subtracted from the target's logit. None: none.
        layer: The layer of methods with a map for each layer, from 0; the last layer of rollouts. Negative numbers
            count from the end. Methods without layers ignore it.
        layers: The layers of the model, if :func:`~captum_vz.find_layers` does not find them.
        token: The token that is explained, by its position (negative ones count from the end) or as it is written.
            None: the mask or, without a mask, the last token that is no special token.
        truth: Whether to add what blanking out each token does to the prediction at `token`, with Kendall's rank
            correlation of each method with it. It needs the extra `study`, and one forward pass for each token.
        advance: Called with the name of each method before it runs, for a progress bar.

    Returns:
        A table that prints, draws itself (`plot`) and is exported (`to_pandas`, `to_csv`, `to_json`, `to_markdown`).

    Raises:
        ValueError: A method is unknown; there is no such token, layer or target; or the text is too long or empty.
        RefusedError: A method that was named, or each of the default methods, refuses the model.

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
    model = encoder_of(model)
    layers = find_layers(model) if layers is None else layers
    text = prepare_text(model, tokenizer, inputs, token)
    targets, foils = (None if word is None else [word_id(tokenizer, word)] for word in (target, foil))
    batch = Batch(model, tokenizer, layers, text.inputs, [text.token], targets, foils)
    found, refused = _rows(batch, names, methods is None, advance)
    depths = [len(rows) for name, rows in found.items() if METHODS[name].layered]
    depth = max(depths, default=1)
    if depths and not -depth <= layer < depth:
        raise ValueError(f"layer {layer} is out of range: the model has {depth} layers, {-depth} to {depth - 1}.")
    scores = {name: rows[layer if METHODS[name].layered else 0][0].double().cpu() for name, rows in found.items()}
    scopes = {name: METHODS[name].scope(layer % depth) for name in found}
    effect = None
    if truth:
        from captum_vz.study.one_text.truth import blank_out_text

        effect = blank_out_text(model, tokenizer, text, targets, foils).shares
    return Table(text.tokens, text.token, scores, layer % depth, refused, scopes, effect)


def _rows(
    batch: Batch, names: tuple[str, ...], skip: bool, advance: Callable[[str], object] | None
) -> tuple[dict[str, list[Tensor]], dict[str, str]]:
    """The rows of the methods, and the reasons of methods that refuse, if they may be skipped."""
    found: dict[str, list[Tensor]] = {}
    refused: dict[str, str] = {}
    for name in joined_first(names):
        if advance is not None:
            advance(name)
        try:
            found[name] = METHODS[name].rows(batch)
        except RefusedError as error:
            if not skip:
                raise
            refused[name] = str(error)
    if not found:
        raise RefusedError(f"No method can explain this model: {next(iter(refused.values()))}")
    return {name: found[name] for name in names if name in found}, refused
