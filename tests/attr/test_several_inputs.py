"""Several inputs in a tuple: one tensor for each input, as Captum's input methods return."""

import pytest
import torch
from torch import Tensor
from transformers import BartConfig, BartModel

from captum_vz import ALTIPlus, ValueZeroingEffect, find_layers
from captum_vz.attr._base.several_inputs import by_input
from captum_vz.errors import ArgumentError

LAYERS = {"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
HEADS = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
IDS, LONGER, MASK = torch.tensor([[5, 6, 7]]), torch.tensor([[8, 9, 10, 11]]), torch.ones(1, 3, dtype=torch.long)
IMAGE, VECTORS = torch.rand(1, 3, 4, 4), torch.rand(1, 3, 2)


def bart() -> BartModel:
    torch.manual_seed(0)
    return BartModel(BartConfig(vocab_size=60, d_model=32, **LAYERS, **HEADS)).eval()


def test_mask_has_no_tokens_of_its_own() -> None:
    model, ids = bart(), torch.randint(5, 60, (2, 5))
    mask = torch.ones_like(ids)
    mask[1, 3:] = 0
    encoder = find_layers(model, "encoder")
    method = ValueZeroingEffect(lambda ids, mask: model.encoder(ids, mask).last_hidden_state[:, 0, 0], encoder)
    joint = method.attribute(ids, additional_forward_args=mask)
    scores, rest = method.attribute((ids, mask))
    torch.testing.assert_close(scores, joint)
    assert torch.equal(rest, torch.zeros(2, 5))


def test_encoder_and_decoder() -> None:
    """The encoder's tokens come from the first input, the decoder's from the second."""
    model = bart()
    source, target = torch.randint(5, 60, (2, 6)), torch.randint(5, 60, (2, 4))

    def forward(ids: Tensor, decoder_ids: Tensor) -> Tensor:
        return model(input_ids=ids, decoder_input_ids=decoder_ids).last_hidden_state

    def score(output: Tensor) -> Tensor:
        return output[:, -1, 0]

    decoder, encoder = find_layers(model, "decoder"), find_layers(model, "encoder")
    for own, layers, attention in ((0, encoder, "self"), (1, decoder, "self"), (0, decoder, "cross")):
        method = ValueZeroingEffect(forward, layers, attention=attention)
        found = method.attribute((source, target), score)
        torch.testing.assert_close(found[own], method.attribute(source, score, target))
        assert [one.shape for one in found] == [source.shape, target.shape] and not found[1 - own].any()
    for layers in ([*encoder, *decoder], decoder):
        joint = ALTIPlus(forward, layers).attribute(source, additional_forward_args=target)
        found = ALTIPlus(forward, layers).attribute((source, target))
        assert [tuple(one.shape) for one in found] == [(2, 4, 6), (2, 4, 4)]
        torch.testing.assert_close(torch.cat(found, 2), joint)


@pytest.mark.all_cases
@pytest.mark.parametrize(
    ("inputs", "count", "shapes"),
    [
        ((IDS, MASK), 3, [3, 3]),
        ((MASK, IDS, MASK), 5, [3, 5, 3]),  # with tokens of a prefix
        ((IMAGE, MASK.bool()), 4, [4, 3]),
        ((LONGER, IDS), 3, [4, 3]),
        ((IDS, MASK, torch.tensor([2])), 3, [3, 3, 0]),  # a place of each example
        ((VECTORS, LONGER), 3, [3, 4]),
        ((VECTORS, torch.zeros(1, 1, 3, 3)), 3, [3, 0]),  # a mask that is added
    ],
)
def test_shapes(inputs: tuple[Tensor, ...], count: int, shapes: list[int]) -> None:
    (found,) = by_input([torch.ones(1, 2, count)], inputs)
    assert [tuple(one.shape) for one in found] == [(1, 2, shape) for shape in shapes]
    assert sum(one.sum() for one in found) == 2 * count


@pytest.mark.all_cases
@pytest.mark.parametrize(
    ("inputs", "run"),
    [
        ((IDS, IMAGE), None),  # the patches of an image may be as many
        ((IDS, IDS + 1), None),
        ((IDS, VECTORS), None),
        ((LONGER, LONGER), None),  # joined
        ((IDS, LONGER), 1),
        ((IDS, IDS + 1), 2),
    ],
)
def test_unclear_tokens_are_refused(inputs: tuple[Tensor, ...], run: int | None) -> None:
    with pytest.raises(ArgumentError, match="as a mapping"):
        by_input([torch.ones(1, 3)], inputs, run)
