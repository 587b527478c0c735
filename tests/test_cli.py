"""The command: its output, its picture, and its errors of one line."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image
from torch import Tensor

import captum_vz
from captum_vz.cli import main, options
from captum_vz.study import METHODS as REGISTRY
from captum_vz.study import Batch, as_method
from captum_vz.testbed.models import EMBEDDED, PACKAGED
from tests.command import Output, ran, refused

SENTENCE = "the pictures of some hat [MASK] scaring marcus."
MASK = 6
pytestmark = pytest.mark.usefixtures("folder")


@pytest.mark.parametrize(
    ("token", "position"), [("2", 2), ("-5", MASK), ("hat", 5), ("HAT", 5), ("[MASK]", MASK), ("[SEP]", 10)]
)
def test_token_is_a_position_or_text(token: str, position: int, capsys: Output) -> None:
    found = json.loads(ran(capsys, "explain", SENTENCE, "--token", token, "--json").out)
    assert found["token"]["position"] == position


@pytest.mark.parametrize(
    ("text", "token", "told"),
    [
        ("some hat is scaring marcus", 5, ["the text has no mask: its last token is explained, --token 5."]),
        ("some [MASK] hat [MASK]", 2, ["the text has 2 masks, at positions 2, 4: --token 2 is explained."]),
        ("some hat [MASK] \u732b", 3, ["unknown word at position 4: the model is given [UNK]."]),
        (
            "a [mask] hat <MASK>",
            12,
            [
                "[mask] is read as text: write [MASK] for the mask.",
                "<MASK> is read as text: write [MASK] for the mask.",
                "the text has no mask: its last token is explained, --token 12.",
            ],
        ),
    ],
)
def test_what_may_not_be_meant_is_told(text: str, token: int, told: list[str], capsys: Output) -> None:
    out, err = ran(capsys, "explain", text, "--method", "random")
    assert err.splitlines() == [f"captum-vz: {remark}" for remark in told]
    assert f"> {token}  " in out
    _, err = ran(capsys, "explain", text, "--method", "random", "--token", "1")
    assert len(err.splitlines()) == sum("--token" not in remark for remark in told)


def test_pictures_are_drawn_on_request(folder: Path, capsys: Output) -> None:
    """As PNG, unless the name says otherwise."""
    ran(capsys, "explain", SENTENCE, "--json")
    assert not list(folder.iterdir())
    told = ran(capsys, "explain", SENTENCE, "--json", "--output", "asked.png")
    assert json.loads(told.out) and not told.err
    image = Image.open(folder / "asked.png").convert("RGB")
    colours = {colour for _, colour in image.getcolors(image.width * image.height)}
    assert len(colours) > 100  # not blank
    assert (0xD5, 0x5E, 0x00) in colours  # the target's mark
    assert "here.svg" in ran(capsys, "explain", SENTENCE, "--output", "here.svg").out
    ran(capsys, "explain", SENTENCE, "--output", "without_ending")
    assert sorted(path.name for path in folder.iterdir()) == ["asked.png", "here.svg", "without_ending"]
    assert Image.open(folder / "without_ending").format == "PNG"
    svg = (folder / "here.svg").read_text("utf-8")
    panels = re.findall(r">(layer \d+|rollout[^<]*)</text>", svg)
    assert panels == [*(f"layer {index}" for index in range(4)), "rollout, residual 0.5"]


def test_unencodable_token_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert main(["explain", SENTENCE, "--output", "x.png"]) == 0
    sys.stdout.flush()
    assert b"pictures  0." in written.getvalue()


def test_warning_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    def remarking(batch: Batch) -> Tensor:
        warnings.warn("a row stays zero", stacklevel=2)
        return torch.ones_like(batch.inputs["input_ids"]) / 11

    monkeypatch.setitem(REGISTRY, "value-zeroing", as_method(remarking))
    assert ran(capsys, "explain", SENTENCE, "--json").err == "captum-vz: a row stays zero\n"


# Errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["explain", "", "--json"], "the text is empty: there is no token to explain"),
        (["explain", "a \udcff hat"], "the text is no UTF-8 at character 2"),  # so Python passes on a byte 0xff
        (["explain", SENTENCE, "--token", "11"], "--token 11 is out of range: there are 11 tokens"),
        (["explain", SENTENCE, "--token", "zebra"], "--token 'zebra' is none of the tokens: [CLS] the pictures of"),
        (["explain", "a hat is a [MASK]", "--token", "a"], "--token 'a' is at the positions 1, 4: pass one of them"),
        (["explain", SENTENCE, "--layer", "4"], "--layer 4 is out of range: the model has 4 layers, -4 to 3"),
        (["explain", SENTENCE, "--window", "x"], "--window: 'x' is no whole number"),
        (["explain", SENTENCE, "--layer", "last"], "--layer: invalid layer 'last': pass a whole number, or deciding"),
        (["explain", "hat " * 200], "the text is 202 tokens long, but the model takes at most 128"),
        (["explain", SENTENCE, "--model", "./nowhere"], "there is no ./nowhere: expected a folder with a model"),
        (["explain", SENTENCE, "--model", "."], "no config.json can be read in .: expected a folder with a model"),
        (["explain", SENTENCE, "--output", "nowhere/x.png"], "cannot write nowhere/x.png: there is no folder nowhere"),
        (["explain", SENTENCE, "--output", "."], "cannot write .: Is a directory"),
        (["explain", SENTENCE, "--output", "x.doc"], "cannot write x.doc: pass a name that ends with one of "),
        (["explain", SENTENCE, "--output", "x", "--html", "x"], "x is the name of two files"),
        (["explain", SENTENCE, "--html", "x.png"], "x.png is the name of a picture"),
        (["explain", SENTENCE, "--model", "agreemnt"], "--model: there is no model 'agreemnt' (did you mean agreement"),
        (["explain", SENTENCE, "--method", "altii"], "no method 'altii' (did you mean alti?)"),
        (["explain"], "required: TEXT; see captum-vz explain --help"),
        (["explain", SENTENCE, "--words", "--clauses"], "--clauses: not allowed with argument --words"),
        (["explain", "two", "texts"], "texts (put a text of several words between quotes); see "),
        (["explain", SENTENCE, "--metod", "alti"], "unrecognized arguments: --metod alti (did you mean --method?)"),
        (["explian", SENTENCE], "there is no command 'explian' (did you mean explain?)"),
        (["paper", "--grammar", "5"], "paper is no command any more: "),
        (["lab", "student", "x.ipynb"], "it is the command captum-vz-lessons"),
        (["compare", SENTENCE, "--target", "zebra", "--truth"], "--target "),
        (["compare", SENTENCE, "--foil", ""], "--foil "),
    ],
)
def test_bad_command_says_why(
    arguments: list[str], message: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    """Before a model runs."""

    def computed(*_: Any, **__: Any) -> None:
        pytest.fail("the model has run")

    (folder / "file").write_text("")
    for kind in transformers.BertForMaskedLM, transformers.LlamaForCausalLM:
        monkeypatch.setattr(kind, "forward", computed)
    assert message in refused(capsys, *arguments)


@pytest.mark.parametrize("error", [ValueError("odd\ninput"), RuntimeError("odd input"), MemoryError()])
def test_error_of_a_model_is_one_line(error: BaseException, monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    def forward(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(transformers.BertForMaskedLM, "forward", forward)
    told = " ".join(str(error).split()) or "MemoryError"
    assert told in refused(capsys, "explain", SENTENCE, "--method", "attention")


@pytest.mark.skipif(os.name != "posix", reason="signals are those of POSIX")
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["explain", SENTENCE], "stopped."),
        (["study", "--grammar", "9", "--folder", "s", "--quiet"], "stopped. The same command continues from here."),
    ],
)
def test_ctrl_c_is_one_line(arguments: list[str], told: str, monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    """The signal comes while the model runs."""
    monkeypatch.setattr(transformers.BertModel, "forward", lambda *_, **__: os.kill(os.getpid(), signal.SIGINT))
    assert main(arguments) == 130
    assert capsys.readouterr() == ("", f"captum-vz: {told}\n")


# As a program


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stdout", "status", "told"),
    [(">&-", 0, ""), (">/dev/full", 2, "captum-vz: cannot use stdout: No space left on device.\n")],
)
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="it is a device of Linux")
def test_closed_or_full_output(stdout: str, status: int, told: str, folder: Path) -> None:
    command = ["sh", "-c", f'"$@" {stdout}', "sh", sys.executable, "-m", "captum_vz", "explain", SENTENCE]
    done = subprocess.run([*command, "--output", "x.png"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (status, "", told)
    assert (folder / "x.png").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["explain", SENTENCE], ["--help"]])
def test_reader_that_leaves_is_no_error(arguments: list[str]) -> None:
    """`captum-vz ... | head -0`: the reader is gone before anything is printed."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "captum_vz", *arguments]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(os.name != "posix", reason="signals are those of POSIX")
@pytest.mark.parametrize("module", ["torch", "transformers"])
def test_ctrl_c_during_imports_is_one_line(module: str, folder: Path) -> None:
    """The signal comes as the command begins to import a large package. The program's own imports stop there."""
    (folder / "sitecustomize.py").write_text(
        f"""
import importlib.abc, os, signal, sys
class Interrupt(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
"""
    )
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    root = Path(captum_vz.__file__).parents[1]
    command = [sys.executable, "-m", "captum_vz", "explain", SENTENCE]
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=root)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "captum-vz: stopped.\n")


def test_version_bare_command_and_names(capsys: Output) -> None:
    for arguments, told in ((["--version"], f"captum-vz {captum_vz.__version__}\n"), ([], "usage: captum-vz")):
        with pytest.raises(SystemExit) as end:
            main(arguments)
        assert end.value.code == 0
        out, err = capsys.readouterr()
        assert out.startswith(told)
        assert err == ""
    # The command names methods before it imports them.
    assert set(options.METHODS) == set(REGISTRY)
    assert (*EMBEDDED, *PACKAGED) == options.MODELS


@pytest.mark.parametrize("arguments", [["explain", "--help"], ["study", "--help"], ["explian"]])
def test_start_imports_little(arguments: list[str]) -> None:
    """Help, and the answer to a typo, come before torch and what else only computing needs."""
    program = f"""
import atexit, sys
atexit.register(lambda: print(len(sys.modules), *sys.modules, file=sys.__stderr__))
from captum_vz.cli import main
main({arguments})
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    *_, last = done.stderr.splitlines()
    count, *names = last.split()
    assert not {"torch", "transformers", "matplotlib", "captum", "numpy"} & set(names)
    assert int(count) < 200
