"""A part of the sweep: each replay, each kind of attention, refusals, and long sentences."""

from __future__ import annotations

import pytest
import transformers
from packaging.version import Version

from tests.reference.case import BEFORE_5
from tests.sweep.exceptions import RELEASED
from tests.sweep.model_type import sweep_type

PACKED = {"packed pairs"}
DEFINITION = {"definition"}
WINDOWS = {"definition, windows"}
# From this version on, GPT-J and CodeGen call transformers' AttentionInterface.
SINCE_5_24 = Version(transformers.__version__) >= Version("5.24")

# The main families: model type -> how its layers are replayed.
MAIN = {
    "albert": PACKED,  # a norm and the residual inside the attention module
    "bart": PACKED,
    "bert": PACKED,
    "bloom": DEFINITION,
    "deberta": DEFINITION,
    "gpt2": PACKED,
    "llama": PACKED,
    "qwen2_5_vl_vision": WINDOWS,  # images in one sequence, no batch axis
    "qwen3_moe": PACKED,
    "t5": PACKED,
    "vit": PACKED,
    "vitdet": WINDOWS,  # features come before the grid
}

# Other families, in the same form.
OTHER = {
    "afmoe": PACKED,  # a gate inside the attention module
    "big_bird": DEFINITION,
    "bitnet": PACKED,
    "blip": DEFINITION,
    "bros": DEFINITION,  # distances of pairs; the batch is a later axis
    "clip": PACKED,  # two towers
    "codegen": PACKED if SINCE_5_24 else DEFINITION,
    "cpmant": DEFINITION,
    "deberta-v2": DEFINITION,
    "deepseek_v3": PACKED,  # latent attention, experts
    "deepseek_v32": PACKED,  # sparse attention: tokens that do not see themselves
    "diffllama": DEFINITION,  # values in two halves
    "falcon": DEFINITION,
    "fsmt": DEFINITION,  # tokens before examples
    "funnel": DEFINITION,  # fewer targets than sources
    "gemma3n_text": PACKED,  # four vectors for each token; values of a lower layer
    "gemma4_text": PACKED,  # values of a lower layer; a second stream of states
    "glm5_next_text": PACKED,  # four vectors for each token, after the axis of tokens
    "gpt_neo": DEFINITION,
    "gpt_oss": PACKED,  # sinks
    "gptj": PACKED if SINCE_5_24 else DEFINITION,
    "granite_swa": PACKED,  # weights that are scaled after the softmax
    "hy_v4": DEFINITION,  # four vectors for each token
    "ibert": DEFINITION,  # each tensor comes with a scale
    "imagegpt": DEFINITION,
    "jetmoe": PACKED,
    "jamba": PACKED,  # one of two layers has attention
    "led": DEFINITION,
    "llama4": PACKED,  # text and vision layers have different attention functions
    "longformer": DEFINITION,  # its own windows; tokens before examples in its attention
    "longcat_flash": DEFINITION | PACKED,  # two self-attentions, named
    "longt5": DEFINITION | PACKED,  # blocks in the encoder
    "luke": DEFINITION,
    "m2m_100": PACKED,
    "marian": PACKED,
    "markuplm": PACKED,
    "mbart": PACKED,
    "moonshine": PACKED,
    "mpnet": DEFINITION,
    "mpt": DEFINITION,
    "muse_spark_text": PACKED,  # a norm of the attention's output
    "openai-gpt": DEFINITION,
    "opt": PACKED,
    "parakeet_encoder": DEFINITION,  # convolutions
    "pegasus": PACKED,
    "pvt": DEFINITION,
    "qwen3_next": PACKED,  # a gate inside the attention module
    "sam3_lite_text": DEFINITION | WINDOWS,  # three attentions in the decoder, named
    "sam_vision_model": WINDOWS,  # grids
    "swin": WINDOWS,
    "t5gemma2": PACKED,  # self- and cross-attention in one softmax
    "vilt": DEFINITION,
    "wavlm": DEFINITION,
    "whisper": PACKED,
    "xglm": DEFINITION,
    "xlnet": DEFINITION,  # a parameter projects the values
}

# Their eager attention is inline before transformers 5.
INLINE_BEFORE_5 = {"albert", "bert", "longt5", "t5"}

# Decoders whose layers have cross-attention as well.
TWO_ATTENTIONS = {"bart", "t5", "whisper", "marian", "mbart", "pegasus", "m2m_100", "moonshine"}

# model type -> part of the error
REFUSED = {
    "mamba": "has no stack of layers with attention",
    "nystromformer": "called no attention that can be read",
}

# model type -> how far it folds if its sentences are long
FOLDS = {"bert": "no threshold", "gpt2": "no threshold", "llama": "no threshold", "qwen3_moe": "never"}


@pytest.mark.parametrize("model_type", [*MAIN, *(pytest.param(one, marks=pytest.mark.exhaustive) for one in OTHER)])
def test_maps_equal_twin(model_type: str) -> None:
    rows = [row for row in sweep_type(model_type) if row.outcome not in ("not run", "other form")]
    if model_type == "qwen2_5_vl_vision" and Version(transformers.__version__) < Version("5.17"):
        pytest.skip("transformers 5.16 builds this model only as a part of another")
    assert {row.outcome for row in rows} == {"agrees"}, [str(row) for row in rows]
    assert {row.alone for row in rows} <= {"agrees", ""}, [str(row) for row in rows]
    expected = DEFINITION if BEFORE_5 and model_type in INLINE_BEFORE_5 else (MAIN | OTHER)[model_type]
    assert expected <= {row.way for row in rows}
    assert set(RELEASED.get(model_type, ())) <= {row.stack for row in rows}
    if model_type in TWO_ATTENTIONS:
        assert any(row.stack.endswith("cross") for row in rows), [str(row) for row in rows]


@pytest.mark.parametrize("model_type", REFUSED)
def test_refusal_says_why(model_type: str) -> None:
    rows = sweep_type(model_type)
    assert {row.outcome for row in rows} <= {"refused", "other form", "no layers"}
    assert all(REFUSED[model_type] in row.note for row in rows)


@pytest.mark.parametrize("model_type", FOLDS)
def test_long_sentences_fold(model_type: str) -> None:
    rows = sweep_type(model_type, long=True)
    assert {row.outcome for row in rows} == {"agrees"}, [str(row) for row in rows]
    assert {row.folds for row in rows} == {FOLDS[model_type]}, [str(row) for row in rows]
    assert all((row.note != "") == (row.folds == "never") for row in rows)


@pytest.mark.slow
def test_wide_layers_fold_for_users() -> None:
    rows = sweep_type("whisper", long=True)
    assert "yes" in {row.folds for row in rows}, [str(row) for row in rows]
