"""Home-made layers that break an assumption each: their maps are right, or they are refused."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from captum_vz import ValueZeroing
from captum_vz._private import tree_leaves
from captum_vz.errors import RefusedError
from tests.engine.assumptions import ATTENTIONS, CHANGES, ENDS, HOOKS, LAYERS
from tests.engine.blocks import sequences, zeroed_in_its_batch, zeroed_one_by_one
from tests.engine.compare import assert_same
from tests.engine.parameters import quick

pytestmark = pytest.mark.all_cases  # each is another layer

# What no replay can reproduce. All other layers have a map.
RANDOM = {"noise of torch", "noise of Python", "noise of numpy", "noise of its own", "dropout in eval mode"}
# One scale before the attention: replays take weights and values of the clean run, whose draw the map is of.
SCALES = {"noise of its own", "noise of Python", "noise of numpy"}
OF_ALL_CALLS = {"scaled by the number of calls"}
# Examples depend on each other, so the map is that of the batch.
OF_ALL_EXAMPLES = {"largest entry of all", "examples mixed", "examples reversed", "batch norm in train mode"}
REFUSED = {
    *(f"{place}: {name}" for place in ("added", "after", "the context", "end") for name in RANDOM | OF_ALL_CALLS),
    *(f"before: {name}" for name in RANDOM - SCALES),
    *(f"returns {name}" for name in ("nothing", "one vector", "tokens first", "another axis", "not finite")),
    *(f"attention: {name}" for name in ("over features", "half of the heads", "values added", "five axes")),
    "attention: dropout in eval mode",
    # A softmax over tokens is taken for the one of a linear attention, although the layer adds no attention here.
    "added: shares of tokens",
}

# The layers that only their graph of gradients shows to be wrong, and changes after the attention.
FAST = ["attention: half of the heads", "attention: values added", "added: shares of tokens"]
FAST += [name for name in LAYERS if name.startswith("after")]


class Twin(nn.Module):
    """A copy of a layer, whose state and input are the same in every run. It returns the first tensor."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = copy.deepcopy(layer)
        self.calls, self.state = self.layer.calls, self.layer.own.getstate()

    def forward(self, x: Tensor) -> Tensor:
        self.layer.calls = self.calls
        self.layer.own.setstate(self.state)
        random.seed(0), np.random.seed(0)  # the draw of the clean run
        first: Tensor = tree_leaves(self.layer(x.clone()))[0]
        return first


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", quick(LAYERS, *FAST))
def test_right_or_refused(name: str) -> None:
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    layer, x = LAYERS[name](), sequences(2)
    twin = Twin(layer)
    given = x.clone()
    if name in REFUSED:
        with pytest.raises(RefusedError):
            ValueZeroing(layer, layer).attribute(given)
        return
    scores = ValueZeroing(layer, layer).attribute(given)
    twin_of = zeroed_in_its_batch if name.partition(": ")[2] in OF_ALL_EXAMPLES else zeroed_one_by_one
    expected = twin_of(twin, x, value="layer.attention.value")
    if name == "before: tokens reversed":
        expected = expected.flip(-1)  # columns are the layer's tokens, not the attention's
    assert_same(scores, expected.nan_to_num(0))


def test_table_is_large_and_names_what_it_refuses() -> None:
    assert set(LAYERS) >= REFUSED
    assert len(CHANGES) + len(ENDS) + len(ATTENTIONS) + len(HOOKS) >= 80
