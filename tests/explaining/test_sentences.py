"""Encoders of sentences: the explained number is that of the model's own encode, with its prompts."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import captum_vz
from captum_vz import ValueZeroing, find_layers
from captum_vz.errors import ArgumentError
from captum_vz.testbed import load_model
from tests.command import Output, ran
from tests.explaining.models import SENTENCE, one_by_one, sentence_transformer, tokenizer, twin

CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}


encoder = pytest.fixture(scope="module")(sentence_transformer)
QUERY, ASKED = "query: ", "represent this query for search: "


@pytest.mark.parametrize(
    ("options", "names", "prompts"),
    [
        ({"prompts": {"query": QUERY}, "default_prompt_name": "query"}, None, (QUERY, QUERY)),
        ({"prompts": {"query": QUERY}, "default_prompt_name": "query", "include_prompt": False}, None, (QUERY, QUERY)),
        ({"truncate_dim": 32}, None, ("", "")),
        ({"prompts": {"query": ASKED, "passage": "passage: "}}, None, (ASKED, "passage: ")),
        ({"prompts": {"query": ASKED, "document": ""}}, "", ("", "")),
        ({"prompts": {"query": ASKED, "topic": "topic: "}}, ("topic", "query"), ("topic: ", ASKED)),
    ],
)
def test_what_a_sentence_encoder_reads_before_a_text(
    encoder: Any, options: dict[str, Any], names: Any, prompts: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts and a smaller dimension are those of the model's encode."""
    settings = dict(options)
    pools_prompt = settings.pop("include_prompt", True)
    monkeypatch.setattr(encoder[1], "include_prompt", pools_prompt)
    for name, value in settings.items():
        monkeypatch.setattr(encoder, name, value)
    one, other = "the cat sits outside", "a dog plays in the garden"
    u, v = (encoder.encode([text], prompt=prompt)[0] for text, prompt in zip((one, other), prompts, strict=True))
    found = captum_vz.explain(encoder, one, other, prompt_name=names)
    assert found.predictions == [
        ("cosine similarity", pytest.approx(float(u @ v) / np.linalg.norm(u) / np.linalg.norm(v), abs=1e-5))
    ]
    assert len(found.tokens) == len(encoder.tokenizer(prompts[0] + one)["input_ids"])
    assert all(any(repr(prompt) in line for line in found.told) for prompt in prompts if prompt)
    with pytest.raises(ArgumentError, match="pass one of these"):
        captum_vz.explain(encoder, one, other, prompt_name="title")


def test_encoder_that_does_more_in_encode_is_refused(encoder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = encoder.encode
    monkeypatch.setattr(encoder, "encode", lambda texts, **options: encode(["hat", *texts], **options)[:1])
    with pytest.raises(ArgumentError, match="more than they do"):
        captum_vz.explain(encoder, SENTENCE)
    with pytest.raises(ArgumentError, match="has no prompts"):
        captum_vz.explain("minilm", SENTENCE, prompt_name="query")
    with pytest.raises(ArgumentError, match="for the two texts"):
        captum_vz.explain(encoder, SENTENCE, prompt_name=5)
    with pytest.raises(ArgumentError, match="no encoder of"):
        captum_vz.explain("agreement", SENTENCE, prompt_name="query")


def test_sentence_encoder_explains_a_similarity(encoder: Any) -> None:
    """The folder is read as the SentenceTransformer is. A bare encoder reads both texts as one input, and says so."""
    one, other = "the cat sits outside", "a dog plays in the garden"
    inputs = encoder.tokenizer(one, return_tensors="pt")
    sources = one_by_one(len(inputs.tokens()))

    def moved(reference: str) -> Tensor:
        to = torch.tensor(encoder.encode([reference]))

        def similar() -> Tensor:
            return torch.cosine_similarity(encoder(dict(inputs))["sentence_embedding"], to)[0]

        return twin(encoder, similar, sources, "self.value")

    similarity = float(encoder.similarity(encoder.encode([one]), encoder.encode([other])))
    for model in (encoder, "minilm"):
        found = captum_vz.explain(model, one, other)
        assert found.predictions == [("cosine similarity", pytest.approx(similarity, abs=1e-5))]
        torch.testing.assert_close(found.scores, moved(other), rtol=1e-3, atol=1e-5)
    found = captum_vz.explain(encoder, one)
    torch.testing.assert_close(found.scores, moved(one), **CLOSE)
    assert (found.task, found.rows[0].name) == ("sentence-embedding", "the embedding")
    assert "no decision is explained" in str(found)
    bert = encoder[0].auto_model
    maps = captum_vz.explain(encoder, one, method="value-zeroing", token="cat")
    torch.testing.assert_close(maps.scores, ValueZeroing(bert, find_layers(bert)[-1]).attribute(inputs, token=2)[0])
    with pytest.warns(UserWarning, match="both texts are read"):
        captum_vz.explain(load_model()[0].bert, one, other, tokenizer=tokenizer())


def test_command_reads_the_folder_of_an_encoder(
    encoder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    monkeypatch.setattr(encoder, "prompts", {"query": QUERY})
    encoder.save(str(tmp_path))
    text, other, names = "the cat sits. it is 3.14 years old.", "a dog runs", ["query", ""]
    capsys.readouterr()
    asked = ["--sentences", "--pair", other, "--prompt-name", *names]
    found = json.loads(ran(capsys, "explain", text, "--model", str(tmp_path), "--json", *asked).out)
    expected = captum_vz.explain(encoder, text, other, words="sentences", prompt_name=names)
    assert found["tokens"] == expected.tokens
    torch.testing.assert_close(torch.tensor(found["scores"]), expected.scores, **CLOSE)
