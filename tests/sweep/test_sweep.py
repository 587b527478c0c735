"""A representative part of the sweep: each way of replaying, each kind of attention, and what is refused."""

from __future__ import annotations

import pytest

from tests.sweep.model_type import sweep_type

PACKED = {"packed pairs"}
FUNCTION = {"packed, function answered"}
WHOLE = {"whole sequences"}
WINDOWS = {"windows"}

# model type -> how its layers are replayed
AGREE = {
    "afmoe": FUNCTION,  # a gate inside the attention module
    "albert": FUNCTION,  # norm and residual inside it
    "bart": PACKED,
    "bert": PACKED,
    "big_bird": WHOLE,
    "bitnet": FUNCTION,
    "blip": WHOLE,
    "bloom": WHOLE,
    "bros": WHOLE,  # distances of pairs, examples behind them
    "clip": PACKED,  # two towers
    "codegen": WHOLE,
    "cpmant": WHOLE,
    "deberta": WHOLE,
    "deberta-v2": WHOLE,
    "deepseek_v3": PACKED,  # latent attention, experts
    "deepseek_v32": PACKED,  # sparse attention: tokens that do not see themselves
    "diffllama": WHOLE,  # values in two halves
    "falcon": WHOLE,
    "fsmt": WHOLE,  # tokens before examples
    "funnel": WHOLE,  # fewer targets than sources
    "gemma3n_text": PACKED,  # four vectors of each token; values of a lower layer
    "gemma4_text": PACKED,  # values of a lower layer, and other states beside
    "glm5_next_text": PACKED,  # four vectors of each token, behind the axis of tokens
    "gpt2": PACKED,
    "gpt_neo": WHOLE,
    "gpt_oss": PACKED,  # sinks
    "gptj": WHOLE,
    "granite_swa": PACKED,  # weights that are scaled afterwards
    "hy_v4": WHOLE,  # four vectors of each token
    "ibert": WHOLE,  # a scale beside every tensor
    "imagegpt": WHOLE,
    "jetmoe": FUNCTION,
    "jamba": PACKED,  # one layer of two attends
    "led": WHOLE,
    "llama": PACKED,
    "llama4": PACKED,  # its text and its vision layers have an attention function each
    "longformer": WHOLE,  # windows of its own, tokens before examples inside of its attention
    "longt5": WHOLE | PACKED,  # blocks in the encoder
    "luke": WHOLE,
    "m2m_100": PACKED,
    "marian": PACKED,
    "markuplm": PACKED,
    "mbart": PACKED,
    "moonshine": PACKED,
    "mpnet": WHOLE,
    "mpt": WHOLE,
    "muse_spark_text": FUNCTION,  # a norm of what the attention gives
    "openai-gpt": WHOLE,
    "opt": PACKED,
    "parakeet_encoder": WHOLE,  # convolutions
    "pegasus": PACKED,
    "pvt": WHOLE,
    "qwen2_5_vl_vision": WINDOWS,  # images in one sequence, no axis of examples
    "qwen3_moe": PACKED,
    "qwen3_next": FUNCTION,  # a gate inside the attention module; one layer of two attends
    "sam_vision_model": WINDOWS,  # grids
    "swin": WINDOWS,
    "t5": PACKED,
    "t5gemma2": PACKED,  # self and cross in one attention
    "vilt": WHOLE,
    "vit": PACKED,
    "vitdet": WINDOWS,  # features before the grid
    "wavlm": WHOLE,
    "whisper": PACKED,
    "xglm": WHOLE,
    "xlnet": WHOLE,  # a parameter projects the values
}

# Decoders whose layers have cross-attention as well.
TWO_ATTENTIONS = {"bart", "t5", "whisper", "marian", "mbart", "pegasus", "m2m_100", "moonshine"}

# model type -> what it says
REFUSED = {
    "longcat_flash": "has a list of 2 attentions",
    "mamba": "has no stack of layers with attention",
    "nystromformer": "called no attention that can be read",
}


@pytest.mark.parametrize("model_type", AGREE)
def test_maps_equal_the_twins(model_type: str) -> None:
    rows = [row for row in sweep_type(model_type) if row.outcome not in ("not run", "other form")]
    assert {row.outcome for row in rows} == {"agrees"}, [str(row) for row in rows]
    assert AGREE[model_type] <= {row.way for row in rows}
    if model_type in TWO_ATTENTIONS:
        assert any(row.stack.endswith("cross") for row in rows), [str(row) for row in rows]


@pytest.mark.parametrize("model_type", REFUSED)
def test_what_cannot_be_explained_says_why(model_type: str) -> None:
    rows = sweep_type(model_type)
    assert {row.outcome for row in rows} <= {"refused", "other form", "no layers"}
    assert all(REFUSED[model_type] in row.note for row in rows)
