"""Blank-out and ERASER against sentences edited by hand and models with known answers."""

from collections.abc import Callable
from fractions import Fraction
from math import ceil
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from captum_vz.errors import RefusedError
from captum_vz.metrics import MaskedSentences, Prediction, blank_out, comprehensiveness, faithfulness, sufficiency
from captum_vz.testbed import load_model

# Models of a few lines with answers that can be computed by hand, and sentences for them.

CLS, SEP, PAD, UNK, MASK = 0, 1, 2, 3, 4
GOOD, BAD = 5, 6

# Two sentences, the second one padded. The target is at MASK.
IDS = torch.tensor([[CLS, 10, 11, MASK, 12, 13, SEP], [CLS, MASK, 14, 15, SEP, PAD, PAD]])
ATTENDED = (IDS != PAD).long()
TARGET = [3, 1]
CONTENT = torch.tensor([[0, 1, 1, 0, 1, 1, 0], [0, 0, 1, 1, 0, 0, 0]]).bool()

# What each token adds to the logit of GOOD at any position; nothing else adds to any logit.
WEIGHTS = torch.zeros(16, dtype=torch.float64)
WEIGHTS[10:] = torch.tensor([0.5, -1.0, 2.0, 0.25, 1.5, -0.75])


def additive(input_ids: Tensor, attention_mask: Tensor) -> SimpleNamespace:
    """GOOD's logit is the sum of the weights of the tokens that are there."""
    logits = torch.zeros(*input_ids.shape, 16, dtype=torch.float64)
    logits[..., GOOD] = (WEIGHTS[input_ids] * attention_mask).sum(-1, keepdim=True)
    return SimpleNamespace(logits=logits)


def sigmoid(x: float) -> float:
    return 1 / (1 + torch.tensor(-x, dtype=torch.float64).exp().item())


REMOVALS = [UNK, MASK, "delete"]


def sentences(**changed: Any) -> MaskedSentences:
    fields = {"ids": IDS, "mask": ATTENDED, "target": TARGET, "content": CONTENT, "forms": [GOOD, BAD]}
    return MaskedSentences(**fields | changed)


def toy(removal: Any = UNK, **options: Any) -> Prediction:
    return Prediction(additive, sentences(), removal, **options)


def of_text(*given: str) -> MaskedSentences:
    return MaskedSentences.of_text(load_model()[1], *given)


@pytest.mark.parametrize("removal", REMOVALS)
def test_blank_out_of_linear_model(removal: Any) -> None:
    """Removing a token subtracts its weight from the difference of the logits."""
    expected = torch.zeros(IDS.shape, dtype=torch.float64)
    for b, j in CONTENT.nonzero().tolist():
        expected[b, j] = WEIGHTS[IDS[b, j]]
    torch.testing.assert_close(blank_out(toy(removal)), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("removal", REMOVALS)
def test_sentences_that_decide_together(removal: Any) -> None:
    """One logit is divided by the largest of the batch, so a sentence alone has the logit 1 or -1."""

    def together(input_ids: Tensor, attention_mask: Tensor) -> SimpleNamespace:
        logits = additive(input_ids, attention_mask).logits
        return SimpleNamespace(logits=logits / logits.abs().max())

    with pytest.raises(RefusedError, match="Pass batch_size=1"):
        blank_out(Prediction(together, sentences(), removal))
    effects = blank_out(Prediction(together, sentences(), removal, batch_size=1))
    for b, j in CONTENT.nonzero().tolist():
        total = WEIGHTS[IDS[b]].sum().item()
        left = total - WEIGHTS[IDS[b, j]].item()
        expected = total / abs(total) - left / abs(left)
        assert effects[b, j].item() == pytest.approx(expected, abs=1e-12)


def test_prediction_explained_without_forms() -> None:
    own = Prediction(additive, sentences(forms=None), UNK)
    assert own.best().tolist() == [GOOD, GOOD]
    effects = blank_out(toy(over="vocabulary"))
    torch.testing.assert_close(blank_out(own), effects)
    total = WEIGHTS[IDS[0]].sum()
    for j in CONTENT[0].nonzero()[:, 0]:
        before, after = (one - (one.exp() + 15).log() for one in (total, total - WEIGHTS[IDS[0, j]]))
        assert effects[0, j].item() == pytest.approx((before - after).item(), abs=1e-12)


@pytest.mark.parametrize("removal", REMOVALS)
def test_target_specials_and_padding_stay(removal: Any) -> None:
    seen: list[tuple[list[int], int]] = []

    def watch(input_ids: Tensor, attention_mask: Tensor) -> SimpleNamespace:
        seen.extend(
            (row[there.bool()].tolist(), len(row)) for row, there in zip(input_ids, attention_mask, strict=True)
        )
        return additive(input_ids, attention_mask)

    everything = Prediction(watch, sentences(content=CONTENT | (IDS == MASK)), removal)
    blank_out(everything)
    sufficiency(everything, WEIGHTS[IDS])
    assert all(row[0] == 0 and row[-1] == 1 and MASK in row for row, _ in seen)
    kinds = {tuple(row) for row, _ in seen}
    gone = [] if removal == "delete" else [removal]
    assert (0, *gone, 11, MASK, 12, 13, 1) in kinds
    assert (0, MASK, *gone, 15, 1) in kinds


def test_logits_read_at_moved_target() -> None:
    def echo(input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """GOOD is likely at the mask and nowhere else."""
        logits = torch.zeros(*input_ids.shape, 16, dtype=torch.float64)
        logits[..., GOOD] = (input_ids == MASK).double() * 5
        return logits

    moved = Prediction(echo, sentences(), "delete")
    assert not blank_out(moved).any()
    everything = moved.probability(torch.tensor([GOOD, GOOD]), removed=CONTENT)
    torch.testing.assert_close(everything, torch.full((2,), sigmoid(5.0), dtype=torch.float64))


def test_eraser_explains_the_prediction_and_keeps_order() -> None:
    wrong_way = Prediction(additive, sentences(forms=[BAD, GOOD]), UNK)
    scores = torch.rand(IDS.shape)
    torch.testing.assert_close(comprehensiveness(wrong_way, scores), comprehensiveness(toy(), scores))
    torch.testing.assert_close(blank_out(wrong_way), -blank_out(toy()))
    scores = torch.tensor([[0.0, 1, 1, 0, 1, 0, 0], [0, 0, 1, 0, 0, 0, 0]])
    first = torch.tensor([[0.0, 9, 1, 0, 1, 0, 0], [0, 0, 1, 0, 0, 0, 0]])
    torch.testing.assert_close(comprehensiveness(toy(), scores), comprehensiveness(toy(), first))
    for count in range(1, 101):
        exact = [ceil(Fraction(str(q)) * count) for q in faithfulness.FRACTIONS]
        assert faithfulness._sizes(torch.tensor([count])).tolist() == [exact]


def test_constant_scores_are_nan() -> None:
    constant = torch.ones(IDS.shape)
    constant[1, 2] = 2
    for measure in (comprehensiveness, sufficiency):
        assert measure(toy(), constant).isnan().any(1).tolist() == [True, False]
        assert measure(toy(), constant.masked_fill(IDS == 14, torch.nan)).isnan().all()
    single = Prediction(additive, sentences(content=IDS == 14), UNK)
    assert comprehensiveness(single, constant).isnan().any(1).tolist() == [True, False]  # no content, and one token
    bare = Prediction(additive, sentences(content=CONTENT & False), UNK)
    assert not blank_out(bare).any()
    with pytest.raises(RefusedError, match="content tokens only"):
        toy().probability(torch.tensor([GOOD, GOOD]), removed=torch.ones_like(CONTENT))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sentences(ids=torch.zeros(2, 7)), r"ids is \(2, 7\) of"),
        (lambda: sentences(target=7), "7 is out of range"),
        (lambda: sentences(target=6), "points at padding"),
        (lambda: sentences(target=True), "target is True"),
        (lambda: sentences(target=[0, 1, 2]), r"is \[0, 1, 2\]"),
        (lambda: sentences(forms=torch.zeros(3, 2).long()), r"forms is \(3, 2\)"),
        (lambda: sentences(forms=[-1, GOOD]), "forms has the id -1"),
        (lambda: sentences(forms=torch.tensor([[GOOD, BAD], [BAD, BAD]])), "with one id twice"),
        (lambda: sentences(content=CONTENT[:, :3]), r"content is \(2, 3\)"),
        (lambda: toy(None), "removal is None"),
        (lambda: toy(over="pair"), "over is 'pair'"),
        (lambda: toy(batch_size=0), "batch_size is 0"),
        (lambda: Prediction(torch.nn.Linear(1, 1), sentences(), UNK), "train mode: call"),
        (lambda: of_text("the pictures", "are"), "has 0 mask tokens"),
        (lambda: of_text("the [MASK]", "are", "unheardof"), "holds unheardof"),
    ],
)
def test_bad_arguments_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(RefusedError, match=message):
        call()


def test_bad_logits_refused() -> None:
    for logits, message in ((torch.zeros(2, 16), r"output is \(2, 16"), (torch.full((2, 7, 16), torch.nan), "NaN for")):
        with pytest.raises(RefusedError, match=message):
            Prediction(lambda logits=logits, **given: logits, sentences(), UNK).best()
    beyond = Prediction(additive, sentences(forms=[GOOD, 999]), UNK)
    with pytest.raises(RefusedError, match="has the id 999"):
        beyond.best()


def test_sentence_of_a_text() -> None:
    tokenizer = load_model()[1]
    text = "the pictures of some hat [MASK] scaring marcus."
    inputs = tokenizer(text, return_tensors="pt")
    found = of_text(text, "are", "is")
    assert torch.equal(found.ids, inputs["input_ids"])
    assert found.target.tolist() == [inputs.tokens().index("[MASK]")]
    assert found.content[0].tolist() == [token not in ("[CLS]", "[SEP]", "[MASK]") for token in inputs.tokens()]
    assert found.forms is not None
    assert tokenizer.convert_ids_to_tokens(found.forms[0].tolist()) == ["are", "is"]
    assert of_text(text).forms is None
