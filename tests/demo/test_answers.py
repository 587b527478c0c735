"""What the demo's page shows: limits, files, and text that stays text."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import BertConfig, BertForMaskedLM

import captum_vz
from captum_vz import demo
from captum_vz.demo import check_address, page
from captum_vz.demo.answers import Answers, Limits
from captum_vz.errors import ArgumentError
from captum_vz.study.comparison import blanked_out
from captum_vz.subjects import subject_of
from captum_vz.testbed import load_model
from captum_vz.visualization import read_provenance, weights_fingerprint

HOSTILE = "<script>alert(1)</script> [MASK]"


@pytest.fixture
def answers() -> Iterator[Answers]:
    found = Answers(Limits(("agreement", "causal"), False, 40))
    yield found
    found.close()


def test_hostile_text_stays_text(answers: Answers) -> None:
    told, _, grid, shares, _, files = answers.explain(HOSTILE, "agreement", ["value-zeroing"], "", -1)
    assert "[MASK], position" in told
    assert "<script" not in told + shares
    assert Path(grid).is_file()
    assert {Path(file).name for file in files} >= {"page.html", "layers.png", "methods.csv", "maps.json"}


@pytest.mark.parametrize(
    ("text", "model", "message"),
    [
        ("", "agreement", "The text is empty"),
        ("hat " * 60, "agreement", "this page takes at most 40"),
        ("h" * 5000, "agreement", "this page takes at most 640"),
        ("a hat", "/etc", "is not offered here"),
    ],
)
def test_limits_are_told(text: str, model: str, message: str, answers: Answers) -> None:
    told, *_ = answers.explain(text, model, ["value-zeroing"], "", -1)
    assert 'role="alert"' in told
    assert message in told


def test_files_say_where_numbers_come_from(answers: Answers) -> None:
    """The package, the model and its weights, the method and the text, in pictures, numbers and the page."""
    model, _ = load_model()
    weights = weights_fingerprint(model)
    *_, files = answers.explain(HOSTILE, "agreement", ["value-zeroing", "attention"], "", -1)
    paths = {Path(file).name: Path(file) for file in files}
    expected = {
        "package": f"captum_vz {captum_vz.__version__}",
        "model": "agreement",
        "model class": "BertForMaskedLM",
        "weights": weights,
        "method": "value-zeroing, attention",
        "text": HOSTILE,
    }
    assert json.loads(paths["maps.json"].read_text())["provenance"] == expected
    for name, method in (("layers", "value-zeroing"), ("methods", "value-zeroing, attention")):
        for ending in ("png", "svg"):
            found = read_provenance(paths[f"{name}.{ending}"])
            assert {key: found[key] for key in expected} == expected | {"method": method}
    page = paths["page.html"].read_text("ascii")
    assert weights in page
    assert "captum_vz " in page
    assert "<script>alert(1)" not in page


def test_files_of_generated_text_say_where_numbers_come_from(answers: Answers) -> None:
    *_, files = answers.generate("the pictures of some hat", "causal", "value-zeroing", 2, [])
    paths = {Path(file).name: Path(file) for file in files}
    found = [read_provenance(paths["steps.png"]), json.loads(paths["scores.json"].read_text())["provenance"]]
    for one in found:
        assert (one["model class"], one["method"]) == ("LlamaForCausalLM", "value-zeroing")
        assert one["text"] == "the pictures of some hat"


def test_method_that_refuses_is_left_out() -> None:
    """MiniLM has no head: methods of the model's output cannot explain it. The others are shown."""
    unlimited = Answers(Limits(("minilm",), False, 40))
    try:
        told, view, *_ = unlimited.explain("a cat sat", "minilm", ["value-zeroing-effect", "value-zeroing"], "", -1)
        assert 'role="status"' in told
        assert "Without value-zeroing-effect: BertModel gives no logits" in told
        assert "value-zeroing" in view
        told, *_ = unlimited.explain("a cat sat", "minilm", ["value-zeroing-effect"], "", -1)
        assert 'role="alert"' in told
    finally:
        unlimited.close()


def test_generated_text_must_fit() -> None:
    larger = Answers(Limits(("causal",), False, 128))
    try:
        told, *_ = larger.generate("the hat " * 60, "causal", "value-zeroing", 32, [])
    finally:
        larger.close()
    assert "The text is 121 tokens long, and the model takes at most 128: ask for at most 8 new tokens." in told


def test_view_comes_before_pictures(answers: Answers) -> None:
    first, last = answers.steps("a hat [MASK]", "agreement", ["value-zeroing"], "", -1)
    assert first[:2] == last[:2]
    assert (first.layers, first.methods, first.files) == (None, None, None)
    assert Path(last[2]).is_file()


def test_truth_is_a_switch(answers: Answers) -> None:
    asked = "the pictures of some hat [MASK] scaring marcus.", "agreement", ["value-zeroing"], "", -1, "", "are"
    plain, blanked = (answers.explain(*asked, truth=truth) for truth in (False, True))
    assert "blanking out" not in plain[3]
    assert "blanking out" in blanked[3]
    loaded = subject_of("agreement")
    shares = blanked_out(asked[0], loaded, None, "are").shares.tolist()
    row = blanked[3].split("2 pictures")[1].split("</td>")[0]
    assert row.endswith(f">{shares[2]:.3f}")
    assert "nan" not in blanked[3]  # tokens that are not blanked out


def test_truth_has_the_foil_of_the_command(answers: Answers) -> None:
    """What is blanked out is compared with the form of the other number, unless something else is asked for."""
    asked = "the pictures of some hat [MASK] scaring marcus.", "agreement", ["value-zeroing"], "", -1
    chosen, named, other = (answers.explain(*asked, truth=True, foil=foil) for foil in ("", "is", "were"))
    assert chosen[3] == named[3] != other[3]
    assert "Why are and not is, its likeliest form of the other number?" in chosen[0]
    assert "likeliest form" not in named[0] and "are rather than were" in other[0]


def test_two_texts_have_two_views(answers: Answers) -> None:
    _, view, *_ = answers.explain("a hat [MASK]", "agreement", ["value-zeroing"], "", -1, other="some hats [MASK]")
    assert view.count("<iframe") == 2
    told, *_ = answers.explain("a hat [MASK]", "agreement", ["value-zeroing"], "", -1, other="a " * 60)
    assert 'role="alert"' in told


def test_empty_layer_is_the_last(answers: Answers) -> None:
    """A visitor may delete the number."""
    empty, last = (answers.explain("a hat [MASK]", "agreement", ["value-zeroing"], "", one) for one in (None, -1))
    assert 'role="status"' in empty[0]
    assert empty[3] == last[3]


def test_text_is_continued(answers: Answers) -> None:
    found = answers.generate("the pictures of some hat", "causal", "value-zeroing", 2, ["special"])
    told, steps = found.told, found.methods
    assert "the pictures of some hat" in told
    assert Path(steps).is_file()


def test_folder_of_a_model(tmp_path: Path) -> None:
    """Where the limits allow it, any folder is a model."""
    _, tokenizer = load_model()
    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    model = BertForMaskedLM(BertConfig(vocab_size=len(tokenizer), **size)).eval()
    for one in (model, tokenizer):
        one.save_pretrained(tmp_path)
    for any_model in (True, False):
        found = Answers(Limits(("agreement",), any_model, 40))
        try:
            told, *_, files = found.explain("a hat [MASK]", str(tmp_path), ["value-zeroing"], "", -1)
            assert f'role="{"status" if any_model else "alert"}"' in told
            if any_model:
                kept = json.loads(next(Path(file) for file in files if file.endswith("maps.json")).read_text())
                assert kept["provenance"]["weights"] == weights_fingerprint(model)
            else:
                assert "is not offered here" in told
                assert not files
        finally:
            found.close()


@pytest.mark.slow
@pytest.mark.parametrize(("host", "any_model"), [("127.0.0.1", True), ("0.0.0.0", False)])
def test_other_addresses_offer_fewer_models(host: str, any_model: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gradio")
    monkeypatch.setenv("GRADIO_ANALYTICS_ENABLED", "False")
    built = []

    def build_and_end(answers: Answers) -> Any:
        answers.close()
        built.extend([answers.limits, page.build(answers)])
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "build", build_and_end)
    with pytest.raises(KeyboardInterrupt):
        demo.serve(host=host)
    limits, blocks = built
    assert limits.any_model == any_model
    fields = {one.elem_id: one for one in blocks.blocks.values() if one.elem_id in ("model", "causal-model")}
    assert len(fields) == 2
    for field in fields.values():
        assert field.allow_custom_value == any_model
        assert [value for _, value in field.choices] == ["agreement", "causal", "minilm"]
        assert ("Or a folder" in field.info) == any_model


@pytest.mark.parametrize(
    ("host", "port", "told"),
    [
        ("127.0.0.1", 99999, "port 99999 is out of range"),
        ("203.0.113.9", None, "cannot serve at 203.0.113.9: "),  # of a network for examples
        ("two words", None, "cannot serve at two words: "),
        ("a" * 80, None, "cannot serve at aaa"),
    ],
)
def test_address_is_checked_first(host: str, port: int | None, told: str) -> None:
    with pytest.raises(ArgumentError, match=told):
        check_address(host, port)


def test_taken_port_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ArgumentError, match=f"port {port} of 127.0.0.1 is taken: pass another port"):
            check_address("127.0.0.1", port)


@pytest.mark.parametrize("where", ["told", "generated"])
def test_answers_come_in_the_order_of_questions(where: str, answers: Answers) -> None:
    """Gradio runs two functions side by side, unless both have one queue: an older answer then came last."""
    fns = page.build(answers).fns.values()
    asked = [fn for fn in fns if fn.fn and any(one.elem_id == where for one in fn.outputs) and fn.targets]
    answering = [fn for fn in asked if fn.name != "example"]  # it only fills the fields
    assert len(answering) > 2
    assert len({fn.concurrency_id for fn in answering}) == 1
    assert {fn.concurrency_limit for fn in answering} <= {1, "default"}
    clicked = [fn for fn in answering if {event for _, event in fn.targets} & {"click", "submit"}]
    assert {fn.trigger_mode for fn in clicked} == {"multiple"}
