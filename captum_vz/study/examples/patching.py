"""A controlled truth: what is lost if a token's value or state comes from a sentence whose cue has the other number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from captum_vz import UnsupportedLayerError, ValueGates, find_layers
from captum_vz.functional import Intervention
from captum_vz.study.examples import BadExampleError, Example, encode, pad
from captum_vz.subjects.heads import predicts_next
from captum_vz.text import record_spans

#: The difference of the logits of the two forms that a pair must have, and that the other cue must take away.
LEAST_DIFFERENCE: Final = 1.0
#: The share of d(x) - d(x') that the patches of a layer must take away in all. Below it, rounding is much of the truth.
LEAST_SHARE: Final = 0.01


@dataclass(frozen=True)
class Patched:
    r"""What patching each token of one text x from another text x' takes away from the difference of two logits.

    .. math:: d(x) = z_{\text{good}}(x) - z_{\text{bad}}(x), \qquad f_j = d(x) - d(x \text{ with } j \text{ from } x')
    """

    falls: Tensor  #: :math:`f_j`, `(layers, tokens)` in float64; negative if patching token j raises the difference
    difference: float  #: d(x)
    other: float  #: d(x')

    @property
    def shares(self) -> Tensor:
        r"""The truth, rows that sum to 1, `(layers, tokens)`.

        .. math:: t_j = \frac{\max(f_j, 0)}{\sum_k \max(f_k, 0)}

        Tokens whose patch raises the difference count as 0, because scores are shares and have no sign. There is
        nothing to share, and the row is NaN, in two cases: d(x) or d(x) - d(x') is less than :data:`LEAST_DIFFERENCE`;
        or the sum is less than :data:`LEAST_SHARE` of d(x) - d(x'), because the layer brings nothing to the target.
        """
        positive, change = self.falls.clamp(min=0), self.difference - self.other
        sums = positive.sum(-1, keepdim=True)
        enough = (sums >= LEAST_SHARE * change) & (min(self.difference, change) >= LEAST_DIFFERENCE)
        return torch.where(enough, positive / sums, float("nan"))


#: Changes values `(batch, head, in, d_head)` of sources `(batch, in)` in one run of one layer.
Change = Callable[[tuple[int, int], Tensor, Tensor], Tensor]
Texts = tuple[dict[str, Tensor], dict[str, Tensor]]


class _Changed(Intervention):
    """Values are what a function makes of them, of the layer and run, and of the zeroed sources."""

    reads_others = False

    def __init__(self, change: Change, place: tuple[int, int] = (0, 0)) -> None:
        self.change, self.place = change, place

    def in_run(self, layer: int, run: int) -> Intervention:
        return _Changed(self.change, (layer, run))

    def new_values(self, values: Tensor, zeroed: Tensor) -> Tensor:
        return self.change(self.place, values, zeroed)


def value_patching(model: Any, tokenizer: Any, example: Example, *, together: bool = False) -> Patched:
    """What is lost if a token's value vector comes from the sentence whose cue has the other number.

    The weights of the attention stay those that the model computes. Each token is patched alone.

    The example has ``other_cue``, and its two sentences have equally many tokens. Row l patches the value in layer l
    only or, `together`, in layers 0 to l at once, for methods that join layers.

    Raises:
        BadExampleError: The example has no other cue, no two forms of one token each, or sentences of other lengths.
        RefusedError: See :class:`~captum_vz.ValueGates`.

    >>> from captum_vz.testbed import agreement_sentences, load_model
    >>> example = Example.from_record(agreement_sentences(1, paradigm="relational_noun")[0])
    >>> found = value_patching(*load_model(), example, together=True)
    >>> example.words[int(found.shares[-1].argmax()) - 1]
    'documentary'
    """
    return Pair.of_example(model, tokenizer, example).values(together)


def activation_patching(model: Any, tokenizer: Any, example: Example, *, together: bool = False) -> Patched:
    """What is lost if a token's state before a layer comes from the sentence whose cue has the other number.

    The state is the residual stream: what the layer is given at the token's place. Each token is patched alone. Row l
    patches the state before layer l. With `together`, each row patches the state before the first layer, for methods
    that join layers from there: the texts differ in the cue only, so the cue then has all of the truth.

    Raises:
        BadExampleError: See :func:`value_patching`.
        UnsupportedLayerError: A layer is not given states `(batch, tokens, d)`, or runs more than once.
    """
    return Pair.of_example(model, tokenizer, example).states(together)


class Pair:
    """Two texts of equally many tokens as inputs of a model. All patches share the clean passes.

    The answers are two entries of the logits at `target`: d is the logit of the first minus the logit of the second.
    """

    @torch.no_grad()
    def __init__(
        self, model: Any, layers: Sequence[nn.Module], texts: Texts, target: int, answers: tuple[int, int]
    ) -> None:
        self.model, self.layers, self.target, self.answers = model, list(layers), target, list(answers)
        self.inputs, self.other = texts
        self.tokens = self.inputs["input_ids"].shape[1]
        self._patched_layers = range(0)
        self.clean, self.clean_other = (self._difference(model(**one).logits) for one in texts)

    @classmethod
    def of_example(cls, model: Any, tokenizer: Any, example: Example) -> Pair:
        """An example and its counterpart."""
        options: dict[str, Any] = {"needs_forms": True, "until_target": predicts_next(model)}
        this, other = (encode(tokenizer, one, **options) for one in (example, counterpart(example)))
        if (len(this.ids), this.target) != (len(other.ids), other.target):
            raise BadExampleError(
                f"it has {len(this.ids)} tokens, and {len(other.ids)} with the other cue: patching needs as many"
            )
        assert this.forms is not None
        texts = (pad(tokenizer, [this], model.device), pad(tokenizer, [other], model.device))
        return cls(model, find_layers(model), texts, this.target, this.forms)

    @torch.no_grad()
    def values(self, together: bool, first: int = 0) -> Patched:
        """See :func:`value_patching`; from row `first` on."""
        alone, falls = 1 - torch.eye(self.tokens, device=self.model.device), []
        for last in range(len(self.layers))[first:]:
            self._patched_layers = range(0 if together else last, last + 1)
            falls.append(self._difference(self._gated(alone, self.inputs)))
        return self._patched(falls)

    @torch.no_grad()
    def states(self, together: bool) -> Patched:
        """See :func:`activation_patching`."""
        falls = self._state_falls
        return self._patched([falls[0]] * len(falls) if together else falls)

    @cached_property
    def _gated(self) -> ValueGates:
        """The model with the values of the other text, whose attentions are found once for all patches."""
        kept: dict[tuple[int, int], Tensor] = {}

        def read(place: tuple[int, int], values: Tensor, zeroed: Tensor) -> Tensor:
            kept[place] = values.detach()
            return values

        def other(place: tuple[int, int], values: Tensor, zeroed: Tensor) -> Tensor:
            patched = place[0] in self._patched_layers
            return torch.where(zeroed[..., None], kept[place], values) if patched else values

        zeros = torch.zeros(1, self.tokens, device=self.model.device)
        ValueGates(self.model, self.layers, intervention=_Changed(read))(zeros, self.other)
        return ValueGates(self.model, self.layers, intervention=_Changed(other))

    @cached_property
    def _state_falls(self) -> list[Tensor]:
        """The differences with the state of each token before each layer from the other text."""
        kept: list[Tensor] = []
        with ExitStack() as stack:
            for layer in self.layers:
                stack.enter_context(_before(layer, kept.append))
            self.model(**self.other)
        tokens, falls = self.tokens, list[Tensor]()
        copies = {name: x.expand(tokens, *x.shape[1:]) for name, x in self.inputs.items()}
        for layer, state in zip(self.layers, kept, strict=True):
            # In copy j of the text, the state of token j is the other text's.
            own = torch.eye(tokens, dtype=torch.bool, device=state.device)[..., None]
            swap: Any = partial(torch.where, own, state)
            with _before(layer, swap):
                falls.append(self._difference(self.model(**copies).logits))
        return falls

    def _difference(self, logits: Tensor) -> Tensor:
        """The logit of the right form minus the logit of the wrong form, `(batch,)`."""
        good, bad = logits[:, self.target, self.answers].double().cpu().unbind(-1)
        return good - bad

    def _patched(self, differences: Sequence[Tensor]) -> Patched:
        return Patched(self.clean - torch.stack(list(differences)), self.clean.item(), self.clean_other.item())


#: The truth of a pair, for joined layers or for each by itself: :meth:`Pair.values` or :meth:`Pair.states`.
Patching = Callable[[Pair, bool], Patched]


def counterpart(example: Example) -> Example:
    """The example with its cue in the other number. Target and forms stay."""
    if not example.other_cue or len(example.other_cue) != len(example.cue):
        raise BadExampleError(
            f"other_cue has {len(example.other_cue)} words, and the cue {len(example.cue)}: patching needs as many"
        )
    words, record = list(example.words), example.to_record()
    text, spans = record["masked"], record_spans(record)
    for place, word in sorted(zip(example.cue, example.other_cue, strict=True), reverse=True):
        start, end = spans[place]
        words[place], text = word, text[:start] + word + text[end:]
    return replace(example, words=tuple(words), text=text, other_cue=())


def _before(layer: nn.Module, change: Callable[[Tensor], Tensor | None]) -> RemovableHandle:
    """In a `with` block, what a layer is given goes through `change` first; None leaves it as it is."""
    runs: list[nn.Module] = []

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        states = args[0] if args else kwargs.get("hidden_states")
        if not isinstance(states, Tensor) or states.ndim != 3 or runs:
            raise UnsupportedLayerError(
                f"{type(layer).__name__} runs more than once, or is not given states (batch, tokens, d): pass layers "
                "of a text model that run once."
            )
        runs.append(module)
        new = change(states)
        if new is None:
            return None
        return ((new, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": new})

    return layer.register_forward_pre_hook(hook, with_kwargs=True)


def largest_is_right(truth: Tensor, scores: Tensor) -> Tensor:
    """Whether the largest score is on the token with the largest truth, `(rows,)`: 1 or 0; tied scores share the 1."""
    highest = scores == scores.max(-1, keepdim=True).values
    right = truth == truth.max(-1, keepdim=True).values
    found = (highest & right).sum(-1) / highest.sum(-1)
    return torch.where(truth.isnan().any(-1), float("nan"), found.double())
