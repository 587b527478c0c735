"""Every code block of the README runs, in order, as a reader would run it.

Blocks are python (one session for all of them), bash (`captum-vz` is run; installing is what `.ci/run` does in fresh
environments, so here the two have only to agree), text (what the block before it prints), json (lines that are examples
of a study) and bibtex.
"""

import contextlib
import doctest
import io
import re
import shlex
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from captum_vz.cli import main
from captum_vz.study import read_jsonl

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
CI = ROOT / ".ci" / "run"

# What prepares a shell, and has nothing to run in a shell that is prepared.
PREPARATION = re.compile(r"#|git clone |cd |python3? -m venv |source |\. ")


class Block(NamedTuple):
    line: int
    language: str
    code: str


def blocks_of(markdown: str) -> list[Block]:
    found = [
        Block(markdown.count("\n", 0, match.start(2)), match[1], match[2])
        for match in re.finditer(r"^```(.*)\n((?s:.*?))^```$", markdown, re.MULTILINE)
    ]
    fences = re.findall(r"^\s*(?:```|~~~)", markdown, re.MULTILINE)
    assert len(fences) == 2 * len(found), "README.md has a code block that this test cannot read: indented, or with ~~~"
    return found


def commands_of(script: str) -> list[str]:
    lines = script.replace("\\\n", " ").splitlines()
    return [command.strip() for line in lines for command in line.split(" && ") if command.strip()]


def installs(command: str) -> list[str]:
    """What `pip install` is told, with the project by its name whether it is installed from a folder or a wheel."""
    return ["captum-vz" if word == "." or word.endswith(".whl") else word for word in shlex.split(command)]


def run_python(block: Block, session: dict[str, Any]) -> str:
    source = "\n" * block.line + block.code  # so that a traceback names the README's own line
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(source, README, "exec"), session)
    return printed.getvalue()


def run_bash(block: Block) -> str:
    return "".join(run_command(command) for command in commands_of(block.code))


def run_command(command: str) -> str:
    if PREPARATION.match(command):
        return ""
    if command == "pytest":  # this is it
        return ""
    if command.startswith("pip install "):
        tested = [installs(line) for line in commands_of(CI.read_text("utf-8")) if line.startswith("pip install ")]
        assert installs(command) in tested, f"README.md installs with `{command}`, which .ci/run does not try"
        return ""
    program, *arguments = shlex.split(command)
    assert program == "captum-vz", f"This test does not know how to run README.md's `{command}`"
    # In this process, for a new one would spend its time importing torch; test_cli.py starts some.
    complaints = io.StringIO()
    with contextlib.redirect_stderr(complaints), contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            status = main(arguments)
        except SystemExit as left:
            status = left.code
    assert status == 0, f"`{command}` exited with {status}:\n{complaints.getvalue()}"
    return printed.getvalue()


def assert_prints(printed: str, shown: str) -> None:
    same = doctest.OutputChecker().check_output(shown, printed, doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert same, f"README.md shows\n{shown}\nbut it is\n{printed}"


def run_blocks(blocks: list[Block]) -> None:
    session: dict[str, Any] = {"__name__": "readme"}
    printed = ""
    for block in blocks:
        match block.language:
            case "python":
                printed = run_python(block, session)
            case "bash":
                printed = run_bash(block)
            case "text":
                assert_prints(printed, block.code)
            case "json":
                Path("examples.jsonl").write_text(block.code, "utf-8")
                assert read_jsonl("examples.jsonl")
            case "bibtex":
                whole = block.code.startswith("@") and block.code.count("{") == block.code.count("}")
                assert whole, f"README.md, line {block.line}: a citation that does not begin with @ or close its braces"
            case language:
                pytest.fail(f"README.md, line {block.line}: nothing here runs a block of {language or 'no language'}")


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_every_code_block_of_the_readme_runs() -> None:
    blocks = blocks_of(README.read_text("utf-8"))
    assert {"python", "bash"} <= {block.language for block in blocks}
    run_blocks(blocks)


def test_the_readme_and_ci_run_the_tests_with_one_command() -> None:
    commands = [command for block in blocks_of(README.read_text("utf-8")) for command in commands_of(block.code)]
    assert 'pip install torch==2.13.0 -e ".[test]"' in commands
    assert "pytest" in commands


@pytest.mark.parametrize(
    ("markdown", "complaint"),
    [
        ("```python\nassert one == 1\n```", "name 'one' is not defined"),
        ("```bash\nrm -r elsewhere\n```", "does not know how to run README.md's `rm -r elsewhere`"),
        ("```bash\npip install captum-vz==9 && pytest\n```", "which .ci/run does not try"),
        ("```bash\ncaptum-vz no-such-command\n```", "exited with 2"),
        ("```python\nprint(1)\n```\n```text\n2\n```", "but it is"),
        ('```json\n{"tokens": []}\n```', "target is None"),
        ("```bibtex\n@book{half\n```", "a citation that does not"),
        ("```ruby\nputs 1\n```", "line 1: nothing here runs a block of ruby"),
        ("```\nplain\n```", "nothing here runs a block of no language"),
        ("1. one\n   ```python\n   1\n   ```", "cannot read"),
    ],
)
def test_a_block_that_does_not_hold_is_found(markdown: str, complaint: str) -> None:
    with pytest.raises((AssertionError, NameError, ValueError, pytest.fail.Exception), match=re.escape(complaint)):
        run_blocks(blocks_of(markdown))


def test_blocks_that_hold_share_one_session() -> None:
    markdown = "```python\nn = 2\n```\nthen\n```python\nprint(n + 1)\n```\n```text\n3\n```\n```bash\npytest\n```"
    run_blocks(blocks_of(markdown))
    assert [block.line for block in blocks_of(markdown)] == [1, 5, 8, 11]
