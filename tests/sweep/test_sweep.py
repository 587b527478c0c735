"""A part of the sweep: each replay, each kind of attention, refusals, and long sentences."""

from __future__ import annotations

import pytest
import transformers
from packaging.version import Version

from tests.sweep.model_type import sweep_type

PACKED = {"packed pairs"}
WHOLE = {"whole sequences"}
WINDOWS = {"windows"}
# From this version on, GPT-J and CodeGen call transformers' AttentionInterface.
SINCE_5_24 = Version(transformers.__version__) >= Version("5.24")

# The main families: model type -> how its layers are replayed.
MAIN = {
    "albert": PACKED,  # a norm and the residual inside the attention module
    "bart": PACKED,
    "bert": PACKED,
    "bloom": WHOLE,
    "deberta": WHOLE,
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
    "big_bird": WHOLE,
    "bitnet": PACKED,
    "blip": WHOLE,
    "bros": WHOLE,  # distances of pairs; the batch is a later axis
    "clip": PACKED,  # two towers
    "codegen": PACKED if SINCE_5_24 else WHOLE,
    "cpmant": WHOLE,
    "deberta-v2": WHOLE,
    "deepseek_v3": PACKED,  # latent attention, experts
    "deepseek_v32": PACKED,  # sparse attention: tokens that do not see themselves
    "diffllama": WHOLE,  # values in two halves
    "falcon": WHOLE,
    "fsmt": WHOLE,  # tokens before examples
    "funnel": WHOLE,  # fewer targets than sources
    "gemma3n_text": PACKED,  # four vectors for each token; values of a lower layer
    "gemma4_text": PACKED,  # values of a lower layer; a second stream of states
    "glm5_next_text": PACKED,  # four vectors for each token, after the axis of tokens
    "gpt_neo": WHOLE,
    "gpt_oss": PACKED,  # sinks
    "gptj": PACKED if SINCE_5_24 else WHOLE,
    "granite_swa": PACKED,  # weights that are scaled after the softmax
    "hy_v4": WHOLE,  # four vectors for each token
    "ibert": WHOLE,  # each tensor comes with a scale
    "imagegpt": WHOLE,
    "jetmoe": PACKED,
    "jamba": PACKED,  # one of two layers has attention
    "led": WHOLE,
    "llama4": PACKED,  # text and vision layers have different attention functions
    "longformer": WHOLE,  # its own windows; tokens before examples in its attention
    "longcat_flash": WHOLE | PACKED,  # two self-attentions, named
    "longt5": WHOLE | PACKED,  # blocks in the encoder
    "luke": WHOLE,
    "m2m_100": PACKED,
    "marian": PACKED,
    "markuplm": PACKED,
    "mbart": PACKED,
    "moonshine": PACKED,
    "mpnet": WHOLE,
    "mpt": WHOLE,
    "muse_spark_text": PACKED,  # a norm of the attention's output
    "openai-gpt": WHOLE,
    "opt": PACKED,
    "parakeet_encoder": WHOLE,  # convolutions
    "pegasus": PACKED,
    "pvt": WHOLE,
    "qwen3_next": PACKED,  # a gate inside the attention module
    "sam3_lite_text": WHOLE | WINDOWS,  # three attentions in the decoder, named
    "sam_vision_model": WINDOWS,  # grids
    "swin": WINDOWS,
    "t5gemma2": PACKED,  # self- and cross-attention in one softmax
    "vilt": WHOLE,
    "wavlm": WHOLE,
    "whisper": PACKED,
    "xglm": WHOLE,
    "xlnet": WHOLE,  # a parameter projects the values
}

# Decoders whose layers have cross-attention as well.
TWO_ATTENTIONS = {"bart", "t5", "whisper", "marian", "mbart", "pegasus", "m2m_100", "moonshine"}

# model type -> part of the error
REFUSED = {
    "mamba": "has no stack of layers with attention",
    "nystromformer": "called no attention that can be read",
}

# model type -> how far it folds if its sentences are long
FOLDS = {"bert": "no threshold", "gpt2": "no threshold", "llama": "no threshold", "qwen3_moe": "never"}


@pytest.mark.parametrize("model_type", [*MAIN, *(pytest.param(one, marks=pytest.mark.slow) for one in OTHER)])
def test_maps_equal_twin(model_type: str) -> None:
    rows = [row for row in sweep_type(model_type) if row.outcome not in ("not run", "other form")]
    if model_type == "qwen2_5_vl_vision" and Version(transformers.__version__) < Version("5.17"):
        pytest.skip("transformers 5.16 builds this model only as a part of another")
    assert {row.outcome for row in rows} == {"agrees"}, [str(row) for row in rows]
    assert (MAIN | OTHER)[model_type] <= {row.way for row in rows}
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
