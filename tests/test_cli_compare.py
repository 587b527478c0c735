"""The command `compare`: its table, its truth, and what its pictures carry."""

import json
import math
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from captum_vz.cli import main
from captum_vz.study import METHODS, compare
from captum_vz.testbed import load_model
from captum_vz.visualization import read_provenance
from captum_vz.visualization.pictures.files import weights_fingerprint
from tests.command import refused

SENTENCE = "the pictures of some hat [MASK] scaring marcus."
MASK = 6
CHOSEN = ["value-zeroing", "attention", "position"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def compared(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["compare", SENTENCE, "--methods", *CHOSEN, *arguments]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def falls_by_hand(target: str | None = None, foil: str | None = None) -> tuple[str, list[float | None]]:
    """The answer, and how much its probability falls if a token is replaced by [UNK]; None where none is replaced."""
    model, tokenizer = load_model()
    ids = tokenizer(SENTENCE, return_tensors="pt")["input_ids"]
    forms = tokenizer.convert_tokens_to_ids([word for word in (target, foil) if word])

    def probabilities(given: Tensor) -> Tensor:
        with torch.no_grad():
            logits = model(given).logits[0, MASK].double()
        return logits[forms].softmax(-1) if forms else logits.softmax(-1)

    clean = probabilities(ids)
    answer = 0 if forms else int(clean.argmax())
    falls: list[float | None] = []
    for place, number in enumerate(ids[0].tolist()):
        if place == MASK or number in (tokenizer.cls_token_id, tokenizer.sep_token_id):
            falls.append(None)
            continue
        without = ids.clone()
        without[0, place] = tokenizer.unk_token_id
        falls.append((clean[answer] - probabilities(without)[answer]).item())
    return (target or tokenizer.decode([answer])), falls


def tau_by_hand(scores: list[float], sizes: list[float]) -> float:
    """Kendall's tau-b, pair by pair."""
    pairs = [(i, j) for i in range(len(scores)) for j in range(i)]
    signs = [[float(torch.tensor(one[i] - one[j]).sign()) for i, j in pairs] for one in (scores, sizes)]
    both = sum(first * second for first, second in zip(*signs, strict=True))
    return both / math.sqrt(math.prod(sum(sign**2 for sign in one) for one in signs))


def test_table_is_that_of_the_function(capsys: pytest.CaptureFixture[str]) -> None:
    """The numbers, the stars and the mark are those of the printed table. Columns are aligned at the right."""
    expected = compare(load_model(), SENTENCE, CHOSEN, layer=1)
    title, *lines = compared(capsys, "--layer", "1", "--full").splitlines()
    assert title == "layer 1: how much [MASK] draws on each token"
    assert [line.split() for line in lines][2:] == [line.split() for line in str(expected).splitlines()][2:]
    assert len(lines) == 2 + len(expected.tokens)


def test_layer_is_told_only_of_methods_with_layers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", SENTENCE, "--methods", "random", "saliency"]) == 0
    assert capsys.readouterr().out.startswith("the tokens on which [MASK] draws most\n")
    assert main(["compare", SENTENCE, "--methods", "random", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["layer"] is None


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("the hat [MASK] old [MASK].", ["the text has 2 masks, at positions 3, 5: --token 3 is explained."]),
        ("the [mask] hat", ["[mask] is read as text", "the text has no mask: its last token is explained, --token"]),
        ("the \N{CJK UNIFIED IDEOGRAPH-732B} [MASK]", ["does not know what stands at position 2"]),
    ],
)
def test_what_may_not_be_meant_is_told(text: str, told: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Once, also where the page explains the text by each method."""
    for options in ([], ["--html", "page.html"]):
        assert main(["compare", text, "--methods", "value-zeroing", "random", *options]) == 0
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == len(told)
        for line, part in zip(lines, told, strict=True):
            assert part in line


def test_target_without_use_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", SENTENCE, "--methods", "attention", "--target", "are"]) == 0
    assert "--target changes no score" in capsys.readouterr().err
    assert main(["compare", SENTENCE, "--methods", "attention", "value-zeroing-effect", "--target", "are"]) == 0
    assert capsys.readouterr().err == ""


def test_foil_alone_is_compared_with_the_prediction(capsys: pytest.CaptureFixture[str]) -> None:
    """The model predicts "are": with the foil alone the numbers are those with this target."""
    both = json.loads(compared(capsys, "--truth", "--json", "--target", "are", "--foil", "is"))
    assert json.loads(compared(capsys, "--truth", "--json", "--foil", "is")) == both
    assert both["answer"] == "are rather than is"


def test_reason_of_refused_methods_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "a cat sat", "--token", "2", "--model", "minilm", "--methods", "all"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("without ")]
    assert len(lines) == 1
    assert lines[0].startswith("without value-zeroing-effect, value-zeroing-effect-layer: BertModel gives no logits")


def test_json_is_that_of_the_function(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(compared(capsys, "--layer", "-2", "--token", "pictures", "--json"))
    table = compare(load_model(), SENTENCE, CHOSEN, layer=-2, token="pictures")
    assert found == {"text": SENTENCE, "model": "agreement", **json.loads(table.to_json())}
    assert (found["token"], found["layer"], list(found["scores"])) == (2, 2, CHOSEN)


@pytest.mark.parametrize("forms", [(), ("are", "is")])
def test_truth_is_what_blanking_out_does(forms: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    given = forms or ("are",)  # the prediction; without a target, a foil is chosen
    options = [word for pair in zip(("--target", "--foil"), given, strict=False) for word in pair]
    found = json.loads(compared(capsys, "--truth", "--json", *options))
    answer, falls = falls_by_hand(*forms)
    assert found["answer"] == (f"{forms[0]} rather than {forms[1]}" if forms else answer)
    assert [fall is None for fall in found["falls"]] == [fall is None for fall in falls]
    known = [place for place, fall in enumerate(falls) if fall is not None]
    sizes = [abs(found["falls"][place]) for place in known]
    assert [found["falls"][place] for place in known] == pytest.approx([falls[place] for place in known], abs=1e-5)
    assert [found["truth"][place] for place in known] == pytest.approx([size / sum(sizes) for size in sizes])
    clear = sum(size > max(sizes) / 100 for size in sizes)
    assert (clear < 4) is bool(forms)  # with two forms, one word decides
    for method, scores in found["scores"].items():
        both = sum(min(scores[place], size / sum(sizes)) for place, size in zip(known, sizes, strict=True))
        assert found["agreement"][method] == pytest.approx(both), method
        tau = found["kendall"][method]
        assert tau == (None if forms else pytest.approx(tau_by_hand([scores[place] for place in known], sizes))), method


def test_foil_of_the_embedded_models(capsys: pytest.CaptureFixture[str]) -> None:
    """The question of these models is number: the foil is the likeliest form of the other number."""
    alone, named = (json.loads(compared(capsys, "--truth", "--json", *more)) for more in ((), ("--foil", "is")))
    assert alone == named
    assert "why are and not is, its likeliest form of the other number?" in compared(capsys, "--truth")
    assert "its likeliest form" not in compared(capsys, "--truth", "--target", "are")


def test_competing_answers_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    """A model whose question nobody knows, here the same model in a folder."""
    for one in load_model():
        one.save_pretrained("folder")
    capsys.readouterr()
    line = "are 0.51 competes with were 0.49: --foil were asks why are and not were"
    assert line in compared(capsys, "--truth", "--model", "folder")
    assert "competes" not in compared(capsys, "--truth", "--model", "folder", "--foil", "were")


@pytest.mark.parametrize("columns", [60, 80, 200])
@pytest.mark.parametrize("shell", [False, True])
def test_methods_are_lines_that_fit(
    columns: int, shell: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At most 80 columns, at most as many as the terminal has, and each method's strongest token first."""
    monkeypatch.setenv("COLUMNS", str(columns))
    for module in ("output", "compare"):
        monkeypatch.setattr(f"captum_vz.cli.{module}.room", lambda: columns)
    monkeypatch.setattr("captum_vz.cli.output.is_terminal", lambda _: shell)
    methods = ["value-zeroing-effect-layer", "value-zeroing-rollout", "attention", "alti"]
    text = "the pictures of some extraordinarily hat [MASK] scaring marcus."
    assert main(["compare", text, "--methods", *methods, "--truth"]) == 0
    out = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
    lines = [line for line in out.splitlines() if line.split()[:1] and line.split()[0] in methods and "." in line]
    order = [line.split()[0] for line in lines]
    assert sorted(order) == sorted(methods)
    assert max(map(len, lines)) <= min(columns, 80)
    if columns >= 80:
        found = compare(load_model(), text, methods, foil="is", truth=True)
        for line in lines:
            name, agrees, token, share = line.split()[:4]
            best = int(found.shares[name].argmax())
            assert float(agrees) == pytest.approx(found.agreement[name], abs=0.0051)
            assert found.tokens[best].startswith(token.rstrip("…"))
            assert float(share) == pytest.approx(
                float(found.shares[name][best]), abs=0.051 if share == "1.0" else 0.0051
            )
        same = [found.agreement[name] for name in order if METHODS[name].joined is not None]
        assert same == sorted(same, reverse=True)


def test_truth_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    lines = compared(capsys, "--truth", "--full", "--target", "are", "--model", "agreement").splitlines()
    answer, falls = falls_by_hand()
    tokens = load_model()[1](SENTENCE).tokens()
    strongest = sorted((-abs(fall), place) for place, fall in enumerate(falls) if fall is not None)[:3]
    named = ", ".join(f"{tokens[place]} {falls[place]:+.2f}" for _, place in strongest)
    assert lines[-1] == f"blanking out: the probability of {answer} falls most without: {named}"
    assert lines[-2].split()[:2] == ["Kendall's", "tau"]
    assert lines[-3].split()[0] == "agrees"
    assert lines[2].split()[:2] == ["token", "out"]  # the first column
    shown = [line.split()[-len(CHOSEN) - 1] for line in lines[3:-3]]
    assert [fall for fall in shown if fall[0] in "+-"] == [f"{fall:+.3f}" for fall in falls if fall is not None]


def test_rises_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    """Without some token a probability rises, so that "falls" alone would be false."""
    text = "the pictures of some hat [MASK] small."
    asked = ["compare", text, "--methods", "random", "--truth", "--target", "are", "--foil", "were"]
    assert main([*asked, "--json"]) == 0
    falls = [fall for fall in json.loads(capsys.readouterr().out)["falls"] if fall is not None]
    assert max(falls, key=abs) < 0 < max(falls)
    assert main(asked) == 0
    said = "the probability of are rather than were changes most (+ it falls, - it rises) without: "
    assert said in capsys.readouterr().out


def test_picture_has_the_row_of_the_truth(capsys: pytest.CaptureFixture[str]) -> None:
    for options, shown in (((), False), (("--truth",), True)):
        assert compared(capsys, "--output", "methods.svg", *options).endswith("picture: methods.svg\n")
        drawn = Path("methods.svg").read_text("utf-8")
        assert (">blanking out</text>" in drawn) is shown


def test_model_without_words_has_no_truth(capsys: pytest.CaptureFixture[str]) -> None:
    told = refused(
        capsys, "compare", "a cat sat", "--token", "2", "--model", "minilm", "--methods", "random", "--truth"
    )
    assert "expected logits" in told


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layer", "4"], "--layer 4 is out of range"),
        (["--token", "zebra", "--truth"], "--token 'zebra' is none of the tokens"),
        (["--target", "zebra", "--truth"], "--target is 'zebra', which is no single token"),
        (["--model", "minilm", "--truth"], "expected logits"),
    ],
)
def test_nothing_is_computed_before_an_error(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def computed(batch: Any) -> Any:
        raise NotImplementedError

    monkeypatch.setitem(METHODS, "value-zeroing", replace(METHODS["value-zeroing"], rows=computed))
    assert message in refused(capsys, "compare", SENTENCE, "--methods", "value-zeroing", *arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "magic"], "argument --methods: there is no method 'magic'. Pass some of value-zeroing"),
        (["--target", "unheardof"], "--target is 'unheardof', which is no single token"),
        (["--foil", ""], "--foil is '', which is no single token"),
        (["--token", "99"], "--token 99 is out of range"),
        (["--layer", "4"], "--layer 4 is out of range"),
    ],
)
def test_bad_comparison_says_why(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in refused(capsys, "compare", SENTENCE, *arguments)


# What pictures carry


@pytest.mark.parametrize(
    ("arguments", "model", "method", "name"),
    [
        (["explain", SENTENCE, "--layer", "0"], "agreement", "value-zeroing", "maps.png"),
        (["explain", SENTENCE, "--method", "random"], "agreement", "random", "scores.svg"),
        (["compare", SENTENCE, "--methods", "attention", "random"], "agreement", "attention, random", "methods.png"),
        (
            ["generate", "the pictures of <b> hat", "--max-new-tokens", "2"],
            "causal",
            "value-zeroing-rollout",
            "steps.svg",
        ),
    ],
)
def test_picture_carries_its_provenance(
    arguments: list[str], model: str, method: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--output", name]) == 0
    capsys.readouterr()
    found = read_provenance(name)
    loaded, _ = load_model("causal") if model == "causal" else load_model()
    assert (found["model"], found["method"], found["text"]) == (model, method, arguments[1])
    assert (found["model class"], found["weights"]) == (type(loaded).__name__, weights_fingerprint(loaded))
    assert shlex.split(found["command"]) == ["captum-vz", *arguments, "--output", name]
    assert found["description"]
