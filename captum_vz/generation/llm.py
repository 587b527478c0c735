"""The forms of Captum's `LLMAttribution`: for methods with maps, and for methods made of gates.

>>> from captum.attr import LLMAttribution
>>> from captum_vz import ValueGates, ValueZeroing, find_layers
>>> from captum_vz.testbed import load_model
>>> model, tokenizer = load_model("causal")
>>> method = ValueZeroing(model, find_layers(model))
>>> inp, target = TextTokenInput("the pictures of some hat", tokenizer), "have upset anna"
>>> LLMTokenMaps(method, tokenizer).attribute(inp, target=target).token_attr.shape
torch.Size([3, 6])
>>> LLMAttribution(to_captum_llm(method), tokenizer).attribute(inp, target=target).token_attr.shape
torch.Size([3, 6])
>>> gates = LLMAttribution(FeatureAblation(ValueGates(model)), tokenizer)
>>> gates.attribute(gated_input(inp, tokenizer), target=target).token_attr.shape
torch.Size([3, 6])
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from copy import copy
from itertools import count
from typing import Any

import torch
from captum.attr import (
    Attribution,
    FeatureAblation,
    InterpretableInput,
    LLMAttributionResult,
    TextTemplateInput,
    TextTokenInput,
)
from torch import Tensor

from captum_vz.attr import ValueZeroingEffect
from captum_vz.errors import ArgumentError
from captum_vz.generation.attribute import MAX_NEW_TOKENS, attribute_generation
from captum_vz.generation.prompts import completed
from captum_vz.result.words import decoded

#: Captum's arguments of `generate` where the user passes none.
GREEDY = {"max_new_tokens": MAX_NEW_TOKENS, "do_sample": False, "temperature": None, "top_p": None}
_FIRST_MARK = 0xE000  # characters for private use, which no text contains


class LLMTokenMaps(Attribution):
    """How much each generated token depends on each feature of its prompt, in the form of Captum's `LLMAttribution`.

    A script with `LLMAttribution(FeatureAblation(model), tokenizer)` changes this one line. The `seq_attr` of the
    result is the sum of `token_attr` over the generated tokens. :func:`attribute_generation` returns all layers.

    Args:
        attr_method: A method of this package, made of a model: `ValueZeroingRollout(model)`. Or, with `model`, what
            :func:`attribute_generation` takes as `method`: a name, a class, a function of the model and its layers.
        tokenizer: The tokenizer of the model. Captum's `TokenizerLike` is enough.
        attr_target: What `ValueZeroingEffect` explains of each generated token: its "log_prob", as `LLMAttribution`
            does by default, its "prob", or its logit (None). Other methods take None, because they explain no
            probability.
        model: The model. None: the model of `attr_method`.
    """

    def __init__(self, attr_method: Any, tokenizer: Any, attr_target: str | None = None, *, model: Any = None) -> None:
        if model is None:
            _check_method(attr_method)
            model = attr_method.forward_func
        super().__init__(model)
        self.attr_method, self.attr_target = attr_method, attr_target
        self.tokenizer = completed(tokenizer)
        if attr_target is None:
            return
        if attr_target not in ("log_prob", "prob"):
            raise ArgumentError(f"attr_target is {attr_target!r}: pass 'log_prob', 'prob' or None.")
        if not isinstance(attr_method, ValueZeroingEffect):
            raise ArgumentError(
                f"attr_target is {attr_target!r}, but {type(attr_method).__name__} explains no probability. Pass "
                "attr_target=None, or a ValueZeroingEffect as attr_method."
            )
        read = torch.log_softmax if attr_target == "log_prob" else torch.softmax
        self.attr_method = copy(attr_method)
        self.attr_method.forward_func = lambda *args, **kwargs: read(model(*args, **kwargs).logits, -1)

    def attribute(
        self,
        inp: InterpretableInput,
        target: str | Tensor | None = None,
        num_trials: int = 1,
        gen_args: dict[str, Any] | None = None,
        use_cached_outputs: bool = True,
        _inspect_forward: Callable[..., None] | None = None,
        forward_in_tokens: bool = True,
        *,
        layer: int = -1,
        skip_tokens: Sequence[int] | Sequence[str] | None = None,
        foil: int | str | Sequence[int | str | None] | None = None,
        **kwargs: Any,
    ) -> LLMAttributionResult:
        """How much each generated token depends on each feature of the input.

        Args:
            inp: A `TextTokenInput`, whose features are tokens, or a `TextTemplateInput`, whose features are the values
                of a template. The tokens of a value are zeroed together, and the template's own words are no feature.
                Captum's `baselines` are not used, because no token is replaced.
            target: The generated text, or its token ids. None: the model generates it.
            num_trials: Has no effect, like `use_cached_outputs` and `forward_in_tokens`: no input is changed.
            gen_args: The arguments of `generate`, if `target` is None. None: greedy, 25 tokens, as in Captum.
            use_cached_outputs: See there.
            _inspect_forward: Must be None, because no input is changed.
            forward_in_tokens: See there.
            layer: The layer whose scores are returned; negative counts from the end.
            skip_tokens: Tokens, or their ids, that are left out of a `target`, such as special tokens. Captum's
                tutorials pass it. A text as `target` gets no special tokens here.
            foil: Why the generated token rather than this one? See :func:`attribute_generation`. Methods that explain a
                token's state refuse it.
            kwargs: Further arguments for the method's `attribute`, such as `perturbations_per_eval`.

        Returns:
            Captum's result, with `token_attr (generated, features)`.

        Raises:
            RefusedError: Inputs of another class. Both `target` and `gen_args`. A template that changes its values. The
                errors of :func:`attribute_generation`.
        """
        if _inspect_forward is not None:
            raise ArgumentError("_inspect_forward is called for changed inputs, but no input is changed. Pass None.")
        if unused := [name for name in ("baselines", "n_samples", "n_steps") if name in kwargs]:
            raise ArgumentError(
                f"{unused[0]} was passed, but no input is changed: use Captum's LLMAttribution with gated_input."
            )
        options: dict[str, Any] = dict(GREEDY if gen_args is None else gen_args)
        if target is not None:
            if gen_args is not None:
                raise ArgumentError("Both target and gen_args were passed: the target is the text. Pass one.")
            ids = self.tokenizer.encode(target, add_special_tokens=False) if isinstance(target, str) else target
            skipped = [self.tokenizer.convert_tokens_to_ids(x) if isinstance(x, str) else x for x in skip_tokens or ()]
            ids = torch.as_tensor(ids)
            options = {"generated": ids[~torch.isin(ids, ids.new_tensor(skipped))]}
        options["foil"] = foil
        scores, output_tokens = self._scores(inp, layer, kwargs, options)
        scores = inp.format_attr(scores)
        named = {"input_tokens": inp.values, "output_tokens": output_tokens, "inp": inp}
        return LLMAttributionResult(seq_attr=scores.sum(0), token_attr=scores, **named)

    def _scores(
        self, inp: Any, layer: int, method_options: dict[str, Any], options: dict[str, Any]
    ) -> tuple[Tensor, list[str]]:
        """The scores `(generated, features)`, and the generated tokens."""
        prompt, columns = _features(inp, self.tokenizer)
        asked = self.forward_func, prompt, self.attr_method
        found = attribute_generation(*asked, tokenizer=self.tokenizer, method_options=method_options, **options)
        if isinstance(found, list):
            raise ArgumentError(f"generate returned {len(found)} texts: expected one. Leave num_return_sequences 1.")
        index = found.layer_index(layer)
        told = found.told if options.get("foil") is not None else []
        for remark in [*told, *found.first.remarks(found.tokens[0], index)]:
            warnings.warn(remark, stacklevel=3)
        columns += [None] * (len(found.prompt.ids) - len(columns))  # a decoder's start
        groups = [-1 - place if column is None else column for place, column in enumerate(columns)]
        order = list(dict.fromkeys(groups))
        if isinstance(inp, TextTemplateInput):
            found = found.grouped(groups)
        scores = torch.nn.functional.pad(found.scores[..., index], (0, 1))  # an empty value has no token
        places = [order.index(one) if one in order else -1 for one in range(inp.n_itp_features)]
        return scores[:, places], list(found.generated.labels)


class _TokenMapsAblation(FeatureAblation):
    """A `FeatureAblation` by its type, which `LLMAttribution` asks for, with the scores of another method."""

    def __init__(self, method: Attribution) -> None:
        super().__init__(method.forward_func)
        self.method = method

    def attribute(self, inputs: Tensor, additional_forward_args: Any = None, **kwargs: Any) -> Tensor:
        """The scores of all generated tokens together and of each, `(1 + generated, features)`."""
        kwargs.pop("skip_tokens", None)  # captum 0.9 hands it on, and its FeatureAblation ignores it
        inp, target = additional_forward_args[:2]
        llm = self.forward_func.__self__  # LLMAttribution puts its own method here
        of_output = llm.attr_target if isinstance(self.method, ValueZeroingEffect) else None
        maps = LLMTokenMaps(self.method, llm.tokenizer, of_output)
        found, _ = maps._scores(inp, -1, kwargs, {"generated": torch.as_tensor(target)})
        return torch.cat([found.sum(0, keepdim=True), found]).to(inputs.device)


def to_captum_llm(method: Attribution) -> FeatureAblation:
    r"""A method of this package in a form that Captum's `LLMAttribution` accepts.

    .. math:: s_j = \sum_t M_{tj}

    for the whole text, and :math:`M_{tj}` for each generated token t. `LLMAttribution` takes objects of five classes of
    Captum only, so the returned object is a `FeatureAblation` by its type. No input is changed. Use it in a script that
    makes the `LLMAttribution` itself. Otherwise :class:`LLMTokenMaps` has the same scores. `ValueZeroingEffect`
    explains log-probabilities or probabilities, as `LLMAttribution(attr_target=...)` says. Layer methods show the last
    layer.

    Args:
        method: A method of this package, made of a model: `ValueZeroingRollout(model, find_layers(model))`.

    Returns:
        What `LLMAttribution` takes as `attr_method`. Its own `attribute` is called by `LLMAttribution` only.
    """
    _check_method(method)
    return _TokenMapsAblation(method)


def _check_method(method: Any) -> None:
    if not isinstance(method, Attribution):
        raise ArgumentError(
            f"attr_method is of type {type(method).__name__}: pass a method that was made of a model, such as "
            "ValueZeroingRollout(model). LLMTokenMaps also takes a name or a class, if the model is passed as model=."
        )


def _features(inp: Any, tokenizer: Any) -> tuple[list[int], list[int | None]]:
    """The token ids of the prompt, and the feature of each token. None: the token is part of no feature."""
    if isinstance(inp, TextTokenInput):
        ids, numbers = inp.inp_tensor[0].tolist(), count()
        kept = [True] * len(ids) if inp.itp_mask is None else inp.itp_mask[0].tolist()
        return ids, [next(numbers) if keep else None for keep in kept]
    if not isinstance(inp, TextTemplateInput):
        raise ArgumentError(f"inp is of type {type(inp).__name__}: pass a TextTokenInput or a TextTemplateInput.")
    text = inp.to_model_input()
    owner = _owners(inp, text)
    ids, spans = _spans(completed(tokenizer), text)
    return ids, [next((one for one in owner[start:stop] if one is not None), None) for start, stop in spans]


def _spans(tokenizer: Any, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """The tokens of a text, and the characters of each. Without offsets, tokens have to spell the text."""
    if getattr(tokenizer, "is_fast", False):
        encoded = tokenizer(text, return_offsets_mapping=True)
        return encoded["input_ids"], encoded["offset_mapping"]
    ids = tokenizer(text)["input_ids"]
    spelt, starts, stops = decoded(tokenizer, ids)
    before = spelt.find(text)  # special tokens
    if before < 0:
        raise ArgumentError(
            f"{type(getattr(tokenizer, 'tokenizer', tokenizer)).__name__} has no offsets of its tokens, and they spell "
            f"{spelt!r} where the text is {text!r}. Pass a fast tokenizer."
        )
    spans: list[tuple[int, int]] = []
    for index, start, stop in zip(ids, starts, stops, strict=True):
        # ByT5 decodes the first bytes of a character as nothing.
        end = stop if stop > start or index in tokenizer.all_special_ids else start + 1
        spans.append((min(max(start - before, 0), len(text)), min(max(end - before, 0), len(text))))
    return ids, spans


def _owners(inp: TextTemplateInput, text: str) -> list[int | None]:
    """The feature of each character of the text. None: a space, or a part of the template.

    The template is filled with one mark for each value, which shows where the values stand.
    """
    marks = [chr(_FIRST_MARK + index) for index in range(len(inp.values))]
    filled = inp.format_fn(**dict(zip(inp.dict_keys, marks, strict=True))) if inp.dict_keys else inp.format_fn(*marks)
    features = range(len(marks)) if inp.mask is None else inp.formatted_mask
    rebuilt, owners = "", list[int | None]()
    for piece in re.split(f"([{marks[0]}-{marks[-1]}])", filled):
        value = marks.index(piece) if piece in marks else None
        part = piece if value is None else inp.values[value]
        rebuilt += part
        owners += [None if value is None or one.isspace() else features[value] for one in part]
    if rebuilt != text or not set(marks) <= set(filled):
        raise ArgumentError(
            "The template changes or leaves out its values: pass one that inserts all of them as they are."
        )
    return owners


def gated_input(inp: InterpretableInput, tokenizer: Any) -> InterpretableInput:
    r"""An input of Captum's `LLMAttribution` that hands on gates, for a method made of :class:`~captum_vz.ValueGates`.

    .. math:: g_j = p_{k(j)}

    where :math:`p` is what Captum makes of the features, 1 where a feature is present, and k(j) the feature of token j.
    No token is replaced. Tokens without a feature, and generated tokens, have a gate of 1. The scores of
    `FeatureAblation` are those of :class:`~captum_vz.ValueZeroingEffect`, of log-probabilities.

    Args:
        inp: A `TextTokenInput`, whose features are tokens, or a `TextTemplateInput`, whose features are the values of a
            template. Captum's `baselines` are not used.
        tokenizer: The tokenizer of the model. For a template, its tokens have to spell the text, or have offsets.

    Returns:
        An input of the same class, with the same features.
    """
    ids, columns = _features(inp, tokenizer)
    gated: Any = copy(inp)

    def to_model_input(perturbed_tensor: Tensor | None = None) -> Any:
        if perturbed_tensor is None:
            return inp.to_model_input()
        features = torch.nn.functional.pad(perturbed_tensor.to(torch.get_default_dtype()), (0, 1), value=1.0)
        gates = features[:, [-1 if column is None else column for column in columns]]
        return {"input_ids": torch.tensor([ids], device=gates.device), "gates": gates}

    gated.to_model_input = to_model_input
    return gated
