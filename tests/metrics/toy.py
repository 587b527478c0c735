"""Models of a few lines with answers that can be computed by hand, and sentences for them."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

CLS, SEP, PAD, UNK, MASK = 0, 1, 2, 3, 4
GOOD, BAD = 5, 6
SPECIAL = [CLS, SEP, PAD]

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
