"""The command's pages, tables and plain output, the examples of its help, and what it does without the extras."""

import argparse
import builtins
import importlib
import io
import json
import re
import shlex
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from captum_vz.cli import main, parser
from captum_vz.study import compare
from captum_vz.testbed import load_model
from captum_vz.visualization import read_provenance
from captum_vz.visualization.pictures.files import weights_fingerprint
from tests.command import Output, forget, ran
from tests.view.pages import Page

SENTENCE = "the pictures of some hat [MASK] scaring marcus."
HOSTILE = """<u> & "hat" 'x' </script> [MASK]"""
NAMESPACE = "http://www.w3.org/2000/svg"  # a name, which no browser asks for
pytestmark = pytest.mark.usefixtures("folder")


def page_of(capsys: Output, *arguments: str) -> Page:
    """The page that the command writes, after what is true of all pages."""
    assert ran(capsys, *arguments, "--html", "page.html").out.endswith("page: page.html\n")
    document = Path("page.html").read_bytes().decode("ascii")
    assert document.lower().startswith("<!doctype html>")
    found = Page(document)
    assert found.loaded == []
    rest = re.sub(r"base64,[\w+/=]+", "", document).replace(NAMESPACE, "")
    assert not re.search(r"(?i)https?:|@import|url\(|fetch\(|XMLHttpRequest|WebSocket|sendBeacon", rest)
    return found


@pytest.mark.parametrize(
    "arguments",
    [
        ["explain", HOSTILE],
        ["explain", HOSTILE, "--method", "random"],
        ["compare", HOSTILE, "--methods", "value-zeroing", "random", "--truth"],
        ["generate", HOSTILE.replace("[MASK]", "it"), "--max-new-tokens", "2", "--mask", "stop", "special"],
    ],
)
def test_page_has_the_text_as_text(arguments: list[str], capsys: Output) -> None:
    found = page_of(capsys, *arguments)
    assert "u" not in found.tags
    assert arguments[1] in found.text


def test_pages_of_methods_and_of_a_study(capsys: Output) -> None:
    found = page_of(capsys, "compare", SENTENCE, "--methods", "value-zeroing", "attention", "--truth")
    assert found.tags.count("iframe") == 1
    assert found.tags.count("table") == 2  # that of the view, for readers without scripts, and that of the methods
    assert "the lead of are over is changes most (+ it falls, - it rises) without: pictures" in found.text
    assert "agrees with blank-out: value-zeroing 0." in found.text
    options = ["--grammar", "4", "--methods", "random", "position", "--folder", "out"]
    found = page_of(capsys, "study", *options)
    assert "img" in found.tags
    assert "script" not in found.tags
    assert all(name in found.text for name in ("agreement", "random", "position"))


COMMANDS = [
    ["explain", SENTENCE],
    ["compare", SENTENCE, "--methods", "value-zeroing", "random", "--truth"],
    ["generate", "the pictures of some hat", "--max-new-tokens", "2"],
    ["generate", "the pictures of some hat", "--max-new-tokens", "2", "--step", "0"],
    ["verify", "some hat [MASK] small.", "--verbose"],
]


@pytest.mark.parametrize("arguments", COMMANDS, ids=lambda one: " ".join(one[:1] + one[-1:]))
def test_output_is_plain_unless_a_terminal_shows_colors(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    """Piped, under NO_COLOR and in a terminal without colors, the output is the same, without escape sequences."""
    piped = ran(capsys, *arguments)
    assert "\x1b" not in piped.out + piped.err
    assert not set("│┃━╭╮") & set(piped.out)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    for name, value in (("NO_COLOR", "1"), ("TERM", "dumb")):
        with monkeypatch.context() as inner:
            inner.setenv(name, value)
            assert ran(capsys, *arguments) == piped
    assert ("\x1b[" in ran(capsys, *arguments).out) is (arguments[0] != "verify")


class Terminal(io.StringIO):
    """A stderr that moves its cursor."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        (["explain", SENTENCE, "--output", "x.png"], ["loading agreement", "maps of 4 layers", "drawing x.png"]),
        (["compare", SENTENCE, "--methods", "attention", "random"], ["methods: 0/2", "methods: 2/2, random"]),
        (["compare", SENTENCE, "--methods", "random", "--truth"], ["blanking out each token"]),
        (["generate", "the hat", "--max-new-tokens", "2"], ["value-zeroing-rollout: 2 new tokens"]),
    ],
)
def test_progress_is_shown_on_terminals_only(
    arguments: list[str], texts: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    out, err = ran(capsys, *arguments)
    assert err == ""
    with monkeypatch.context() as patch:
        terminal = Terminal()
        patch.setattr(sys, "stderr", terminal)
        assert main(arguments) == 0
    assert capsys.readouterr().out == out
    assert all(text in terminal.getvalue() for text in texts)
    assert terminal.getvalue().endswith("\x1b[K\r")  # nothing stays


EXAMPLES = [
    (name, line.strip())
    for action in parser()._actions
    if isinstance(action, argparse._SubParsersAction)
    for name, command in action.choices.items()
    for line in (command.epilog or "").splitlines()
    if line.startswith("  captum-vz ")
]


@pytest.mark.parametrize(("name", "line"), EXAMPLES)
def test_example_of_the_help_is_accepted(name: str, line: str, capsys: Output) -> None:
    program, *words = shlex.split(line)
    options = parser().parse_args(words)
    assert (program, options.command) == ("captum-vz", name)
    with pytest.raises(SystemExit) as end:
        main([name, "--help"])
    assert end.value.code == 0
    assert f"  {line}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["explain", SENTENCE, "--output", "x.png", "--html", "x.html"], None),
        (["compare", SENTENCE, "--methods", "value-zeroing"], None),
        (["generate", "the hat", "--max-new-tokens", "1"], None),
        (["verify", "some hat"], None),
        (["compare", SENTENCE, "--methods", "random", "--truth"], 'pip install "captum-vz[study]"'),
        (["study", "--grammar", "2", "--folder", "s"], 'pip install "captum-vz[study]"'),
        (["demo"], 'pip install "captum-vz[demo]"'),
    ],
)
def test_extras_are_needed_only_where_they_are_named(
    arguments: list[str], told: str | None, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    forget(monkeypatch, "captum_vz.cli", "captum_vz.app", "captum_vz.demo", "captum_vz.study", "captum_vz.metrics")
    extra = ("accelerate", "gradio", "pandas", "pyarrow", "scipy", "sklearn")
    found = builtins.__import__

    def without(name: str, *rest: Any, **named: Any) -> Any:
        importer = (rest[0] or {}).get("__name__", "") if rest else ""
        if name.split(".")[0] in extra and importer.startswith("captum_vz"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return found(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    status = importlib.import_module("captum_vz.cli").main(arguments)
    out, err = capsys.readouterr()
    assert status == (2 if told else 0), err
    assert (told or "") in err
    assert err.count("\n") == (1 if told else 0)
    assert bool(out) is not bool(told)


# `compare`: its table, its truth, and what pictures carry


CHOSEN = ["value-zeroing", "attention", "position"]


def compared(capsys: Output, *arguments: str) -> str:
    out, err = ran(capsys, "compare", SENTENCE, "--methods", *CHOSEN, *arguments)
    assert err == ""
    return out


def test_what_is_told_of_layers_targets_and_rises(capsys: Output) -> None:
    by = partial(ran, capsys, "compare", SENTENCE, "--methods")
    assert by("random", "saliency").out.startswith("the tokens on which [MASK] draws most\n")
    assert json.loads(by("random", "--json").out)["layer"] is None
    assert "--target changes no score" in by("attention", "--target", "are").err
    assert by("attention", "value-zeroing-effect", "--target", "are").err == ""
    # Without some token the lead rises, so that "falls" alone would be false.
    text = "the pictures of some hat [MASK] small."
    asked = ["compare", text, "--methods", "random", "--truth", "--target", "are", "--foil", "were"]
    falls = [fall for fall in json.loads(ran(capsys, *asked, "--json").out)["falls"] if fall is not None]
    assert max(falls, key=abs) < 0 < max(falls)
    assert main(asked) == 0
    said = "the lead of are over were changes most (+ it falls, - it rises) without: "
    assert said in capsys.readouterr().out


def test_competing_answers_are_told(saved: Callable[..., str], capsys: Output) -> None:
    """A model whose question nobody knows, here the same model in a folder."""
    name = saved(*load_model())
    line = "are 0.51 competes with were 0.49: --foil were asks why are and not were"
    assert line in compared(capsys, "--truth", "--model", name)
    assert "competes" not in compared(capsys, "--truth", "--model", name, "--foil", "were")


def test_picture_and_order_of_methods(capsys: Output) -> None:
    for options, shown in (((), False), (("--truth",), True)):
        assert compared(capsys, "--output", "methods.svg", *options).endswith("picture: methods.svg\n")
        drawn = Path("methods.svg").read_text("utf-8")
        assert (">blanking out</text>" in drawn) is shown
    agreement = compare("agreement", SENTENCE, CHOSEN, foil="is", truth=True).agreement
    _, heads, *lines = compared(capsys, "--truth", "--foil", "is").splitlines()
    assert heads.split()[:2] == ["method", "agrees"]
    expected = sorted(agreement.items(), key=lambda one: -one[1])
    assert [line.split()[:2] for line in lines[:3]] == [[name, f"{one:.2f}"] for name, one in expected]


@pytest.mark.parametrize(
    ("arguments", "model", "method", "name"),
    [
        (["explain", SENTENCE, "--layer", "0"], "agreement", "value-zeroing", "maps.png"),
        (["explain", SENTENCE, "--method", "random"], "agreement", "random", "scores.svg"),
        (["compare", SENTENCE, "--methods", "attention", "random"], "agreement", "attention, random", "methods.png"),
        (["generate", "the <b> hat", "--max-new-tokens", "2"], "causal", "value-zeroing-rollout", "steps.svg"),
    ],
)
def test_picture_carries_its_provenance(
    arguments: list[str], model: str, method: str, name: str, capsys: Output
) -> None:
    ran(capsys, *arguments, "--output", name)
    found = read_provenance(name)
    loaded, _ = load_model("causal") if model == "causal" else load_model()
    assert (found["model"], found["method"], found["text"]) == (model, method, arguments[1])
    assert (found["model class"], found["weights"]) == (type(loaded).__name__, weights_fingerprint(loaded))
    assert shlex.split(found["command"]) == ["captum-vz", *arguments, "--output", name]
    assert found["description"]


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        (["--layer", "-2", "--token", "pictures"], {"layer": -2, "token": "pictures"}),
        (["--truth", "--foil", "is"], {"truth": True, "foil": "is"}),
        (["--patch", "pictures", "picture"], {"patch": ("pictures", "picture")}),
    ],
)
def test_output_is_that_of_the_function(options: list[str], asked: dict[str, Any], capsys: Output) -> None:
    table = compare("agreement", SENTENCE, CHOSEN, **asked)
    found, expected = json.loads(compared(capsys, *options, "--json")), json.loads(table.to_json())
    assert {name: found[name] for name in expected} == expected
    assert (found["text"], found["model"]) == (SENTENCE, "agreement")
    assert set(str(table).splitlines()) <= set(compared(capsys, *options, "--full").splitlines())
    if table.falls is not None:
        falls = table.falls.tolist()
        assert found["falls"] == [fall if fall == fall else None for fall in falls]
        shown = compared(capsys, *options)
        assert "without: pictures" in shown and f"{falls[2]:+.2f}" in shown


@pytest.mark.parametrize("columns", [40, 200])
def test_methods_are_lines_that_fit(columns: int, monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    """At most 80 columns, at most as many as the terminal has, and each method's strongest token first."""
    monkeypatch.setattr("captum_vz.cli.texts.room", lambda: columns)
    monkeypatch.setattr("captum_vz.visualization.forms.room", lambda: columns)
    methods = ["value-zeroing-effect-layer", "value-zeroing-rollout", "attention", "alti"]
    text = "the pictures of some extraordinarily hat [MASK] scaring marcus."
    lines = [
        line
        for line in ran(capsys, "compare", text, "--methods", *methods).out.splitlines()
        if line.split(maxsplit=1)[0] in methods
    ]
    assert max(map(len, lines)) <= min(columns, 80)
    found = compare("agreement", text, methods)
    for line, name in zip(lines, methods, strict=True):
        token = line.split()[1].rstrip("…")
        assert found.tokens[int(found.shares[name].argmax())].startswith(token)
    _, *lines = ran(capsys, "compare", text, "--methods", *methods, "--full").out.splitlines()
    assert max(map(len, lines)) <= columns
    cells = [cell.strip("*") for line in lines if line.split()[:2] == ["2", "pictures"] for cell in line.split()[2:]]
    assert cells == [f"{found.shares[name][2]:.3f}" for name in methods]
