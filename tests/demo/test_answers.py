"""What the demo's page shows: limits, files, and text that stays text."""

import json
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from transformers import BertConfig, BertForMaskedLM

import captum_vz
from captum_vz import demo
from captum_vz.demo.answers import Answers, Limits
from captum_vz.errors import ArgumentError
from captum_vz.study.comparison import truth_of
from captum_vz.subjects import subject_of
from captum_vz.testbed import load_model
from captum_vz.visualization import read_provenance, weights_fingerprint

HOSTILE = "<script>alert(1)</script> [MASK]"


@pytest.fixture
def answers() -> Iterator[Answers]:
    with closing(Answers(Limits(("agreement", "causal"), False, 40))) as found:
        yield found


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
    told, _, grid, shares, _, files = answers.explain(HOSTILE, "agreement", ["value-zeroing", "attention"], "", -1)
    assert "[MASK], position" in told
    assert "<script" not in told + shares
    assert Path(grid).is_file()
    paths = {Path(file).name: Path(file) for file in files}
    assert "methods.csv" in paths
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
    told, _, _, _, steps, files = answers.generate(
        "the pictures of some hat", "causal", "value-zeroing", 2, ["special"]
    )
    assert "the pictures of some hat" in told
    scores = next(Path(file) for file in files if file.endswith("scores.json"))
    for one in (read_provenance(steps), json.loads(scores.read_text())["provenance"]):
        assert (one["model class"], one["method"]) == ("LlamaForCausalLM", "value-zeroing")
        assert one["text"] == "the pictures of some hat"


def test_method_that_refuses_is_left_out() -> None:
    """MiniLM has no head: methods of the model's output cannot explain it. The others are shown."""
    with closing(Answers(Limits(("minilm",), False, 40))) as unlimited:
        told, view, *_ = unlimited.explain("a cat sat", "minilm", ["value-zeroing-effect", "value-zeroing"], "", None)
        assert 'role="status"' in told
        assert "Without value-zeroing-effect: BertModel gives no logits" in told
        assert "value-zeroing" in view
        told, *_ = unlimited.explain("a cat sat", "minilm", ["value-zeroing-effect"], "", -1)
        assert 'role="alert"' in told


def test_generated_text_must_fit() -> None:
    with closing(Answers(Limits(("causal",), False, 128))) as larger:
        told, *_ = larger.generate("the hat " * 60, "causal", "value-zeroing", 32, [])
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
    shares = truth_of(asked[0], loaded, None, "are").shares.tolist()
    row = blanked[3].split("2 pictures")[1].split("</td>")[0]
    assert row.endswith(f">{shares[2]:.3f}")
    assert "nan" not in blanked[3]  # tokens that are not blanked out


def test_truth_has_the_foil_of_the_command(answers: Answers) -> None:
    """What is blanked out is compared with the form of the other number, unless something else is asked for."""
    asked = "the pictures of some hat [MASK] scaring marcus.", "agreement", ["value-zeroing"], "", -1
    chosen, named, other = (answers.explain(*asked, truth=True, foil=foil) for foil in ("", "is", "were"))
    assert chosen[3] == named[3] != other[3]
    assert "Why are and not is, its likeliest form of the other number?" in chosen[0]
    assert "likeliest form" not in named[0] and "lead of are over were" in other[0]


def test_two_texts_have_two_views(answers: Answers) -> None:
    _, view, *_ = answers.explain("a hat [MASK]", "agreement", ["value-zeroing"], "", -1, other="some hats [MASK]")
    assert view.count("<iframe") == 2
    told, *_ = answers.explain("a hat [MASK]", "agreement", ["value-zeroing"], "", -1, other="a " * 60)
    assert 'role="alert"' in told


def test_folder_of_a_model(tmp_path: Path) -> None:
    """Where the limits allow it, any folder is a model."""
    _, tokenizer = load_model()
    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    model = BertForMaskedLM(BertConfig(vocab_size=len(tokenizer), **size)).eval()
    for one in (model, tokenizer):
        one.save_pretrained(tmp_path)
    asked = "a hat [MASK]", str(tmp_path), ["value-zeroing"], "", -1
    with closing(Answers(Limits(("agreement",), False, 40))) as found:
        assert "is not offered here" in found.explain(*asked).told
    with closing(Answers(Limits(("agreement",), True, 40))) as found:
        *_, files = found.explain(*asked)
        kept = json.loads(next(Path(file) for file in files if file.endswith("maps.json")).read_text())
    assert kept["provenance"]["weights"] == weights_fingerprint(model)


@pytest.mark.slow
@pytest.mark.parametrize(("host", "any_model"), [("127.0.0.1", True), ("0.0.0.0", False)])
def test_other_addresses_offer_fewer_models(host: str, any_model: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gradio")
    monkeypatch.setenv("GRADIO_ANALYTICS_ENABLED", "False")
    built, build = [], demo.build

    def build_and_end(answers: Answers) -> Any:
        answers.close()
        built.extend([answers.limits, build(answers)])
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
        demo.check_address(host, port)
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        with pytest.raises(ArgumentError, match=f"port {taken} of 127.0.0.1 is taken: pass another port"):
            demo.check_address("127.0.0.1", taken)


@pytest.mark.parametrize("where", ["told", "generated"])
def test_answers_come_in_the_order_of_questions(where: str, answers: Answers) -> None:
    """Gradio runs two functions side by side, unless both have one queue: an older answer then came last."""
    fns = demo.build(answers).fns.values()
    asked = [fn for fn in fns if fn.fn and any(one.elem_id == where for one in fn.outputs) and fn.targets]
    answering = [fn for fn in asked if fn.name != "example"]  # it only fills the fields
    assert len(answering) > 2
    assert len({fn.concurrency_id for fn in answering}) == 1
    assert {fn.concurrency_limit for fn in answering} <= {1, "default"}
    clicked = [fn for fn in answering if {event for _, event in fn.targets} & {"click", "submit"}]
    assert {fn.trigger_mode for fn in clicked} == {"multiple"}
