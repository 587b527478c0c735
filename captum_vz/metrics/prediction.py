"""What a model predicts at one position of each sentence, asked again with some of the tokens removed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from captum_vz.metrics._rows import describe, flags

# The token id that takes a removed token's place, or "delete": the tokens after it move up.
Removal = int | Literal["delete"]


class Prediction:
    r"""The probability of a model's answer at one position of each sentence, with any tokens removed.

    .. math:: p(y \mid x) = \exp(o_y) \big/ \textstyle\sum_{y' \in Y} \exp(o_{y'})

    where o are the logits at `target` and Y the forms in question or the whole vocabulary. All that
    :func:`blank_out`, :func:`comprehensiveness` and :func:`sufficiency` have to know of a model and its sentences.

    Args:
        model: Called as `model(input_ids=..., attention_mask=...)`, without gradients; returns logits `(batch, tokens,
            vocabulary)`, or an object with such `logits`, as transformers' models do.
        ids: Token ids `(batch, tokens)`.
        target: Where the logits are read: a position for all sentences, or one for each. It is never removed.
        forms: The token ids among which the model chooses, `(forms,)` for all sentences or `(batch, forms)`, the right
            one first. None: the whole vocabulary.
        content: Booleans `(1 or batch, tokens)`: the tokens that may be removed, see :func:`content_tokens`. The
            target is left out of them in any case.
        removal: The id of the token that takes the place of removed ones (`tokenizer.unk_token_id`,
            `tokenizer.mask_token_id`), or "delete".
        attention_mask: 1 for tokens, 0 for padding, `(1 or batch, tokens)`. None: there is no padding.
        over: What the probabilities add up to 1 over: the "forms", or the "vocabulary".
        batch_size: How many sentences the model is given at once. The numbers are the same for any value.

    Raises:
        AssertionError: Shapes that do not fit, positions or ids out of range, forms of which two are the same, a model
            in train mode, logits of another shape or that are not finite.

    >>> from captum_vz.testbed import load_agreement_model
    >>> model, tokenizer = load_agreement_model()
    >>> inputs = tokenizer("the pictures of some hat [MASK] scaring marcus.", return_tensors="pt")
    >>> forms = tokenizer.convert_tokens_to_ids(["are", "is"])
    >>> content = content_tokens(inputs["input_ids"], [tokenizer.cls_token_id, tokenizer.sep_token_id])
    >>> prediction = Prediction(model, inputs["input_ids"], 6, forms, content, tokenizer.unk_token_id)
    >>> tokenizer.convert_ids_to_tokens(prediction.best())
    ['are']
    """

    def __init__(
        self,
        model: Callable[..., Any],
        ids: Tensor,
        target: int | Sequence[int] | Tensor,
        forms: Sequence[int] | Tensor | None,
        content: Tensor,
        removal: Removal,
        *,
        attention_mask: Tensor | None = None,
        over: Literal["forms", "vocabulary"] = "forms",
        batch_size: int = 64,
    ) -> None:
        assert not getattr(model, "training", False), "The model is in train mode: call model.eval() first."
        assert isinstance(ids, Tensor) and ids.ndim == 2 and ids.numel() and not ids.is_floating_point(), (
            f"ids is {describe(ids)}: pass token ids (batch, tokens)."
        )
        assert over in ("forms", "vocabulary"), f"over is {over!r}: pass 'forms' or 'vocabulary'."
        assert removal == "delete" or (isinstance(removal, int) and removal >= 0), (
            f"removal is {removal!r}: pass the id of the token that takes the place of removed ones, or 'delete'. "
            "A tokenizer whose unk_token_id or mask_token_id is None has no such token."
        )
        assert batch_size >= 1, f"batch_size is {batch_size!r}: pass at least 1."
        self.model = model
        self.ids = ids
        self.mask = torch.ones_like(ids) if attention_mask is None else _mask(attention_mask, ids)
        self.target = _positions(target, ids, self.mask)
        self.forms = None if forms is None else _forms(forms, ids)
        self.removal = removal
        self.over = "vocabulary" if forms is None else over
        self.batch_size = batch_size
        there = flags(content, ids.shape, "content") & self.mask.bool().cpu()
        self.content = there & (torch.arange(ids.shape[1]) != self.target.cpu()[:, None])

    def best(self) -> Tensor:
        """The most likely of the forms (or of the vocabulary) in the sentences as they are, token ids `(batch,)`."""
        answers = []
        for examples, at_target in self._logits(torch.arange(len(self.ids)), torch.zeros_like(self.content)):
            if self.forms is None:
                answers.append(at_target.argmax(-1))
            else:
                forms = self.forms[examples]
                answers.append(forms.gather(1, at_target.gather(1, forms).argmax(-1, keepdim=True))[:, 0])
        return torch.cat(answers)

    def probability(self, answer: Tensor, examples: Tensor | None = None, removed: Tensor | None = None) -> Tensor:
        """The probability of an answer in sentences without some of their tokens.

        Args:
            answer: Token ids `(batch,)`, one for each sentence.
            examples: `(n,)`, the numbers of the sentences to ask, each as often as wanted. None: all, once.
            removed: Booleans `(n, tokens)`, the tokens that are removed from them. None: none.

        Returns:
            `(n,)` in float64, on the CPU.
        """
        examples = torch.arange(len(self.ids)) if examples is None else examples
        removed = torch.zeros_like(self.content)[examples] if removed is None else removed
        assert not (removed & ~self.content[examples]).any(), (
            "removed names tokens that are not content: the target, padding and special tokens stay."
        )
        if len(examples) == 0:
            return torch.empty(0, dtype=torch.float64)
        answer = answer.to(self.ids.device)
        # Small shares of few tokens are often the same tokens: what is asked twice is run once.
        asked, again = torch.cat([examples[:, None], removed.long()], dim=1).unique(dim=0, return_inverse=True)
        found = []
        for chunk, at_target in self._logits(asked[:, 0], asked[:, 1:].bool()):
            candidates = at_target
            if self.over == "forms" and self.forms is not None:
                candidates = at_target.gather(1, self.forms[chunk])
            own = at_target.gather(1, answer[chunk][:, None])
            found.append((own - candidates.logsumexp(-1, keepdim=True)).exp()[:, 0].cpu())
        return torch.cat(found)[again]

    @torch.no_grad()
    def _logits(self, examples: Tensor, removed: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """For chunk after chunk, the numbers of its examples and their logits at the target, `(chunk, vocabulary)`."""
        device = self.ids.device
        most = 0 if self.forms is None else int(self.forms.max())
        for chunk, gone in zip(examples.split(self.batch_size), removed.split(self.batch_size), strict=True):
            chunk = chunk.to(device)
            ids, mask, target = _without(
                self.ids[chunk], self.mask[chunk], self.target[chunk], gone.to(device), self.removal
            )
            output = self.model(input_ids=ids, attention_mask=mask)
            logits = getattr(output, "logits", output)
            assert isinstance(logits, Tensor) and logits.ndim == 3 and logits.shape[:2] == ids.shape, (
                f"The model gave {describe(logits)} for ids {tuple(ids.shape)}: expected logits (batch, tokens, "
                "vocabulary), or an output that has them as `logits`."
            )
            assert most < logits.shape[2], (
                f"forms has the id {most}, but the model's vocabulary has the entries 0 to {logits.shape[2] - 1}."
            )
            at_target = logits[torch.arange(len(ids), device=device), target].double()
            assert not at_target.isnan().any(), "The model gave NaN for a logit at the target."
            yield chunk, at_target


def content_tokens(ids: Tensor, special_ids: Sequence[int | None]) -> Tensor:
    """The tokens of sentences that are no special tokens.

    Args:
        ids: Token ids, any shape.
        special_ids: The ids that are no content: those of CLS, SEP and padding. A None among them, for a token that a
            tokenizer does not have, is skipped. UNK stands for a word, and is content.

    Returns:
        Booleans of the same shape.

    >>> content_tokens(torch.tensor([[101, 7592, 102, 0]]), [101, 102, 0, None])
    tensor([[False,  True, False, False]])
    """
    known = [number for number in special_ids if number is not None]
    return ~torch.isin(ids, torch.tensor(known, dtype=ids.dtype, device=ids.device))


def _without(
    ids: Tensor, mask: Tensor, target: Tensor, gone: Tensor, removal: Removal
) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, mask and target of sentences without the tokens that are gone, cut to the longest of them."""
    if removal == "delete":
        order = gone.int().argsort(dim=-1, stable=True)  # what stays keeps its order, what is gone ends up as padding
        target = target - (gone.cumsum(-1).gather(1, target[:, None]))[:, 0]
        ids, mask = ids.gather(1, order), (mask * ~gone).gather(1, order)
    else:
        ids = ids.masked_fill(gone, removal)
    length = int(mask.any(0).nonzero().max()) + 1
    return ids[:, :length], mask[:, :length], target


def _mask(attention_mask: Tensor, ids: Tensor) -> Tensor:
    return flags(attention_mask, ids.shape, "attention_mask").to(ids)


def _positions(target: int | Sequence[int] | Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    batch, tokens = ids.shape
    positions = torch.as_tensor(target, device=ids.device).reshape(-1)
    integers = not positions.is_floating_point() and positions.dtype != torch.bool
    assert len(positions) in (1, batch) and integers, (
        f"target is {target!r}: pass a position, or one for each of the {batch} sentences."
    )
    positions = positions.long()  # small integers would wrap around where they are compared
    assert bool(((positions >= -tokens) & (positions < tokens)).all()), (
        f"target {target!r} is out of range: there are {tokens} tokens, positions {-tokens} to {tokens - 1}."
    )
    positions = (positions % tokens).expand(batch).contiguous()
    assert bool(mask.gather(1, positions[:, None]).all()), f"target {target!r} points at padding in a sentence."
    return positions


def _forms(forms: Sequence[int] | Tensor, ids: Tensor) -> Tensor:
    batch = len(ids)
    table = torch.as_tensor(forms, device=ids.device)
    integers = not table.is_floating_point() and table.dtype != torch.bool
    fits = integers and (table.ndim == 1 or (table.ndim == 2 and len(table) == batch))
    assert fits and table.numel(), (
        f"forms is {describe(table)}: pass token ids (forms,) for all sentences, or ({batch}, forms), the right one "
        "first."
    )
    table = table.long()
    assert (table >= 0).all(), f"forms has the id {int(table.min())}: pass token ids, which begin at 0."
    # Among forms that are the same, only rounding would choose.
    ordered = table.sort(-1).values
    twice = ordered[..., 1:][ordered[..., 1:] == ordered[..., :-1]]
    assert not len(twice), f"forms has the id {int(twice[0])} twice for one sentence: pass different ones."
    return table.expand(batch, -1)
