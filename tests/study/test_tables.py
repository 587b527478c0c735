"""Examples from tables and data sets of other libraries, and results as such."""

from importlib.util import find_spec
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest

from captum_vz.errors import ArgumentError
from captum_vz.study import Example, Study
from captum_vz.study.examples import as_examples
from tests.study.test_run import study
from tests.view.pages import missing


@pytest.fixture(scope="module")
def reference(examples: list[Example], tmp_path_factory: pytest.TempPathFactory) -> Study:
    return study(tmp_path_factory.mktemp("reference") / "study", examples)


def test_table_of_pyarrow_is_examples(examples: list[Example]) -> None:
    table = pa.Table.from_pylist([example.to_dict() for example in examples])
    assert as_examples(table) == examples
    assert as_examples(example.to_dict() for example in examples) == examples


def test_rows_as_a_table_of_pyarrow(reference: Study) -> None:
    table = reference.to_arrow()
    rows = reference.rows()
    assert table.column_names == list(rows.columns)
    assert table.schema.field("layer").type == pa.int32()
    whole = dict.fromkeys(("layer", "deciding", "target"), "Int64")
    pd.testing.assert_frame_equal(table.to_pandas().astype(whole), rows)
    some = reference.to_arrow(["model", "cue_dot"])
    assert some.to_pydict() == reference.rows(["model", "cue_dot"]).to_dict("list")


def test_data_sets_in_and_out(examples: list[Example], reference: Study) -> None:
    if find_spec("datasets") is None:
        missing('datasets is not installed: pip install -e ".[datasets]"')
    from datasets import Dataset

    given = Dataset.from_list([example.to_dict() for example in examples])
    assert as_examples(given) == examples
    assert as_examples(given.with_format("numpy")) == examples
    found = reference.to_dataset(["example", "method", "scores"])
    assert found[0] == {name: reference.rows()[name][0] for name in ("example", "method")} | {
        "scores": list(reference.rows()["scores"][0])
    }


def test_missing_datasets_is_named(reference: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(ModuleNotFoundError, match=r"to_dataset needs datasets.*captum-vz\[datasets\]"):
        reference.to_dataset()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("sentence", "examples is of type str: pass a list of Example objects"),
        ({"tokens": []}, "examples is of type dict"),
        (3, "examples is of type int"),
        (["sentence"], "example 1 is of type str: pass an Example or a dictionary"),
        ([{"words": ["a"], "target": 0}, {"words": ["a"]}], "example 2: target is None"),
    ],
)
def test_other_things_refused(given: Any, told: str) -> None:
    with pytest.raises(ArgumentError, match=told):
        as_examples(given)


def test_ids_are_made_of_groups() -> None:
    found = as_examples([{"words": ["a"], "target": 0, "group": "g"}, {"words": ["a"], "target": 0, "id": "mine"}])
    assert [example.id for example in found] == ["g 1", "mine"]
