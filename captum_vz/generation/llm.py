"""The form of Captum's `LLMAttribution`, for methods with maps."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from captum.attr import Attribution, InterpretableInput, LLMAttributionResult, TextTemplateInput, TextTokenInput
from torch import Tensor

from captum_vz.errors import ArgumentError
from captum_vz.generation.attribute import MAX_NEW_TOKENS, attribute_generation

#: Captum's arguments of `generate` where the user passes none.
GREEDY = {"max_new_tokens": MAX_NEW_TOKENS, "do_sample": False, "temperature": None, "top_p": None}
_FIRST_MARK = 0xE000  # characters for private use, which no text contains


class LLMTokenMaps(Attribution):
    """How much each generated token depends on each feature of its prompt, in the form of Captum's `LLMAttribution`.

    A script with `LLMAttribution(FeatureAblation(model), tokenizer)` changes this one line. The result is the same
    class, `LLMAttributionResult`. Its `seq_attr` is the sum of `token_attr` over the generated tokens.
    :func:`attribute_generation` returns more: all layers, and the scores of earlier generated tokens.

    Args:
        attr_method: A method of this package, made of a model: `ValueZeroingRollout(model)`. Or, with `model`, what
            :func:`attribute_generation` takes as `method`: a name, a class, a function of the model and its layers.
        tokenizer: The tokenizer of the model.
        model: The model. None: the model of `attr_method`.

    >>> from captum.attr import TextTokenInput
    >>> from captum_vz import ValueZeroing, find_layers
    >>> from captum_vz.testbed import load_model
    >>> model, tokenizer = load_model("causal")
    >>> method = LLMTokenMaps(ValueZeroing(model, find_layers(model)), tokenizer)
    >>> inp = TextTokenInput("the pictures of some hat", tokenizer)
    >>> method.attribute(inp, target="have upset anna").token_attr.shape
    torch.Size([3, 6])
    """

    def __init__(self, attr_method: Any, tokenizer: Any, *, model: Any = None) -> None:
        if isinstance(attr_method, Attribution):
            model = attr_method.forward_func if model is None else model
        elif model is None:
            shown = (
                repr(attr_method) if isinstance(attr_method, (str, type)) else f"of type {type(attr_method).__name__}"
            )
            raise ArgumentError(
                f"attr_method is {shown}: pass a method that was made of a model, such as ValueZeroingRollout(model). "
                "For a name or a class, pass the model as model=."
            )
        super().__init__(model)
        self.attr_method = attr_method
        self.tokenizer = tokenizer
        self.model: Any = model

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
        **kwargs: Any,
    ) -> LLMAttributionResult:
        """How much each generated token depends on each feature of the input.

        Args:
            inp: A `TextTokenInput`, whose features are tokens, or a `TextTemplateInput`, whose features are the values
                of a template. The tokens of a value are zeroed together, and the template's own words are no feature.
                Captum's `baselines` are not used, because no token is replaced.
            target: The generated text, or its token ids. None: the model generates it.
            num_trials: Has no effect, because each trial gives the same scores.
            gen_args: The arguments of `generate`, if `target` is None. None: greedy, 25 tokens, as in Captum.
            use_cached_outputs: Has no effect, because the model runs once over the finished text.
            _inspect_forward: Must be None, because no input is changed.
            forward_in_tokens: Has no effect.
            layer: The layer whose scores are returned, negative ones from the end.
            kwargs: Further arguments for the method's `attribute`, such as `perturbations_per_eval`.

        Returns:
            Captum's result, with `token_attr (generated, features)`.

        Raises:
            RefusedError: Inputs of another class. Both `target` and `gen_args`. A template that changes its values. The
                errors of :func:`attribute_generation`.
        """
        if _inspect_forward is not None:
            raise ArgumentError("_inspect_forward is called for changed inputs, but no input is changed. Pass None.")
        options: dict[str, Any] = dict(GREEDY if gen_args is None else gen_args)
        if target is not None:
            if gen_args is not None:
                raise ArgumentError("Both target and gen_args were passed: the target is the text. Pass one.")
            ids = self.tokenizer.encode(target, add_special_tokens=False) if isinstance(target, str) else target
            options = {"generated": torch.as_tensor(ids)}
        prompt, columns = self._features(inp)
        found = attribute_generation(
            self.model, self.tokenizer, prompt, self.attr_method, method_options=kwargs, **options
        )
        if isinstance(found, list):
            raise ArgumentError(f"generate returned {len(found)} texts: expected one. Leave num_return_sequences 1.")
        if isinstance(inp, TextTemplateInput):
            groups = [-1 - position if column is None else column for position, column in enumerate(columns)]
            groups += range(-len(groups) - 1, -len(found.prompt.ids) - 1, -1)  # a decoder's start
            order = list(dict.fromkeys(groups))
            scores = found.grouped(groups).scores[..., found.layer_index(layer)]
            features = range(inp.n_itp_features)
            empty = scores.new_zeros(len(scores))
            scores = torch.stack([scores[:, order.index(one)] if one in order else empty for one in features], dim=1)
        else:
            kept = [position for position, column in enumerate(columns) if column is not None]
            scores = found.scores[:, kept, found.layer_index(layer)]
        scores = inp.format_attr(scores)
        return LLMAttributionResult(
            input_tokens=inp.values,
            output_tokens=list(found.generated.labels),
            seq_attr=scores.sum(0),
            token_attr=scores,
            inp=inp,
        )

    def _features(self, inp: Any) -> tuple[list[int], list[int | None]]:
        """The token ids of the prompt, and the feature of each token. None: the token is part of no feature."""
        if isinstance(inp, TextTokenInput):
            ids = inp.inp_tensor[0].tolist()
            kept = [True] * len(ids) if inp.itp_mask is None else inp.itp_mask[0].tolist()
            return ids, [position if keep else None for position, keep in enumerate(kept)]
        if not isinstance(inp, TextTemplateInput):
            raise ArgumentError(f"inp is of type {type(inp).__name__}: pass a TextTokenInput or a TextTemplateInput.")
        if not getattr(self.tokenizer, "is_fast", False):
            raise ArgumentError(f"{type(self.tokenizer).__name__} has no offsets of its tokens: pass a fast tokenizer.")
        text = inp.to_model_input()
        owner = _value_of_characters(inp, text)
        encoded = self.tokenizer(text, return_offsets_mapping=True)
        columns: list[int | None] = []
        for start, stop in encoded["offset_mapping"]:
            characters = [owner[i] for i in range(start, stop) if not text[i].isspace()]
            column = next((one for one in characters if one is not None), None)
            columns.append(inp.formatted_mask[column] if column is not None and inp.mask is not None else column)
        return encoded["input_ids"], columns


def _value_of_characters(inp: TextTemplateInput, text: str) -> list[int | None]:
    """The number of the value that each character of the text belongs to. None: it belongs to the template.

    The template is filled with one mark for each value, which shows where the values stand.
    """
    marks = [chr(_FIRST_MARK + index) for index in range(len(inp.values))]
    filled = inp.format_fn(**dict(zip(inp.dict_keys, marks, strict=True))) if inp.dict_keys else inp.format_fn(*marks)
    pieces = re.split(f"([{marks[0]}-{marks[-1]}])", filled)
    rebuilt, owner = "", list[int | None]()
    for piece in pieces:
        value = ord(piece) - _FIRST_MARK if piece in marks else None
        part = piece if value is None else inp.values[value]
        rebuilt += part
        owner += [value] * len(part)
    if rebuilt != text or not set(marks) <= set(filled):
        raise ArgumentError(
            "The template changes or leaves out its values, so the tokens of a value cannot be found. Pass a template "
            "that inserts all values as they are."
        )
    return owner
