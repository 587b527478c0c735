"""What the demo's page shows: limits, files, and text that stays text."""

import html
import json
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

import captum_vz
from captum_vz import demo
from captum_vz.demo.answers import Answer, Answers
from captum_vz.errors import ArgumentError
from captum_vz.study.comparison import truth_of
from captum_vz.subjects import subject_of
from captum_vz.testbed import load_model
from captum_vz.visualization import read_provenance, weights_fingerprint
from tests.explaining.models import SOUND, SPEECH, image_classifier, sound_model, t5, write_sound

HOSTILE = "<script>alert(1)</script> [MASK]"
NAME = "value-zeroing"
SENTENCE = "the pictures of some hat [MASK] scaring marcus."


@pytest.fixture
def answers() -> Iterator[Answers]:
    with closing(Answers(("agreement", "causal"), False, 40)) as found:
        yield found


def answered(answers: Answers, *wanted: Any, **more: Any) -> Answer:
    """The last answer of its steps."""
    return [*answers.steps(*wanted, **more)][-1]


def test_limits_are_told(answers: Answers) -> None:
    for text, model, message in (
        ("", "agreement", "The text is empty"),
        ("hat " * 60, "agreement", "this page takes at most 40"),
        ("h" * 5000, "agreement", "this page takes at most 640"),
        ("a hat", "/etc", "is not offered here"),
    ):
        told, *_ = answered(answers, text, model, [NAME], "", -1)
        assert 'role="alert"' in told
        assert message in told
    with closing(Answers(("causal",), False, 128)) as larger:
        told, *_ = larger.generate("the hat " * 60, "causal", NAME, 32, [])
    assert "The text is 121 tokens long, and the model takes at most 128: ask for at most 8 new tokens." in told


def test_encoder_decoder_shows_what_it_writes(saved: Callable[..., str]) -> None:
    _, tokenizer = load_model()
    name = saved(t5(vocabulary=len(tokenizer)), tokenizer)
    with closing(Answers((name,), False, 40)) as page:
        told, view, *_, picture, files = answered(page, "the hat", name, [NAME], "", -1)
        refused, *_ = answered(page, "the hat", name, [NAME], "", -1, truth=True)
        (numbers,) = (json.loads(Path(one).read_text()) for one in files if one.endswith("scores.json"))
    found = captum_vz.explain(name, "the hat", method=NAME, layer=-1)
    assert numbers["scores"] == found.to_dict()["scores"]
    assert picture.endswith("steps.png")
    assert f"the hat … {found.text}" in told
    assert "<iframe" in view
    assert "nothing is blanked out" in refused


def test_files_say_where_numbers_come_from(answers: Answers) -> None:
    """The package, the model and its weights, the method and the text, in pictures, numbers and the page."""
    model, _ = load_model()
    weights = weights_fingerprint(model)
    told, _, grid, shares, _, files = answered(answers, HOSTILE, "agreement", ["value-zeroing", "attention"], "", -1)
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
    for name, method in (("layers.png", "value-zeroing"), ("methods.svg", "value-zeroing, attention")):
        found = read_provenance(paths[name])
        assert {key: found[key] for key in expected} == expected | {"method": method}
    page = paths["page.html"].read_text("ascii")
    assert weights in page
    assert "captum_vz " in page
    assert "<script>alert(1)" not in page
    prompt = "the pictures of some hat"
    told, _, _, _, steps, files = answers.generate(prompt, "causal", "value-zeroing", 2, ["special"])
    assert prompt in told
    scores = next(Path(file) for file in files if file.endswith("scores.json"))
    for one in (read_provenance(steps), json.loads(scores.read_text())["provenance"]):
        assert (one["model class"], one["method"]) == ("LlamaForCausalLM", "value-zeroing")
        assert one["text"] == prompt


def test_method_that_refuses_is_left_out() -> None:
    """MiniLM has no head: methods of the model's output cannot explain it. The others are shown."""
    with closing(Answers(("minilm",), False, 40)) as unlimited:
        told, view, *_ = answered(unlimited, "a cat sat", "minilm", ["value-zeroing-effect", "value-zeroing"], "", None)
        assert 'role="status"' in told
        assert "Without value-zeroing-effect: BertModel gives no logits" in told
        assert "value-zeroing" in view
        told, *_ = answered(unlimited, "a cat sat", "minilm", ["value-zeroing-effect"], "", -1)
        assert 'role="alert"' in told


def test_view_comes_before_pictures(answers: Answers) -> None:
    first, last = answers.steps("a hat [MASK]", "agreement", [NAME], "", -1, other="some hats [MASK]")
    assert first[:2] == last[:2] and first.view.count("<iframe") == 2
    assert (first.layers, first.methods, first.files) == (None, None, None)
    assert Path(last[2]).is_file()
    assert 'role="alert"' in answered(answers, "a hat [MASK]", "agreement", [NAME], "", -1, other="a " * 60).told


def test_truth_is_that_of_the_command(answers: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    """The foil is the form of the other number, unless something else is asked for. No picture is drawn."""
    for drawing in ("captum_vz.result.Explanation.plot", "captum_vz.demo.answers.draw_comparison"):
        monkeypatch.setattr(drawing, lambda *_, **__: Figure())
    ask = partial(answered, answers, SENTENCE, "agreement", [NAME], "", -1)
    assert "blanking out" not in ask().shares
    chosen, named, other = (ask(truth=True, foil=foil) for foil in ("", "is", "were"))
    assert chosen.shares == named.shares != other.shares
    assert "Why are and not is, its likeliest form of the other number?" in chosen.told
    assert "likeliest form" not in named.told and "lead of are over were" in other.told
    expected = truth_of(SENTENCE, subject_of("agreement"), None, "are", "is").shares.tolist()
    row = chosen.shares.split("2 pictures")[1].split("</td>")[0]
    assert row.endswith(f">{expected[2]:.3f}")
    assert "nan" not in chosen.shares  # tokens that are not blanked out


@pytest.mark.slow
@pytest.mark.parametrize(("host", "any_model"), [("127.0.0.1", True), ("0.0.0.0", False)])
def test_other_addresses_offer_fewer_models(host: str, any_model: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gradio")
    monkeypatch.setenv("GRADIO_ANALYTICS_ENABLED", "False")
    built, build = [], demo.build

    def build_and_end(answers: Answers) -> Any:
        answers.close()
        built.extend([answers, build(answers)])
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "build", build_and_end)
    with pytest.raises(KeyboardInterrupt):
        demo.serve(host=host)
    page, blocks = built
    assert page.any_model == any_model
    fields = {one.elem_id: one for one in blocks.blocks.values() if one.elem_id in ("model", "causal-model")}
    assert len(fields) == 2
    for field in fields.values():
        assert field.allow_custom_value == any_model
        assert [value for _, value in field.choices] == ["agreement", "causal", "minilm"]
        assert ("Or a folder" in field.info) == any_model


@pytest.mark.parametrize(
    ("host", "port", "told"),
    [
        ("127.0.0.1", 99999, "99999 is out of"),
        ("203.0.113.9", None, "at 203.0.113.9"),  # of a network for examples
        ("two words", None, "at two words: "),
        ("a" * 80, None, "cannot serve at aaa"),
    ],
)
def test_address_is_checked_first(host: str, port: int | None, told: str) -> None:
    with pytest.raises(ArgumentError, match=told):
        demo.check_address(host, port)
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        with pytest.raises(ArgumentError, match=f"port {taken} of"):
            demo.check_address("127.0.0.1", taken)


def test_answers_come_in_the_order_of_questions(answers: Answers) -> None:
    """Gradio runs two functions side by side, unless both have one queue: an older answer then came last."""
    fns = demo.build(answers).fns.values()
    for where in ("told", "generated"):
        asked = [fn for fn in fns if fn.fn and any(one.elem_id == where for one in fn.outputs) and fn.targets]
        answering = [fn for fn in asked if fn.name != "example"]  # it only fills the fields
        assert len(answering) > 2
        assert len({fn.concurrency_id for fn in answering}) == 1
        assert {fn.concurrency_limit for fn in answering} <= {1, "default"}
        clicked = [fn for fn in answering if {event for _, event in fn.targets} & {"click", "submit"}]
        assert {fn.trigger_mode for fn in clicked} == {"multiple"}


# Images and sound

SHOWN = ["value-zeroing", "value-zeroing-effect"]


@pytest.fixture
def any_model() -> Iterator[Answers]:
    with closing(Answers(("agreement",), True, 40)) as found:
        yield found


def of_kind(kind: str, samples: int = 4000) -> tuple[Any, str]:
    """A model with its processor, and a file for it."""
    random = np.random.default_rng(0)
    if kind == "image":
        Image.fromarray(random.integers(0, 255, (8, 8, 3), dtype=np.uint8)).save("file.png")
        return image_classifier(), "file.png"
    sound = random.integers(-9000, 9000, samples, dtype=np.int16)
    return sound_model(SOUND if kind == "sound" else SPEECH), str(write_sound(Path("file.wav"), sound))


def explained(any_model: Answers, model: str, file: str | None, **more: Any) -> Answer:
    return answered(any_model, "this text is not read", model, SHOWN, "", -1, file=file, **more)


@pytest.mark.parametrize("kind", ["image", "sound", "speech"])
def test_numbers_are_those_of_python(kind: str, any_model: Answers, saved: Callable[..., str], folder: Path) -> None:
    parts, file = of_kind(kind)
    name = saved(*parts)
    told, view, layers, shares, by_method, files = explained(any_model, name, file)
    assert "alert" not in told
    assert "<iframe" in view
    assert layers and by_method and Path(layers).is_file() and Path(by_method).is_file()
    (numbers,) = (json.loads(Path(one).read_text()) for one in files or () if one.endswith("maps.json"))
    for method in SHOWN:
        found = captum_vz.explain(name, file, method=method)
        assert numbers["methods"][method]["scores"] == found.scores.tolist()
        assert numbers["tokens"] == found.tokens
        assert all(token in shares for token in found.tokens)
        assert found.prediction.rstrip(".") in view or html.escape(found.prediction) in view


def test_table_of_many_sources(any_model: Answers, saved: Callable[..., str], folder: Path) -> None:
    """The table has the twenty largest sources and the explained one. The pictures have all."""
    parts, file = of_kind("sound", 40_000)
    name = saved(*parts)
    shares = explained(any_model, name, file).shares
    found = captum_vz.explain(name, file, method=SHOWN[0])
    assert len(found.tokens) > 90
    largest = {*found.scores.topk(20).indices.tolist(), found.token}
    assert {int(place) for place in re.findall(r">(\d+) frame", shares)} == largest
    assert "where value-zeroing is largest" in shares


def test_what_does_not_fit(any_model: Answers, saved: Callable[..., str], folder: Path) -> None:
    parts, image = of_kind("image")
    name = saved(*parts)
    for model, file, more, message in (
        (name, None, {}, "ViTForImageClassification, which takes an image: choose a file in the options"),
        (name, __file__, {}, "is no image that Pillow reads"),
        (name, image, {"truth": True}, "only texts are blanked out"),
        (name, image, {"other": "a text"}, "only texts are blanked out, or compared"),
        ("agreement", image, {}, "BertForMaskedLM, which reads a text: take the file away"),
    ):
        told = explained(any_model, model, file, **more).told
        assert 'role="alert"' in told and message in told
    assert "takes no text" in any_model.generate("a text", name, "value-zeroing", 2, []).told
