"""Examples: their fields, their files, tables of other libraries, and their tokens."""

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from transformers import RobertaConfig, RobertaModel

from captum_vz.errors import ArgumentError
from captum_vz.study import BadExampleError, Example, Study, encode, read_csv, read_jsonl, write_jsonl
from captum_vz.study.examples import as_examples
from captum_vz.subjects.heads import max_tokens
from captum_vz.testbed import agreement_sentences
from tests.study.conftest import Decoder, Shipped
from tests.view.pages import missing

RECORDS = agreement_sentences(10, seed=2)
WUGS = {"tokens": ["the", "wugs", "[MASK]", "nice."], "target": 2, "cue": [1]}


def test_what_is_written_is_read(tmp_path: Path) -> None:
    examples = [Example.from_record(record) for record in RECORDS]
    examples.append(Example("ünï", ("a", "b"), 0, (), label="x", group="other"))
    # These end a line for Python, but not in JSON.
    examples.append(Example("lines", tuple(f"a{end}" for end in "\u2028\u2029\x85\x0b\x0c\x1c\r\n"), 0, group="other"))
    write_jsonl(tmp_path / "examples.jsonl", examples)
    assert read_jsonl(tmp_path / "examples.jsonl") == examples


def test_jsonl_of_other_programs_is_read(tmp_path: Path) -> None:
    path = tmp_path / "wugs.jsonl"
    lines = [WUGS, {"text": "It [MASK].", "target": 1, "id": 7, "cue": 0}, RECORDS[0]]
    path.write_text("\n\n".join(map(json.dumps, lines)), encoding="utf-8")
    first, second, third = read_jsonl(path)
    assert first == Example("wugs 1", ("the", "wugs", "[MASK]", "nice."), 2, (1,), group="wugs")
    assert second == Example("7", ("It", "[MASK]", "."), 1, (0,), group="wugs", text="It [MASK].")
    assert third == Example.from_record(RECORDS[0], id=f"{RECORDS[0]['UID']} 5")


def test_tables_become_examples(examples: list[Example]) -> None:
    fields = Example.from_record(RECORDS[0]).to_dict()
    as_arrays = fields | {
        "words": np.array(fields["words"], dtype=object),
        "target": np.int64(fields["target"]),
        "cue": np.array(fields["cue"]),
        "label": np.float32("nan"),  # Ray Data's None
        "good": np.str_(fields["good"]),
    }
    assert Example.from_dict(as_arrays) == replace(Example.from_record(RECORDS[0]), label=None)
    table = pa.Table.from_pylist([example.to_dict() for example in examples])
    assert as_examples(table) == examples
    assert as_examples(example.to_dict() for example in examples) == examples
    found = as_examples([{"words": ["a"], "target": 0, "group": "g"}, {"words": ["a"], "target": 0, "id": "mine"}])
    assert [example.id for example in found] == ["g 1", "mine"]


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"tokens": None}, "neither words"),
        ({"tokens": ["the", 3]}, "list of strings"),
        ({"tokens": "the wugs"}, "list of strings"),
        ({"target": None}, "target is None"),
        ({"target": 1.5}, r"target is 1\.5"),
        ({"target": True}, "target is True"),
        ({"cue": ["wugs"]}, "cue is 'wugs'"),
        ({"good": ["are"]}, r"good is \['are'\]"),
    ],
)
def test_bad_example_names_its_line(changed: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "wugs.jsonl"
    path.write_text(f"{json.dumps(WUGS)}\n{json.dumps(WUGS | changed)}\n", encoding="utf-8")
    with pytest.raises(ValueError, match=f"2: .*{complaint}"):
        read_jsonl(path)


def test_csv_is_read_in_words(tmp_path: Path) -> None:
    path = tmp_path / "my.csv"
    path.write_text(
        "Text;Target;Cue;Good;Bad;Label\n"
        '"The pictures of the hat; all of them, are nice.";are;the hat;;is;plural\n'
        "the hat near the pictures [MASK] nice.;;Hat;is;are;\n"
        "The hat is nice.;is;hat;;;\n",
        encoding="utf-8-sig",
    )
    first, second, third = read_csv(path)
    assert first.text == "The pictures of the hat; all of them, [MASK] nice."
    assert (first.words[first.target], first.good, first.bad, first.label) == ("[MASK]", "are", "is", "plural")
    assert [first.words[place] for place in first.cue] == ["the", "hat"]
    assert (second.id, second.group, second.target, second.cue) == ("my 3", "my", 5, (1,))
    assert (third.words[third.target], third.good) == ("is", None)


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        ("text,target\nThe hat is the hat.,hat", "2: the target 'hat'"),
        ("text,target,cue\nThe hat is,is,hats", "2: the cue 'hats'"),
        ("sentence,target\nThe hat,hat", "sentence, target"),
        ("", "of an empty file"),
    ],
)
def test_bad_csv_names_its_line(lines: str, complaint: str, tmp_path: Path) -> None:
    (tmp_path / "my.csv").write_text(lines)
    with pytest.raises(ValueError, match=complaint):
        read_csv(tmp_path / "my.csv")


# Tables of other libraries


def test_rows_as_a_table_of_pyarrow(finished: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    table = finished.to_arrow()
    rows = finished.rows()
    assert table.column_names == list(rows.columns)
    assert table.schema.field("layer").type == pa.int32()
    whole = dict.fromkeys(("layer", "deciding", "target"), "Int64")
    pd.testing.assert_frame_equal(table.to_pandas().astype(whole), rows)
    some = finished.to_arrow(["model", "cue_dot"])
    assert some.to_pydict() == finished.rows(["model", "cue_dot"]).to_dict("list")
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(ModuleNotFoundError, match="needs datasets"):
        finished.to_dataset()


def test_data_sets_in_and_out(examples: list[Example], finished: Study) -> None:
    if find_spec("datasets") is None:
        missing('datasets is not installed: pip install -e ".[datasets]"')
    from datasets import Dataset

    given = Dataset.from_list([example.to_dict() for example in examples])
    assert as_examples(given) == examples
    assert as_examples(given.with_format("numpy")) == examples
    found = finished.to_dataset(["example", "method", "scores"])
    assert found[0] == {name: finished.rows()[name][0] for name in ("example", "method")} | {
        "scores": list(finished.rows()["scores"][0])
    }


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("sentence", "of type str: pass a"),
        (3, "of type int"),
        ({"tokens": []}, "of type dict"),
        (["sentence"], "pass an Example"),
        ([{"words": ["a"], "target": 0}, {"words": ["a"]}], "target is None"),
    ],
)
def test_other_things_refused(given: Any, told: str) -> None:
    with pytest.raises(ArgumentError, match=told):
        as_examples(given)


# From words to tokens


HATS = Example("wugs", ("the", "hats", "[MASK]", "nice", "."), 2, (1,), "are", "is")


def test_text_ends_before_decoder_target(decoder: Decoder, shipped: Shipped) -> None:
    _, tokenizer = decoder
    for text in (None, "the hats [MASK] nice."):
        encoded = encode(tokenizer, replace(HATS, text=text))
        assert tokenizer.convert_ids_to_tokens(encoded.ids) == ["the", "hats"]
        assert (encoded.target, encoded.cue) == (1, (1,))
        assert encoded.forms == tuple(tokenizer.convert_tokens_to_ids(["are", "is"]))
    assert encode(tokenizer, replace(HATS, good="exasperate")).forms is None
    plain = replace(HATS, words=("the", "hats", "are", "nice", "."))
    for tokenizer in (shipped[1], decoder[1]):
        encoded = encode(tokenizer, plain)
        assert tokenizer.convert_ids_to_tokens(encoded.ids[encoded.target]) == "are"
        assert encoded.forms is None


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"target": 5}, "target is word 5"),
        ({"target": -1}, "the target is word"),
        ({"cue": ()}, "there is no cue"),
        ({"cue": (9,)}, "the cue is word 9"),
        ({"cue": (2,)}, "not the target, 2"),
        ({"good": "exasperate"}, "not one token each"),
        ({"bad": "Are"}, "the same token"),  # it has no capitals
        ({"bad": None}, "no forms 'good' and"),
        ({"words": ("the", "hats", "[MASK]", *["nice"] * 50)}, "55 tokens long"),
        ({"text": "the wugs are nice."}, "sentence continues"),
    ],
)
def test_bad_example_says_why(changed: dict[str, Any], reason: str, shipped: Shipped, decoder: Decoder) -> None:
    with pytest.raises(BadExampleError, match=reason):
        encode(shipped[1], replace(HATS, **changed), max_tokens=32, needs_cue=True, needs_forms=True)
    # A decoder does not see later words.
    with pytest.raises(BadExampleError, match="after the target"):
        encode(decoder[1], replace(HATS, cue=(3,)))
    with pytest.raises(BadExampleError, match="first word"):
        encode(decoder[1], replace(HATS, target=0, words=("[MASK]", "hats"), cue=()))


def test_positions_after_padding_are_fewer(shipped: Shipped, decoder: Decoder) -> None:
    size = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    config = RobertaConfig(vocab_size=10, max_position_embeddings=20, pad_token_id=1, **size)
    model, tokenizer = RobertaModel(config).eval(), decoder[1]
    most = max_tokens(model, tokenizer)
    assert most == 18
    assert model(torch.full((1, 18), 5)).last_hidden_state.shape[1] == most
    with pytest.raises((IndexError, RuntimeError), match="out of"):
        model(torch.full((1, 19), 5))
    assert max_tokens(*decoder) == 32
    assert max_tokens(*shipped) == shipped[0].config.max_position_embeddings
