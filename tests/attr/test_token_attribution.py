"""Captum's methods on tokens equal Captum by hand, in batches and inside no_grad, and leave the model unchanged."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from captum.attr import (
    DeepLift,
    FeatureAblation,
    GradientShap,
    InputXGradient,
    IntegratedGradients,
    LayerDeepLift,
    LayerFeatureAblation,
    LayerGradientShap,
    LayerGradientXActivation,
    LayerIntegratedGradients,
    Occlusion,
    Saliency,
)
from torch import Tensor, nn

from captum_vz import TokenAttribution, find_layers
from captum_vz.errors import ArgumentError
from captum_vz.testbed import load_model
from tests.captum.footprint import assert_same_numbers, footprint, numbers

MODEL, TOKENIZER = load_model()
MODEL.double()
SENTENCES = ["the pictures of some hat [MASK] scaring marcus.", "the hats [MASK] here."]
BATCH = TOKENIZER(SENTENCES, padding=True, return_tensors="pt")
IDS = BATCH["input_ids"]
PLACES = [row.tolist().index(TOKENIZER.mask_token_id) for row in IDS]
ARE, IS = TOKENIZER.convert_tokens_to_ids(["are", "is"])
ONE = TOKENIZER(SENTENCES[0], return_tensors="pt")

PLAIN = [IntegratedGradients, Saliency, InputXGradient, DeepLift, FeatureAblation]
LAYERED = [LayerIntegratedGradients, LayerGradientXActivation, LayerDeepLift, LayerFeatureAblation]
SAMPLED = [GradientShap, LayerGradientShap]
each_method = pytest.mark.parametrize("method", PLAIN + LAYERED + SAMPLED, ids=lambda method: method.__name__)


def explain(method: Any, inputs: Any = None, target: Any = ARE, position: Any = None, **options: Any) -> Tensor:
    layer = find_layers(MODEL)[1] if method in LAYERED or method is LayerGradientShap else None
    keywords = {key: options.pop(key) for key in ("reduce", "objective", "embeddings") if key in options}
    if "IntegratedGradients" in getattr(method, "__name__", ""):
        options.setdefault("n_steps", 8)
    position = PLACES if position is None and "objective" not in keywords else position
    if "foil" in options:
        options["foil"] = at(position, options["foil"])
    return TokenAttribution(MODEL, method, TOKENIZER, layer, **keywords).attribute(
        BATCH if inputs is None else inputs, target=at(position, target), **options
    )


def at(position: Any, target: Any) -> Any:
    """The index of a class at a position. Class and position may differ between examples."""
    if position is None or target is None:
        return target
    several = [value for value in (position, target) if not isinstance(value, int)]
    if not several:
        return position, target
    each = [
        [value] * len(several[0]) if isinstance(value, int) else [int(one) for one in value]
        for value in (position, target)
    ]
    return list(zip(*each, strict=True))


def word_embeddings(ids: Tensor) -> Tensor:
    return MODEL.get_input_embeddings()(ids).detach()


def logit_by_hand(embeddings: Tensor) -> Tensor:
    return MODEL(inputs_embeds=embeddings).logits[:, PLACES[0]]


def pad_baseline(ids: Tensor) -> Tensor:
    by_hand = torch.full_like(ids, TOKENIZER.pad_token_id)
    by_hand[:, 0], by_hand[:, -1] = TOKENIZER.cls_token_id, TOKENIZER.sep_token_id
    return word_embeddings(by_hand)


BY_HAND: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    IntegratedGradients: lambda x, base: IntegratedGradients(logit_by_hand).attribute(x, base, target=ARE, n_steps=8),
    Saliency: lambda x, base: Saliency(logit_by_hand).attribute(x, target=ARE),
    InputXGradient: lambda x, base: InputXGradient(logit_by_hand).attribute(x, target=ARE),
    LayerIntegratedGradients: lambda x, base: LayerIntegratedGradients(logit_by_hand, find_layers(MODEL)[1]).attribute(
        x, base, target=ARE, n_steps=8
    ),
    LayerGradientXActivation: lambda x, base: LayerGradientXActivation(logit_by_hand, find_layers(MODEL)[1]).attribute(
        x, target=ARE
    ),
}


@pytest.mark.parametrize("reduce", ["sum", "l1", "l2"])
@pytest.mark.parametrize("method", BY_HAND, ids=lambda method: method.__name__)
def test_captum_by_hand_gives_the_same(method: Any, reduce: Any) -> None:
    ids = ONE["input_ids"]
    attributions = BY_HAND[method](word_embeddings(ids).requires_grad_(), pad_baseline(ids)).detach()
    expected = {
        "sum": attributions.sum(-1),
        "l1": attributions.abs().sum(-1),
        "l2": attributions.square().sum(-1).sqrt(),
    }[reduce]
    scores = explain(method, ONE, position=PLACES[0], reduce=reduce)
    assert scores.shape == ids.shape
    assert not scores.requires_grad
    torch.testing.assert_close(scores, expected, rtol=1e-9, atol=1e-12)


def test_ablation_equals_the_logit_decrease() -> None:
    ids = ONE["input_ids"]
    x, base = word_embeddings(ids), pad_baseline(ids)
    with torch.no_grad():
        whole = logit_by_hand(x)[0, ARE]
        falls = []
        for j in range(ids.shape[1]):
            ablated = x.clone()
            ablated[0, j] = base[0, j]
            falls.append(whole - logit_by_hand(ablated)[0, ARE])
    scores = explain(FeatureAblation, ONE, position=PLACES[0])
    torch.testing.assert_close(scores[0], torch.stack(falls), rtol=1e-9, atol=1e-12)
    assert scores[0, 0] == scores[0, -1] == 0  # special tokens are their own baselines


def test_occlusion_of_single_tokens_is_ablation() -> None:
    ablated = explain(FeatureAblation).float()  # as Captum's Occlusion answers
    width = MODEL.config.hidden_size
    torch.testing.assert_close(explain(Occlusion, sliding_window_shapes=(1, width)), ablated)
    assert explain(Occlusion, sliding_window_shapes=(2, width)).shape == IDS.shape
    with pytest.raises(AssertionError, match="takes parts of"):
        explain(Occlusion, ONE, position=PLACES[0], sliding_window_shapes=(1, 64), strides=(1, 64))


@pytest.mark.parametrize("baselines", ["pad", "mask", "zero", "mean", 0, 0.5])
def test_integrated_gradients_are_complete(baselines: Any) -> None:
    """Scores sum to the logit difference minus the baseline's. The baseline keeps the special tokens."""
    scores = explain(IntegratedGradients, foil=IS, baselines=baselines, n_steps=32)
    kept = [TOKENIZER.cls_token_id, TOKENIZER.sep_token_id, TOKENIZER.pad_token_id]
    special = torch.isin(IDS, torch.tensor(kept))
    if baselines == "zero":
        base = word_embeddings(IDS) * special[..., None]
    elif baselines == "mean":
        every = word_embeddings(torch.arange(MODEL.config.vocab_size))
        base = word_embeddings(IDS).where(special[..., None], every.mean(0))
    elif isinstance(baselines, (int, float)):  # of all tokens
        base = torch.full_like(word_embeddings(IDS), baselines)
    else:
        blank = {"pad": TOKENIZER.pad_token_id, "mask": TOKENIZER.mask_token_id}[baselines]
        base = word_embeddings(torch.where(special, IDS, blank))
    with torch.no_grad():
        logits = [
            MODEL(inputs_embeds=x, attention_mask=BATCH["attention_mask"]).logits[[0, 1], PLACES]
            for x in (word_embeddings(IDS), base)
        ]
    gain = [one[:, ARE] - one[:, IS] for one in logits]
    torch.testing.assert_close(scores.sum(1), gain[0] - gain[1], rtol=1e-3, atol=1e-3)
    assert bool(scores[special].any()) == isinstance(baselines, (int, float))


def test_token_ids_are_baselines_too() -> None:
    ids = ONE["input_ids"]
    same = explain(IntegratedGradients, ONE, position=PLACES[0], baselines=ids)
    assert not same.any()
    blank = torch.full_like(ids, TOKENIZER.pad_token_id)
    blank[:, 0], blank[:, -1] = TOKENIZER.cls_token_id, TOKENIZER.sep_token_id
    by_ids = explain(IntegratedGradients, ONE, position=PLACES[0], baselines=blank)
    torch.testing.assert_close(by_ids, explain(IntegratedGradients, ONE, position=PLACES[0]))


@each_method
def test_padded_batch_equals_its_examples(method: Any) -> None:
    options = {"n_samples": 3} if method in SAMPLED else {}
    targets = torch.tensor([ARE, IS])
    seed(0)
    together = explain(method, target=targets, foil=torch.tensor([IS, ARE]), **options)
    seed(0)
    for b, (sentence, target, foil) in enumerate(zip(SENTENCES, (ARE, IS), (IS, ARE), strict=True)):
        alone = TOKENIZER(sentence, return_tensors="pt")
        length = alone["input_ids"].shape[1]
        scores = explain(method, alone, target=target, position=PLACES[b], foil=foil, **options)
        torch.testing.assert_close(together[b, :length], scores[0], rtol=1e-7, atol=1e-9)
        assert not together[b, length:].any()
        assert scores.any()


def seed(number: int) -> None:
    """Seed numpy, which GradientShap uses, and torch, which Captum's noise uses."""
    import numpy as np

    np.random.seed(number)
    torch.manual_seed(number)


@each_method
def test_no_grad_and_unchanged_model(method: Any) -> None:
    before, weights = footprint(MODEL), numbers(MODEL)
    seed(0)
    with_grad = explain(method)
    seed(0)
    with torch.no_grad():
        without = explain(method)
        assert not torch.is_grad_enabled()
    torch.testing.assert_close(without, with_grad, rtol=0, atol=0)
    assert footprint(MODEL) == before
    assert_same_numbers(MODEL, weights)
    assert all(parameter.grad is None for parameter in MODEL.parameters())


def test_an_objective_reads_the_output_itself() -> None:
    def difference(output: Any) -> Tensor:
        at_mask = output.logits[:, PLACES[0]]
        return at_mask[:, ARE] - at_mask[:, IS]

    scores = explain(IntegratedGradients, ONE, target=None, objective=difference)
    torch.testing.assert_close(scores, explain(IntegratedGradients, ONE, position=PLACES[0], foil=IS))
    at_target = explain(Saliency, ONE, target=ARE, objective=lambda output: output.logits[:, PLACES[0]])
    torch.testing.assert_close(at_target, explain(Saliency, ONE, position=PLACES[0]))


def test_method_with_its_own_options() -> None:
    local = explain(partial(IntegratedGradients, multiply_by_inputs=False), ONE, position=PLACES[0], baselines="zero")
    x = word_embeddings(ONE["input_ids"]).requires_grad_()
    base = torch.zeros_like(x)
    base[:, 0], base[:, -1] = x[:, 0].detach(), x[:, -1].detach()
    by_hand = IntegratedGradients(logit_by_hand, multiply_by_inputs=False).attribute(x, base, target=ARE)
    torch.testing.assert_close(local, by_hand.detach().sum(-1))


class Bag(nn.Module):
    """Class logits from a sum over tokens, so that scores have a closed form."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 4)
        self.inner, self.activation, self.outer = nn.Linear(4, 5), activation, nn.Linear(5, 3)

    def get_input_embeddings(self) -> nn.Module:
        return self.words

    def forward(self, input_ids: Tensor | None = None, inputs_embeds: Tensor | None = None) -> Tensor:
        x = self.words(input_ids) if inputs_embeds is None else inputs_embeds
        return self.outer(self.activation(self.inner(x)).sum(1))


TINY = SimpleNamespace(cls_token_id=0, sep_token_id=1, pad_token_id=2, mask_token_id=None)
TINY_IDS = torch.tensor([[0, 5, 6, 7, 1], [0, 8, 8, 9, 1]])


@pytest.mark.parametrize("method", [IntegratedGradients, DeepLift, FeatureAblation, InputXGradient])
def test_baseline_methods_agree_on_linear_model(method: Any) -> None:
    model = Bag(nn.Identity()).double().eval()
    weights = model.outer.weight @ model.inner.weight  # (classes, d)
    expected = torch.zeros(2, 5, dtype=torch.float64)
    for b in range(2):
        for j in range(5):
            special = TINY_IDS[b, j] in (0, 1)
            if method is InputXGradient:
                base = torch.zeros(4, dtype=torch.float64)
            else:
                base = model.words.weight[TINY_IDS[b, j] if special else 2]
            expected[b, j] = weights[b + 1] @ (model.words.weight[TINY_IDS[b, j]] - base)
    scores = TokenAttribution(model, method, TINY).attribute(TINY_IDS, target=[1, 2])
    torch.testing.assert_close(scores, expected.detach())


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"inputs": torch.zeros(1, 3)}, "token ids in inputs"),
    ({"inputs": {"attention_mask": IDS}}, "token ids in inputs"),
    ({"baselines": "blank"}, "is 'blank'"),
    ({"baselines": True}, "baselines is True"),
    ({"baselines": IDS[:, :2]}, r"is \(2, 2\) of"),
    ({"objective": lambda output: output.logits, "foil": 1}, "so foil has no"),
    ({"return_convergence_delta": True}, "Leave return_conv"),
]
WRONG_TARGETS: list[tuple[Any, Any, str]] = [
    ([(6, ARE)] * 3, None, "target has 3"),
    ((11, ARE), None, "range in axis 1"),
    ((6, 10**6), None, "range in axis 2"),
    ((True, ARE), None, "not index an output"),
    ((6, ARE), (6, 0.5), r"foil is \(6, 0.5\)"),
    ((6, ARE), (6, 10**6), r"foil is \(6, 1000"),
    ((6, ARE), 6, r"foil is (6|\(6,\))"),
    (ARE, None, "is out of range"),
    (6, None, r"\(6,\) picks"),
    (None, None, r"target None picks"),
]


def test_bad_arguments_are_refused() -> None:
    for options, message in WRONG:
        with pytest.raises(AssertionError, match=message):
            explain(IntegratedGradients, **options)
    for target, foil, message in WRONG_TARGETS:
        for method in (Saliency, GradientShap):
            with pytest.raises(ArgumentError, match=message):
                TokenAttribution(MODEL, method, TOKENIZER).attribute(BATCH, target=target, foil=foil)
    with torch.inference_mode(), pytest.raises(AssertionError, match="inference_mode"):
        explain(Saliency)


def test_unexpected_models_are_refused() -> None:
    bag, broken = Bag(nn.ReLU()).eval(), Bag(nn.ReLU()).eval()
    with torch.no_grad():
        next(broken.parameters()).fill_(torch.nan)
    for model, method, options, message in (
        (bag, Saliency, {"target": (1, 0)}, r"output \(2, 3\)"),
        (bag, IntegratedGradients, {"baselines": "mask"}, "has no mask token"),
        (lambda **named: bag(**named), Saliency, {}, "function without"),
        (broken, Saliency, {}, "are not finite"),
        (Bag(nn.ReLU()), Saliency, {}, "in train mode"),
    ):
        with pytest.raises(AssertionError, match=message):
            TokenAttribution(model, method, TINY).attribute(TINY_IDS, **{"target": 0, **options})
    with pytest.raises(ArgumentError, match="without logits"):
        TokenAttribution(lambda **x: (bag(**x),), Saliency, TINY, embeddings=bag.words).attribute(TINY_IDS, target=0)


def test_different_output_for_embeddings_is_refused() -> None:
    class Positions(Bag):
        """Counts padding from the ids, which it does not see beside embeddings."""

        def forward(self, input_ids: Tensor | None = None, inputs_embeds: Tensor | None = None) -> Tensor:
            return super().forward(input_ids, inputs_embeds) + (0 if input_ids is None else input_ids.sum())

    with pytest.raises(AssertionError, match="for inputs_embeds"):
        TokenAttribution(Positions(nn.ReLU()).eval(), Saliency, TINY).attribute(TINY_IDS, target=0)


PAIRS = [
    (LayerIntegratedGradients, IntegratedGradients),
    (LayerGradientXActivation, InputXGradient),
    (LayerDeepLift, DeepLift),
    (LayerFeatureAblation, FeatureAblation),
]


@pytest.mark.parametrize(("of_layer", "plain"), PAIRS)
def test_the_word_embedding_as_layer(of_layer: Any, plain: Any) -> None:
    words = MODEL.get_input_embeddings()
    found, expected = (
        TokenAttribution(MODEL, method, TOKENIZER, layer).attribute(BATCH, target=at(PLACES, ARE), foil=at(PLACES, IS))
        for method, layer in ((of_layer, words), (plain, None))
    )
    torch.testing.assert_close(found, expected)
    assert not words._forward_hooks
