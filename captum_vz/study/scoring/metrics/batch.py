"""What metrics are given: a batch of examples, and copies of its model with random layers or moved embeddings."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

from captum_vz.errors import ArgumentError
from captum_vz.metrics import Bounds, MaskedSentences, Prediction, blank_out
from captum_vz.study.examples import Example
from captum_vz.study.examples.encoding import Encoded, pad
from captum_vz.study.scoring.rows import Row

#: What probabilities sum to 1 over.
Over = Literal["forms", "vocabulary"]

_REMOVALS: Final = ("unk", "mask", "delete")


class EvaluationBatch:
    """A batch of examples with what the metrics need: cues, content tokens, and the effects of blanking out.

    Attributes:
        method: The name of the method whose rows are evaluated.
        kept: What metrics of one method keep for the next method.

    Args:
        examples: The examples.
        rows: A row of scores of each example, with its `target`, its `cue` and its `content`.
        encoded: The examples as tokens, if the metrics run the model; otherwise empty.
        load: Gives the model and its tokenizer.
        content_only: Whether cue alignment is over the content tokens only.
        removal: The token in the place of a removed token, "unk" or "mask"; or "delete".
        score: Gives rows of scores: of a method by its name, for examples, with a changed copy of the model.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        rows: Sequence[Row],
        encoded: Sequence[Encoded],
        load: Callable[[], tuple[Any, Any]],
        content_only: bool,
        removal: str,
        score: Callable[[str, Sequence[Example], Any], Sequence[Row]],
    ) -> None:
        self.examples = examples
        self.encoded = encoded
        self.content_only = content_only
        self.removal = removal
        self.method = ""
        self.kept: dict[Any, Any] = {}
        self._rows = rows
        self._load = load
        self._score = score
        self._predictions: dict[str, Prediction] = {}
        self._effects: dict[tuple[str, str], Tensor] = {}
        self._bounds: dict[Any, Bounds] = {}

    @property
    def model(self) -> Any:
        """The model."""
        return self._load()[0]

    @property
    def tokenizer(self) -> Any:
        """Its tokenizer."""
        return self._load()[1]

    # Tensors are made at each use, so that a metric that changes them harms no other one.

    @property
    def inputs(self) -> dict[str, Tensor]:
        """The padded batch, on the model's device. Only for metrics that run the model."""
        return pad(self.tokenizer, self.encoded, self.model.device)

    def rows_of(self, changed: Any) -> Tensor:
        """The rows of the method for a changed copy of the model, `(rows, batch, tokens)`. NaN where there are none.

        Raises:
            ArgumentError: The method fails with this copy for all examples.
        """
        found: dict[str, list[Row]] = {example.id: [] for example in self.examples}
        rows = self._score(self.method, self.examples, changed)
        for row in rows:
            if row["skipped"] is None:
                found[row["example"]].append(row)
        if not any(found.values()):
            raise ArgumentError(f"{self.method} fails with a changed copy of the model: {rows[0]['skipped']}")
        return stacked(list(found.values()), torch.full(self.attended.shape, torch.nan))

    @property
    def targets(self) -> list[int]:
        """The position of each example's target."""
        return [row["target"] for row in self._rows]

    @property
    def cues(self) -> Tensor:
        """Which tokens are cues, booleans `(batch, tokens)`."""
        return self._at("cue")

    @property
    def content(self) -> Tensor:
        """Booleans `(batch, tokens)`: all except special tokens, padding and the target."""
        return self._at("content")

    @property
    def attended(self) -> Tensor:
        """Booleans `(batch, tokens)`: all except padding."""
        counts = torch.tensor([len(row["scores"]) for row in self._rows])
        return torch.arange(int(counts.max())) < counts[:, None]

    def _at(self, name: str) -> Tensor:
        """Booleans `(batch, tokens)`: the positions in a column of the rows."""
        found = torch.zeros_like(self.attended)
        for one, row in zip(found, self._rows, strict=True):
            one[list(row[name])] = True
        return found

    @property
    def prediction(self) -> Prediction:
        """The model's choice between the two forms, with tokens removed as the study says."""
        return self.prediction_of(self.removal)

    def prediction_of(self, removal: str, over: Over = "forms") -> Prediction:
        """The model's prediction, with tokens removed in this way. What it computes is kept for all metrics.

        Args:
            removal: "unk", "mask" or "delete".
            over: What the probabilities sum to 1 over: the two "forms", or the "vocabulary".
        """
        if removal not in self._predictions:
            self._predictions[removal] = Prediction(self.model, self._sentences, removal_of(self.tokenizer, removal))
        return self._predictions[removal].among(over)

    @cached_property
    def _sentences(self) -> MaskedSentences:
        inputs = self.inputs
        return MaskedSentences(
            ids=inputs["input_ids"],
            mask=inputs["attention_mask"],
            target=self.targets,
            content=self.content,
            forms=torch.tensor([one.forms for one in self.encoded]),
        )

    @property
    def effects(self) -> Tensor:
        """The effect of blanking out each token, `(batch, tokens)`."""
        return self.effects_of(self.removal)

    def effects_of(self, removal: str, over: Over = "forms") -> Tensor:
        """The effect of blanking out each token in this way, `(batch, tokens)`, see :meth:`prediction_of`."""
        if (removal, over) not in self._effects:
            self._effects[removal, over] = blank_out(self.prediction_of(removal, over))
        return self._effects[removal, over].clone()

    def bounds(self, of: Callable[[Prediction], Bounds]) -> Bounds:
        """What the best and the worst order of the tokens give, such as those of :func:`deletion_bounds`."""
        if of not in self._bounds:
            self._bounds[of] = of(self.prediction)
        return self._bounds[of]


def stacked(rows: Sequence[Sequence[Row]], missing: Tensor) -> Tensor:
    """Scores `(rows, batch, tokens)` of rows for each example, in float64.

    Args:
        rows: The rows of each example.
        missing: The scores of an example without rows, `(batch, tokens)`.
    """
    found = missing.double().expand(max(map(len, rows)), -1, -1).clone()
    for place, of_example in enumerate(rows):
        for number, row in enumerate(of_example):
            found[number, place] = 0
            found[number, place, : len(row["scores"])] = torch.tensor(row["scores"], dtype=torch.float64)
    return found


def check_removal(removal: str) -> None:
    """Check the name of a way to remove a token.

    Raises:
        ValueError: The name is unknown.
    """
    if removal not in _REMOVALS:
        raise ValueError(f"removal is {removal!r}: pass one of {', '.join(map(repr, _REMOVALS))}.")


def removal_of(tokenizer: Any, removal: str) -> int | Literal["delete"]:
    """The id in the place of a removed token, or "delete".

    Raises:
        ValueError: The name is unknown, or the tokenizer does not have the token.
    """
    check_removal(removal)
    if removal == "delete":
        return "delete"
    number = getattr(tokenizer, f"{removal}_token_id", None)
    if number is None:
        raise ValueError(f"removal is {removal!r}, but the tokenizer has no such token: pass 'delete'.")
    return int(number)


def randomized_copies(
    model: nn.Module, layers: Sequence[nn.Module], *, cascading: bool = True, seed: int = 0
) -> Iterator[tuple[int, nn.Module, list[nn.Module]]]:
    r"""Copies of a model with random layers.

    .. math:: W_{ij} \sim \mathcal N\big(\operatorname{mean}(W), \operatorname{std}(W)\big)

    for each parameter W of the random layers, for the sanity check of `Adebayo et al. 2018
    <https://arxiv.org/abs/1810.03292>`_. A method whose scores do not depend on these layers' weights gives the same
    scores for the copy. Embeddings and the head stay as they are.

    Args:
        model: The trained model, which is not changed.
        layers: Its layers, in the order in which they run.
        cascading: Whether layers become random from the last to the first, one more in each copy. Otherwise there is
            one copy, in which all are random.
        seed: The same seed gives the same copies. Layers that are random in two copies are the same in both.

    Yields:
        The number of random layers, the copy, and its layers.

    Raises:
        ArgumentError: A layer is not in the model, or there is none.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    >>> for count, random, layers in randomized_copies(model, list(model)):
    ...     print(count, [bool((one.weight == other.weight).all()) for one, other in zip(random, model)])
    1 [True, False]
    2 [False, False]
    """
    places = {id(module): name for name, module in model.named_modules()}
    missing = [type(layer).__name__ for layer in layers if id(layer) not in places]
    if missing or not layers:
        raise ArgumentError(f"layers is {missing or 'empty'}: pass layers of the model.")
    names = list(dict.fromkeys(places[id(layer)] for layer in layers))
    changed = copy.deepcopy(model)
    for count, name in enumerate(reversed(names), start=1):
        _randomize(changed.get_submodule(name), seed * len(names) + count)
        if cascading or count == len(names):
            yield count, changed, [changed.get_submodule(places[id(layer)]) for layer in layers]


@torch.no_grad()
def _randomize(layer: nn.Module, seed: int) -> None:
    """Replace the parameters of a layer by random numbers with the mean and standard deviation of each."""
    generator = torch.Generator().manual_seed(seed)
    for values in layer.parameters():
        drawn: Any = torch.randn(values.shape, generator=generator, dtype=torch.float64)
        spread = values.double().std(correction=0)
        values.copy_((values.double().mean() + spread * drawn.to(values.device)).to(values.dtype))


@torch.no_grad()
def moved_copies(model: Any, radius: float, samples: int, seed: int) -> Iterator[nn.Module]:
    """The model with each of the noises on its word embeddings, one copy that is changed in place.

    Raises:
        ArgumentError: See :func:`~captum_vz.study.sensitivity`.
    """
    if not radius > 0 or samples < 1:
        raise ArgumentError(f"radius is {radius} and samples {samples}: pass numbers above 0.")
    embedding = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    if not isinstance(embedding, nn.Embedding):
        raise ArgumentError(
            f"the word embeddings of {type(model).__name__} are {type(embedding).__name__}: pass a model of "
            "transformers whose `get_input_embeddings` returns an `nn.Embedding`."
        )
    changed, own = copy.deepcopy(model), copy.deepcopy(embedding)
    changed.set_input_embeddings(own)  # a matrix of its own, which no output layer shares
    clean = embedding.weight.double()
    for number in range(samples):
        generator = torch.Generator().manual_seed(seed * samples + number)
        noise: Any = 2 * torch.rand(clean.shape, generator=generator, dtype=torch.float64) - 1
        own.weight.copy_(clean + radius * clean.std(correction=0) * noise.to(clean.device))
        yield changed
