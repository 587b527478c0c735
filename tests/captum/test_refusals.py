"""Wrong calls are refused under ``python -O`` too, where assertions are not run."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = """
import torch
from captum_vz import *
from captum_vz.errors import RefusedError
from captum_vz.testbed import load_model

assert False, "assertions are on"
model, tokenizer = load_model()
ids = tokenizer("the pictures of some hat [MASK] scaring marcus.", return_tensors="pt")["input_ids"]
layers = find_layers(model)
logits = lambda ids: model(ids).logits
REFUSED = {
    "token=99": lambda: ValueZeroing(model, layers[0]).attribute(ids, token=99),
    "token=True": lambda: ValueZeroing(model, layers[0]).attribute(ids, token=True),
    "token of a batch of one": lambda: ValueZeroing(model, layers[0]).attribute(ids, token=[0, 1, 2]),
    "token and target": lambda: LayerAttention(model, layers[0]).attribute(ids, target=(0, 1), token=0),
    "a class": lambda: LayerAttention(lambda ids: model(ids).logits[:, 0], layers).attribute(ids, target=1),
    "a class out of range": lambda: LayerAttention(logits, layers).attribute(ids, target=(1, 10**6)),
    "an effect's class": lambda: ValueZeroingEffect(logits, layers).attribute(ids, target=(1, 10**6)),
    "an effect of several": lambda: ValueZeroingEffect(logits, layers).attribute(ids, target=1),
    "heads=[-1]": lambda: LayerAttention(model, layers[0], heads=[-1]).attribute(ids),
    "heads=[-1] of values": lambda: ValueZeroing(model, layers[0], heads=[-1]).attribute(ids),
    "reduce_heads": lambda: LayerAttention(model, layers[0], reduce_heads="median"),
    "residual=0.7": lambda: AttentionRollout(model, layers, residual=0.7).attribute(ids),
    "layers 0 and 2": lambda: ValueZeroingRollout(model, [layers[0], layers[2]]).attribute(ids),
    "layers backwards": lambda: ValueZeroingRollout(model, layers[::-1]).attribute(ids),
    "the same layer": lambda: ValueZeroing(model, [layers[0], layers[0]]).attribute(ids),
    "no layer": lambda: ValueZeroing(model, []).attribute(ids),
    "other_mixing": lambda: AttentionRollout(model, layers, other_mixing="maybe"),
    "distance": lambda: ValueZeroing(model, layers[0], distance="cos"),
    "distance of a wrong shape": lambda: ValueZeroing(model, layers[0], distance=lambda a, b: a).attribute(ids),
    "p=3": lambda: LayerALTI(model, layers[0], p=3),
    "include": lambda: LayerAttentionNorm(model, layers[0], include="all"),
    "probes": lambda: HiddenTokenAttribution(model, layers[0], probes=0),
    "perturbations": lambda: ValueZeroing(model, layers[0]).attribute(ids, perturbations_per_eval=0),
    "feature_mask": lambda: ValueZeroing(model, layers[0]).attribute(ids, feature_mask=ids[:, :2]),
    "layer input": lambda: ValueZeroing(model, layers[0]).attribute(ids, attribute_to_layer_input=True),
    "a mask of another shape": lambda: PositionAttribution().attribute(ids, attention_mask=ids[:, :2]),
    "target": lambda: LayerAttentionGradient(model, layers).attribute(ids, lambda out: out.logits),
    "attention": lambda: ValueZeroing(model, layers[0], attention="both").attribute(ids),
    "nan": lambda: ValueZeroing(model, layers[0], distance=lambda a, b: a[..., 0] * torch.nan).attribute(ids),
}
for name, call in REFUSED.items():
    try:
        call()
    except RefusedError as error:
        print("refused:", name)
    except Exception as error:
        print("WRONG ERROR:", name, type(error).__name__, error)
    else:
        print("TAKEN:", name)
"""


@pytest.mark.slow
def test_refusals_without_assertions() -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-O", "-c", SCRIPT], capture_output=True, text=True, env=environment, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == SCRIPT.count(": lambda: ")
    assert [line for line in lines if not line.startswith("refused: ")] == []


def test_assertions_narrow_types_only() -> None:
    """What a caller may do wrong is refused by an error that no option of Python switches off."""
    for path in (ROOT / "captum_vz").rglob("*.py"):
        nodes = ast.walk(ast.parse(path.read_text("utf-8")))
        checks = [ast.unparse(one.test) for one in nodes if isinstance(one, ast.Assert)]
        assert all("is not None" in one or one.startswith("isinstance(") for one in checks), (path.name, checks)
