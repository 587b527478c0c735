"""Run the code blocks of a Markdown document in order, as a reader would run them.

- python: one session for all blocks of a document.
- bash: `captum-vz` runs in this process. Commands that install are not run: `.ci/run` has to try them.
  A block whose first line is `# pip install NAME` runs if this package is installed.
- text: what the block before it prints.
- diff: both sides run, the old one in a copy of the session. A diff whose first line is `--- PATH` has to fit the
  script of this path, which test_docs.py runs.
- console: a command that is shown and not run, because it needs files or machines that a test does not have.
- json: lines that are examples of a study, written to `examples.jsonl`.
- bibtex: only its form is checked.
"""

import contextlib
import doctest
import io
import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from captum_vz.cli import main
from captum_vz.study import read_jsonl

ROOT = Path(__file__).parents[1]
CI = ROOT / ".ci" / "run"
EXTRAS = re.compile(r"^\[options.extras_require\]\n((?s:.*?))\n\[", re.MULTILINE)

# Commands that prepare a shell or run the tests: this process has done the first and is the second. The demo serves
# until Ctrl-C.
NOT_RUN = re.compile(r"#|captum-vz demo\b|git clone |cd |python3? -m venv |source |\. |pytest(?: +#.*)?$")


class Block(NamedTuple):
    document: str
    line: int
    language: str
    code: str


def blocks_of(path: Path) -> list[Block]:
    """The code blocks of a document, each with the line on which it starts."""
    markdown = path.read_text("utf-8")
    blocks = [
        Block(path.name, markdown.count("\n", 0, match.start(2)), match[1], match[2])
        for match in re.finditer(r"^```(.*)\n((?s:.*?))^```$", markdown, re.MULTILINE)
    ]
    fences = re.findall(r"^\s*(?:```|~~~)", markdown, re.MULTILINE)
    assert len(fences) == 2 * len(blocks), f"{path.name} has a code block that is indented, not closed, or uses ~~~."
    return blocks


def commands_of(script: str) -> list[str]:
    lines = script.replace("\\\n", " ").splitlines()
    return [command.strip() for line in lines for command in line.split(" && ") if command.strip()]


def extras() -> list[str]:
    """The names of the extras that setup.cfg defines."""
    section = EXTRAS.search((ROOT / "setup.cfg").read_text("utf-8"))
    assert section, "setup.cfg has no section [options.extras_require]."
    return re.findall(r"^(\w+) =$", section[1], re.MULTILINE)


def sides_of(block: Block) -> tuple[Block, Block]:
    """The code before and after a diff. Each keeps its line numbers: lines of the other side are empty."""
    lines = block.code.splitlines()
    wrong = next((line for line in lines if line[:1] not in ("-", "+", " ", "")), None)
    assert wrong is None, f"{block.document}, line {block.line}: {wrong!r} begins with none of '-', '+' and a space."
    old, new = ("\n".join("" if line[:1] == other else line[1:] for line in lines) for other in "+-")
    return block._replace(code=old), block._replace(code=new)


def script_of(block: Block) -> Path | None:
    """The script that a diff changes."""
    first = re.match(r"--- (\S+)\n", block.code)
    return ROOT / first[1] if first and block.language == "diff" else None


def changed(block: Block) -> tuple[str, int]:
    """The changed script, and the number of lines that are added or take the place of others.

    Parts of the diff are divided by lines of `@@`. The lines that a part keeps or removes stand once in the script.
    """
    script = script_of(block)
    assert script is not None
    code, count = script.read_text("utf-8"), 0
    for part in filter(None, re.split(r"^@@.*\n", block.code.partition("\n")[2], flags=re.MULTILINE)):
        old, new = ("".join(f"{line[1:]}\n" for line in part.splitlines() if line[:1] != other) for other in "+-")
        place = f"{block.document}, line {block.line}"
        assert code.count(old) == 1, f"{place}: {script.name} has these lines {code.count(old)} times:\n{old}"
        code = code.replace(old, new)
        count += max(len(re.findall(rf"^[{sign}]", part, re.MULTILINE)) for sign in "+-")
    return code, count


def run_blocks(blocks: list[Block]) -> None:
    """Run the blocks in the current folder. Raises what a block raises, with the document's own line numbers."""
    session: dict[str, Any] = {"__name__": "document"}
    printed = ""
    for block in blocks:
        place = f"{block.document}, line {block.line}"
        match block.language:
            case "python" if lacks(block):
                printed = ""
            case "python":
                printed = _run_python(block, session)
            case "diff" if script_of(block) is not None:
                changed(block)
            case "diff":
                old, new = sides_of(block)
                _run_python(old, dict(session))
                printed = _run_python(new, session)
            case "bash":
                printed = "".join(_run_command(command, place) for command in commands_of(block.code))
            case "text":
                _assert_prints(printed, block.code, place)
            case "console":
                continue
            case "json":
                Path("examples.jsonl").write_text(block.code, "utf-8")
                assert read_jsonl("examples.jsonl")
            case "bibtex":
                whole = block.code.startswith("@") and block.code.count("{") == block.code.count("}")
                assert whole, f"{place}: a citation that does not begin with @ or does not close its braces."
            case language:
                pytest.fail(f"{place}: the tests cannot run a block of {language or 'no language'}.")


def lacks(block: Block) -> bool:
    """Whether the package that a block names is missing. CAPTUM_VZ_NO_SKIP=1 demands those of the extra "test"."""
    named = re.match(r"# pip install (\S+)\n", block.code)
    if named is None or find_spec(named[1].replace("-", "_")):
        return False
    required = re.search(rf"^    {named[1]}$", (ROOT / "setup.cfg").read_text("utf-8"), re.MULTILINE)
    assert not (required and os.environ.get("CAPTUM_VZ_NO_SKIP")), f"{block.document}: {named[1]} is not installed."
    return True


def run_script(name: str, code: str) -> dict[str, Any]:
    """The names that a script leaves. A script with processes of its own runs in a new one, and leaves none."""
    if "Process" in code:
        Path(name).write_text(code, "utf-8")
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
        run = subprocess.run([sys.executable, name], capture_output=True, text=True, env=environment, timeout=300)
        assert run.returncode == 0, run.stderr
        return {}
    session: dict[str, Any] = {"__name__": "__main__"}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(code, name, "exec"), session)
    return session


def _run_python(block: Block, session: dict[str, Any]) -> str:
    source = "\n" * block.line + block.code  # so that a traceback shows the document's line number
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(source, block.document, "exec"), session)
    return printed.getvalue()


def _run_command(command: str, place: str) -> str:
    if NOT_RUN.match(command):
        return ""
    if command.startswith("pip install "):
        _check_install(command, place)
        return ""
    program, *arguments = shlex.split(command, comments=True)
    assert program == "captum-vz", f"{place}: the tests cannot run `{command}`."
    # In this process, because a new one would spend its time importing torch. test_cli.py starts new ones.
    complaints = io.StringIO()
    with contextlib.redirect_stderr(complaints), contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            status = main(arguments)
        except SystemExit as left:
            status = left.code
    assert status == 0, f"{place}: `{command}` exited with {status}:\n{complaints.getvalue()}"
    return printed.getvalue()


def _check_install(command: str, place: str) -> None:
    """`.ci/run` has the same command, or the command installs this folder with an extra that exists, or the lessons."""
    tried = [_installed(line) for line in commands_of(CI.read_text("utf-8")) if line.startswith("pip install ")]
    wanted = _installed(command)
    extra = re.fullmatch(r"\.(?:\[(\w+)\])?", wanted[-1])
    known = len(wanted) == 3 and extra is not None and extra[1] in (None, *extras())
    known = known or wanted == ["pip", "install", "./tutorials"]
    assert wanted in tried or known, f"{place}: `{command}` is not tried by .ci/run and installs no extra of setup.cfg"


def _installed(command: str) -> list[str]:
    """The words of `pip install`, with the project as `.` also if it is installed from a wheel."""
    return ["." if word.endswith(".whl") else word for word in shlex.split(command, comments=True)]


def _assert_prints(printed: str, shown: str, place: str) -> None:
    same = doctest.OutputChecker().check_output(shown, printed, doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert same, f"{place} shows\n{shown}\nbut the block before it prints\n{printed}"
