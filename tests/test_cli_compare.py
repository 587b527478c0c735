"""The command `compare`: its table, its truth, and what its pictures carry."""

import json
import math
import shlex
from pathlib import Path

import pytest
import torch
from torch import Tensor

from captum_vz.cli import main
from captum_vz.study import compare
from captum_vz.testbed import load_agreement_model
from captum_vz.visualization import read_provenance
from captum_vz.visualization.pictures.description.provenance import weights_fingerprint
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
    model, tokenizer = load_agreement_model()
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
    expected = compare(*load_agreement_model(), SENTENCE, CHOSEN, layer=1)
    out = compared(capsys, "--layer", "1")
    assert out == f"layer 1: how much [MASK] draws on each token\n{expected}\n"


def test_json_is_that_of_the_function(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(compared(capsys, "--layer", "-2", "--token", "pictures", "--json"))
    table = compare(*load_agreement_model(), SENTENCE, CHOSEN, layer=-2, token="pictures")
    assert found == {"text": SENTENCE, "model": "agreement", **json.loads(table.to_json())}
    assert (found["token"], found["layer"], list(found["scores"])) == (2, 2, CHOSEN)


@pytest.mark.parametrize("forms", [(), ("are", "is")])
def test_truth_is_what_blanking_out_does(forms: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    options = [word for pair in zip(("--target", "--foil"), forms, strict=False) for word in pair]
    found = json.loads(compared(capsys, "--truth", "--json", *options))
    answer, falls = falls_by_hand(*forms)
    assert found["answer"] == (f"{forms[0]} rather than {forms[1]}" if forms else answer)
    assert [fall is None for fall in found["falls"]] == [fall is None for fall in falls]
    known = [place for place, fall in enumerate(falls) if fall is not None]
    sizes = [abs(found["falls"][place]) for place in known]
    assert [found["falls"][place] for place in known] == pytest.approx([falls[place] for place in known], abs=1e-5)
    assert [found["truth"][place] for place in known] == pytest.approx([size / sum(sizes) for size in sizes])
    for method, tau in found["kendall"].items():
        scores = [found["scores"][method][place] for place in known]
        assert tau == pytest.approx(tau_by_hand(scores, sizes)), method


def test_truth_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    lines = compared(capsys, "--truth").splitlines()
    answer, falls = falls_by_hand()
    tokens = load_agreement_model()[1](SENTENCE).tokens()
    strongest = sorted((-abs(fall), place) for place, fall in enumerate(falls) if fall is not None)[:3]
    named = ", ".join(f"{tokens[place]} {falls[place]:+.2f}" for _, place in strongest)
    assert lines[-1] == f"blanking out: the probability of {answer} falls without {named}"
    assert lines[-2].startswith("Kendall's tau with blank-out: value-zeroing ")
    assert lines[2].split()[0] == "out"  # the first column


def test_picture_has_the_row_of_the_truth(capsys: pytest.CaptureFixture[str]) -> None:
    for options, shown in (((), False), (("--truth",), True)):
        assert compared(capsys, "--output", "methods.svg", *options).endswith("picture: methods.svg\n")
        drawn = Path("methods.svg").read_text("utf-8")
        assert ("<!-- blanking out -->" in drawn) is shown


def test_model_without_words_has_no_truth(capsys: pytest.CaptureFixture[str]) -> None:
    told = refused(
        capsys, "compare", "a cat sat", "--token", "2", "--model", "minilm", "--methods", "random", "--truth"
    )
    assert "expected logits" in told


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "magic"], "--methods is ['magic']"),
        (["--target", "unheardof"], "'unheardof' is not a single token"),
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
    loaded, _ = load_agreement_model("causal") if model == "causal" else load_agreement_model()
    assert (found["model"], found["method"], found["text"]) == (model, method, arguments[1])
    assert (found["model class"], found["weights"]) == (type(loaded).__name__, weights_fingerprint(loaded))
    assert shlex.split(found["command"]) == ["captum-vz", *arguments, "--output", name]
    assert found["description"]
