"""The probability of a model's answer at one position of each sentence, with some of the tokens removed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from captum_vz._engine import HALF, keeps_examples_apart
from captum_vz._private import input_embeddings
from captum_vz.attr.token_attribution import mean_word_vector
from captum_vz.errors import ArgumentError, RefusedError
from captum_vz.metrics.agreement import describe, flags

# The token id in the place of a removed token; "mean": the mean of all word vectors; "delete": later tokens move up.
Removal = int | Literal["mean", "delete"]

# By how much a probability may differ between a sentence alone and in a batch, and that in half precision.
ROUNDING, IN_HALF = 1e-3, 0.05


class MaskedSentences:
    """A batch of sentences with one position each at which a model predicts a word.

    The arguments are kept as tensors that fit each other: `mask` and `content` `(batch, tokens)`, `target` `(batch,)`
    and, if there are some, `forms` `(batch, forms)`.

    Args:
        ids: Token ids `(batch, tokens)`.
        mask: 1 for tokens, 0 for padding, `(1 or batch, tokens)`. None: there is no padding.
        target: Where the logits are read: a position for all sentences, or one for each. The target is never removed.
        content: Booleans `(1 or batch, tokens)`: the tokens that may be removed, see :func:`content_tokens`. The
            target and padding are never removed.
        forms: The token ids among which the model chooses, `(forms,)` for all sentences or `(batch, forms)`, the right
            one first. None: the whole vocabulary.

    >>> MaskedSentences(ids=torch.tensor([[0, 7, 4, 1]]), mask=None, target=2, content=torch.ones(1, 4)).content
    tensor([[ True,  True, False,  True]])
    """

    def __init__(
        self,
        ids: Tensor,
        mask: Tensor | None,
        target: int | Sequence[int] | Tensor,
        content: Tensor,
        forms: Sequence[int] | Tensor | None = None,
    ) -> None:
        if not (isinstance(ids, Tensor) and ids.ndim == 2 and ids.numel() and not ids.is_floating_point()):
            raise ArgumentError(f"ids is {describe(ids)}: pass token ids (batch, tokens).")
        self.ids = ids
        self.mask = torch.ones_like(ids) if mask is None else flags(mask, ids.shape, "mask").to(ids)
        self.target = _positions(target, ids, self.mask)
        may_go = self.mask.bool().cpu() & (torch.arange(ids.shape[1]) != self.target.cpu()[:, None])
        self.content = flags(content, ids.shape, "content") & may_go
        self.forms = None if forms is None else _forms(forms, ids)

    @classmethod
    def of_text(cls, tokenizer: Any, text: str, *forms: str) -> MaskedSentences:
        """One sentence. Its one mask is the target, and all tokens but the special ones are content.

        The model chooses among the `forms`, as the vocabulary writes them, the right one first, or among all words.
        """
        inputs = tokenizer(text, return_tensors="pt")
        ids, numbers = inputs["input_ids"], tokenizer.convert_tokens_to_ids(list(forms))
        places = (ids[0] == tokenizer.mask_token_id).nonzero()[:, 0].tolist()
        if len(places) != 1:
            raise ArgumentError(f"text has {len(places)} mask tokens ({tokenizer.mask_token}): write exactly one.")
        known = dict(zip(forms, numbers, strict=True))
        unknown = [form for form, number in known.items() if number in (None, tokenizer.unk_token_id)]
        if unknown:
            raise ArgumentError(f"forms holds {', '.join(unknown)}, no token of the vocabulary: pass tokens.")
        content = content_tokens(ids, [tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.pad_token_id])
        return cls(ids, inputs["attention_mask"], places[0], content, numbers or None)


class Prediction:
    r"""The probability of a model's answer at one position of each sentence, with any tokens removed.

    .. math:: p(y \mid x) = \exp(o_y) \big/ \textstyle\sum_{y' \in Y} \exp(o_{y'})

    where o are the logits at the target and Y the forms or the whole vocabulary.

    Args:
        model: Called as `model(input_ids=..., attention_mask=...)`, without gradients. It returns logits `(batch,
            tokens, vocabulary)`, or an object with such `logits`, as transformers' models do.
        sentences: The sentences, with the position of the answer, and the forms among which the model chooses.
        removal: The id of the token that replaces removed tokens (`tokenizer.unk_token_id`,
            `tokenizer.mask_token_id`), or "mean": the mean of all word vectors, for models of transformers, which take
            `inputs_embeds`; or "delete". The unknown token of many causal models ends documents: pass "mean" for them.
        over: What the probabilities sum to 1 over: the "forms", or the "vocabulary".
        batch_size: The number of sentences in a batch. If the sentences of a batch affect each other (an early exit,
            experts of limited capacity), pass 1. Otherwise this is refused: a few sentences of each call are also run
            alone, except in models of transformers without experts.

    Raises:
        RefusedError: An argument is wrong. The model is in train mode. The logits have another shape or hold a NaN. A
            form is not in the vocabulary.

    >>> from captum_vz.testbed import load_model
    >>> model, tokenizer = load_model()
    >>> text = "the pictures of some hat [MASK] scaring marcus."
    >>> sentences = MaskedSentences.of_text(tokenizer, text, "are", "is")
    >>> prediction = Prediction(model, sentences, tokenizer.unk_token_id)
    >>> tokenizer.convert_ids_to_tokens(prediction.best())
    ['are']
    """

    def __init__(
        self,
        model: Callable[..., Any],
        sentences: MaskedSentences,
        removal: Removal,
        *,
        over: Literal["forms", "vocabulary"] = "forms",
        batch_size: int = 64,
    ) -> None:
        if getattr(model, "training", False):
            raise RefusedError("The model is in train mode: call model.eval() first.")
        if over not in ("forms", "vocabulary"):
            raise ArgumentError(f"over is {over!r}: pass 'forms' or 'vocabulary'.")
        if removal not in ("mean", "delete") and (not isinstance(removal, int) or removal < 0):
            raise ArgumentError(
                f"removal is {removal!r}: pass the id of the token in the place of removed ones, 'mean' or 'delete'. A "
                "tokenizer whose unk_token_id or mask_token_id is None has no such token."
            )
        if batch_size < 1:
            raise ArgumentError(f"batch_size is {batch_size!r}: pass at least 1.")
        self.model = model
        self.ids, self.mask, self.target = sentences.ids, sentences.mask, sentences.target
        self.content, self.forms = sentences.content, sentences.forms
        self.removal = removal
        self.over = "vocabulary" if self.forms is None else over
        self.batch_size = batch_size
        # Log-odds among the forms and log-probability, for each answer, sentence and set of removed tokens.
        self._known: dict[bytes, tuple[float, float]] = {}
        self._best: list[Tensor] = []  # at most one entry, shared with copies

    def among(self, over: Literal["forms", "vocabulary"]) -> Prediction:
        """The same with another `over`. Both know what the other has computed, so the model runs once."""
        found = copy(self)
        found.over = "vocabulary" if self.forms is None else over
        return found

    def best(self) -> Tensor:
        """The most likely form (or vocabulary entry) in the unchanged sentences, token ids `(batch,)`."""
        if not self._best:
            answers = []
            for examples, at_target in self._logits(torch.arange(len(self.ids)), torch.zeros_like(self.content)):
                forms = torch.arange(at_target.shape[1]) if self.forms is None else self.forms[examples]
                forms = forms.to(at_target.device).expand(len(at_target), -1)
                answers.append(forms.gather(1, at_target.gather(1, forms).argmax(-1, keepdim=True))[:, 0])
            self._best.append(torch.cat(answers))
        return self._best[0].clone()

    def probability(self, answer: Tensor, examples: Tensor | None = None, removed: Tensor | None = None) -> Tensor:
        """The probability of an answer in sentences without some of their tokens, `(n,)` in float64, on the CPU.

        The answer has a token id for each sentence, `(batch,)`. `examples`, `(n,)`, are the indices of sentences, which
        may repeat (None: all, once), and `removed`, booleans `(n, tokens)`, the tokens that are removed from them.
        """
        found = self.lead(answer, examples, removed)
        return found.exp() if self.over == "vocabulary" else found.sigmoid()

    def lead(self, answer: Tensor, examples: Tensor | None = None, removed: Tensor | None = None) -> Tensor:
        r"""The logarithm of the probability of an answer, or of its odds among forms.

        .. math:: \log p(y \mid x) \quad\text{or}\quad
            \log \frac{p(y \mid x)}{1 - p(y \mid x)} = o_y - \log \textstyle\sum_{y' \in Y \setminus y} \exp(o_{y'})

        With two forms, the log-odds are the difference of their log-probabilities. Unlike a probability, both are as
        steep where the model is sure. The arguments are those of :meth:`probability`.
        """
        examples = torch.arange(len(self.ids)) if examples is None else examples
        removed = torch.zeros_like(self.content)[examples] if removed is None else removed
        if (removed & ~self.content[examples]).any():
            raise ArgumentError("removed names tokens that are not content: pass content tokens only.")
        if len(examples) == 0:
            return torch.empty(0, dtype=torch.float64)
        answer = answer.cpu()
        # Small shares of few tokens are often the same tokens. The model is run once for each set, for all metrics.
        rows = torch.cat([answer[examples, None], examples[:, None], removed.long()], dim=1)
        keys = [row.tobytes() for row in rows.numpy()]
        missing = {key: place for place, key in enumerate(keys) if key not in self._known}
        if missing:
            asked = rows[list(missing.values())]
            found, dtype = self._logs(answer, asked, self.batch_size)
            self._check(found, answer, asked, IN_HALF if dtype in HALF else ROUNDING)
            self._known |= dict(zip(missing, found.tolist(), strict=True))
        column = int(self.over == "vocabulary")
        return torch.tensor([self._known[key][column] for key in keys], dtype=torch.float64)

    def _check(self, found: Tensor, answer: Tensor, asked: Tensor, rounding: float) -> None:
        """Run a few sentences alone as well, if sentences of a batch may affect each other."""
        if self.batch_size == 1 or len(asked) == 1 or keeps_examples_apart(self.model):
            return
        order = found[:, 0].argsort()
        checked = order[[0, len(order) // 2, -1]].unique()
        alone, together = self._logs(answer, asked[checked], 1)[0][:, 0].sigmoid(), found[checked, 0].sigmoid()
        if not ((alone - together).abs() <= rounding).all():
            raise RefusedError(
                f"The model gives the probabilities {alone.tolist()} for sentences alone, and {together.tolist()} in "
                f"batches of up to {self.batch_size}. So the sentences of a batch affect each other. Pass batch_size=1."
            )

    def _logs(self, answer: Tensor, asked: Tensor, batch_size: int) -> tuple[Tensor, torch.dtype]:
        """What :meth:`logs` returns for rows of an answer, an example and its removed tokens; the logits' type."""
        runs = list(self._logits(asked[:, 1], asked[:, 2:].bool(), batch_size))
        return torch.cat([self.logs(answer, *run) for run in runs]), runs[0][1].dtype

    def logs(self, answer: Tensor, examples: Tensor, logits: Tensor) -> Tensor:
        """The log-odds of the answers among the forms, and their log-probabilities, `(n, 2)`, from logits."""
        logits, chosen = logits.double(), answer.to(logits.device)[examples, None]
        own = logits.gather(1, chosen)[:, 0]
        every = torch.arange(logits.shape[1], device=logits.device)[None]
        forms = every.expand(len(logits), -1) if self.forms is None else self.forms[examples]
        rivals = logits.gather(1, forms).masked_fill(forms == chosen, -torch.inf).logsumexp(-1)
        return torch.stack([own - rivals, own - logits.logsumexp(-1)], dim=1).cpu()

    @torch.no_grad()
    def _logits(
        self, examples: Tensor, removed: Tensor, batch_size: int | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """For each chunk its examples and their logits at the target, `(chunk, vocabulary)`."""
        device, size = self.ids.device, batch_size or self.batch_size
        for chunk, out in zip(examples.to(device).split(size), removed.to(device).split(size), strict=True):
            ids, mask, target = _without(self.ids[chunk], self.mask[chunk], self.target[chunk], out, self.removal)
            inputs = {"input_ids": ids}
            if self.removal == "mean":
                gone = out[:, : ids.shape[1], None]
                inputs = {"inputs_embeds": torch.where(gone, self._mean, word_embedding(self.model)(ids))}
            yield chunk, self.at_target(inputs, mask, target)

    @cached_property
    def _mean(self) -> Tensor:
        """The mean of all word vectors, as the model's first layer is given them, `(d,)`."""
        return mean_word_vector(word_embedding(self.model), self.ids.device)

    def at_target(self, inputs: Mapping[str, Tensor], mask: Tensor, target: Tensor) -> Tensor:
        """The logits of the model at the targets, `(n, vocabulary)`, for ids or word vectors and their mask."""
        output = self.model(**inputs, attention_mask=mask)
        logits = getattr(output, "logits", output)
        if not (isinstance(logits, Tensor) and logits.ndim == 3 and logits.shape[:2] == mask.shape):
            raise RefusedError(
                f"The model's output is {describe(logits)} for ids {tuple(mask.shape)}: expected logits (batch, "
                "tokens, vocabulary), or an output that has them as `logits`."
            )
        most = 0 if self.forms is None else int(self.forms.max())
        if most >= logits.shape[2]:
            raise ArgumentError(
                f"forms has the id {most}, but the model's vocabulary has the entries 0 to {logits.shape[2] - 1}."
            )
        found = logits[torch.arange(len(mask), device=logits.device), target]
        if found.isnan().any():
            raise RefusedError("The model gave NaN for a logit at the target.")
        return found


def word_embedding(model: Any) -> Any:
    """The module that makes word vectors `(..., d)` of token ids, as the model's first layer is given them."""
    embeddings = input_embeddings(model)
    if embeddings is None:
        kind = type(model).__name__
        raise ArgumentError(f"The model is a {kind} without get_input_embeddings(): pass a model of transformers.")
    return embeddings


def content_tokens(ids: Tensor, special_ids: Sequence[int | None]) -> Tensor:
    """The tokens of sentences that are not special tokens.

    Args:
        ids: Token ids, any shape.
        special_ids: The ids of CLS, SEP and padding; None is skipped. UNK stands for a word, so it is content.

    Returns:
        Booleans of the same shape.
    """
    known = [number for number in special_ids if number is not None]
    return ~torch.isin(ids, torch.tensor(known, dtype=ids.dtype, device=ids.device))


def _without(
    ids: Tensor, mask: Tensor, target: Tensor, gone: Tensor, removal: Removal
) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, mask and target of sentences without the tokens in `gone`, cut to the longest sentence."""
    if removal == "delete":
        order = gone.int().argsort(dim=-1, stable=True)  # removed tokens become padding, the others keep their order
        target = target - (gone.cumsum(-1).gather(1, target[:, None]))[:, 0]
        ids, mask = ids.gather(1, order), (mask * ~gone).gather(1, order)
    elif removal != "mean":
        ids = ids.masked_fill(gone, removal)
    length = int(mask.any(0).nonzero().max()) + 1
    return ids[:, :length], mask[:, :length], target


def _positions(target: int | Sequence[int] | Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    batch, tokens = ids.shape
    positions = torch.as_tensor(target, device=ids.device).reshape(-1)
    if len(positions) not in (1, batch) or not _are_integers(positions):
        raise ArgumentError(f"target is {target!r}: pass a position, or one for each of the {batch} sentences.")
    positions = positions.long()  # small integers would wrap around where they are compared
    if not ((positions >= -tokens) & (positions < tokens)).all():
        raise ArgumentError(f"target {target!r} is out of range: pass positions from {-tokens} to {tokens - 1}.")
    positions = (positions % tokens).expand(batch).contiguous()
    if not mask.gather(1, positions[:, None]).all():
        raise ArgumentError(f"target {target!r} points at padding in a sentence: pass the position of a token.")
    return positions


def _forms(forms: Sequence[int] | Tensor, ids: Tensor) -> Tensor:
    batch = len(ids)
    table = torch.as_tensor(forms, device=ids.device)
    fits = table.ndim == 1 or (table.ndim == 2 and len(table) == batch)
    if not fits or not table.numel() or not _are_integers(table):
        raise ArgumentError(
            f"forms is {describe(table)}: pass token ids (forms,) or ({batch}, forms), the right one first."
        )
    table = table.long()
    if not (table >= 0).all():
        raise ArgumentError(f"forms has the id {int(table.min())}: pass token ids, which begin at 0.")
    if (table.sort(-1).values.diff(dim=-1) == 0).any():  # between equal forms, only rounding would decide
        raise ArgumentError(f"forms is {table.tolist()}, with one id twice for one sentence: pass different ones.")
    return table.expand(batch, -1)


def _are_integers(numbers: Tensor) -> bool:
    return not numbers.is_floating_point() and numbers.dtype != torch.bool
