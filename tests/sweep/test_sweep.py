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

# The main families: albert has a norm and the residual inside its attention module, qwen2_5_vl_vision has images in one
# sequence, without an axis of examples, and vitdet has features before its grid.
MAIN = "albert bart bert bloom deberta gpt2 llama qwen2_5_vl_vision qwen3_moe t5 vit vitdet"
# Others: gates or norms inside the attention (afmoe, muse_spark_text, qwen3_next), several vectors for each token
# (gemma3n_text, glm5_next_text, hy_v4), tokens before examples (fsmt, longformer), fewer targets than sources (funnel),
# values in halves (diffllama), of a lower layer (gemma4_text), by a parameter (xlnet), sinks (gpt_oss), tokens that do
# not see themselves (deepseek_v32), convolutions (parakeet_encoder), several attentions in a layer (longcat_flash).
OTHER = """afmoe big_bird bitnet blip bros clip codegen cpmant deberta-v2 deepseek_v3 deepseek_v32 diffllama falcon fsmt
funnel gemma3n_text gemma4_text glm5_next_text gpt_neo gpt_oss gptj granite_swa hy_v4 ibert imagegpt jamba jetmoe led
llama4 longcat_flash longformer longt5 luke m2m_100 marian markuplm mbart moonshine mpnet mpt muse_spark_text openai-gpt
opt parakeet_encoder pegasus pvt qwen3_next sam3_lite_text sam_vision_model swin t5gemma2 vilt wavlm whisper xglm
xlnet"""
# Those that are not replayed as packed pairs, or in several ways.
BY_DEFINITION = """big_bird blip bloom bros cpmant deberta deberta-v2 diffllama falcon fsmt funnel gpt_neo hy_v4 ibert
imagegpt led longformer luke mpnet mpt openai-gpt parakeet_encoder pvt vilt wavlm xglm xlnet"""
if Version(transformers.__version__) < Version("5.24"):  # later, they call transformers' AttentionInterface
    BY_DEFINITION += " codegen gptj"
WAYS = dict.fromkeys(MAIN.split() + OTHER.split(), PACKED) | dict.fromkeys(BY_DEFINITION.split(), DEFINITION)
WAYS |= dict.fromkeys(("qwen2_5_vl_vision", "sam_vision_model", "swin", "vitdet"), WINDOWS)
WAYS |= {"longcat_flash": DEFINITION | PACKED, "longt5": DEFINITION | PACKED, "sam3_lite_text": DEFINITION | WINDOWS}
TYPES = [*MAIN.split(), *(pytest.param(one, marks=pytest.mark.exhaustive) for one in OTHER.split())]

# Their eager attention is inline before transformers 5.
INLINE_BEFORE_5 = {"albert", "bert", "longt5", "t5"}

# Decoders whose layers have cross-attention as well.
TWO_ATTENTIONS = {"bart", "t5", "whisper", "marian", "mbart", "pegasus", "m2m_100", "moonshine"}

# model type -> part of the error
REFUSED = {"mamba": "has no stack of layers with attention", "nystromformer": "called no attention that can be read"}

# model type -> its replay if its sentences are long
LONG = dict.fromkeys(("bert", "gpt2", "llama"), "folded pairs") | {"qwen3_moe": "packed pairs"}


@pytest.mark.parametrize("model_type", TYPES)
def test_maps_equal_twin(model_type: str) -> None:
    rows = [row for row in sweep_type(model_type) if row.outcome not in ("not run", "other form")]
    if model_type == "qwen2_5_vl_vision" and Version(transformers.__version__) < Version("5.17"):
        pytest.skip("transformers 5.16 builds this model only as a part of another")
    assert {row.outcome for row in rows} == {"agrees"}, [str(row) for row in rows]
    assert {row.alone for row in rows} <= {"agrees", ""}, [str(row) for row in rows]
    expected = DEFINITION if BEFORE_5 and model_type in INLINE_BEFORE_5 else WAYS[model_type]
    assert expected <= {row.way for row in rows}
    assert set(RELEASED.get(model_type, ())) <= {row.stack for row in rows}
    if model_type in TWO_ATTENTIONS:
        assert any(row.stack.endswith("cross") for row in rows), [str(row) for row in rows]


@pytest.mark.parametrize("model_type", REFUSED)
def test_refusal_says_why(model_type: str) -> None:
    rows = sweep_type(model_type)
    assert {row.outcome for row in rows} <= {"refused", "other form", "no layers"}
    assert all(REFUSED[model_type] in row.note for row in rows)


@pytest.mark.parametrize("model_type", LONG)
def test_long_sentences_fold(model_type: str) -> None:
    rows = sweep_type(model_type, long=True)
    assert {row.outcome for row in rows} == {"agrees"}, [str(row) for row in rows]
    assert {row.way for row in rows} == {LONG[model_type]}, [str(row) for row in rows]
    assert all((row.note != "") == (row.way == "packed pairs") for row in rows)
