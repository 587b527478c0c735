"""A study in several processes: the same rows, and a clear end if one of them fails."""

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from accelerate import PartialState

from captum_vz import _files
from captum_vz.cli import main
from captum_vz.errors import ArgumentError
from captum_vz.study import Batch, Example, Study, run_study
from captum_vz.study.folder import engines
from captum_vz.testbed import load_model
from tests.study.test_command import PLUGIN
from tests.study.test_run import assert_same_study, free_port, shards, study
from tests.view.pages import missing

COUNT = 3


@pytest.fixture(scope="module")
def reference(examples: list[Example], tmp_path_factory: pytest.TempPathFactory) -> Study:
    return study(tmp_path_factory.mktemp("reference") / "study", examples)


def launch(work: Callable[[int], object], folder: Path) -> list[tuple[int, str, str]]:
    """Run the work in three processes that know each other.

    Returns:
        For each its exit code, the error that `run_study` raised, and what it wrote to stderr.
    """
    port = free_port()

    def one(rank: int) -> None:
        PartialState._reset_state()
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": COUNT, "LOCAL_WORLD_SIZE": COUNT, "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in place.items()})
        os.environ.update({"MASTER_ADDR": "localhost", "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"})
        with open(folder / f"{rank}.err", "w") as told:
            os.dup2(told.fileno(), 2)
            sys.stderr = os.fdopen(2, "w")
            try:
                work(rank)
            except Exception as error:
                (folder / f"{rank}.error").write_text(f"{type(error).__name__}: {error}")
                os._exit(1)

    started = [multiprocessing.get_context("fork").Process(target=one, args=(rank,)) for rank in range(COUNT)]
    for process in started:
        process.start()
    for process in started:
        process.join(600)  # only a bound for processes that hang; a busy machine needs minutes
    found = []
    for rank, process in enumerate(started):
        process.kill()
        error = folder / f"{rank}.error"
        found.append(
            (process.exitcode, error.read_text() if error.exists() else "", (folder / f"{rank}.err").read_text())
        )
    return found


def at_first_shard(do: Callable[[], object]) -> None:
    """Do something when this process writes its first shard."""
    rename = os.replace

    def replaced(source: Any, goal: Any) -> None:
        if Path(goal).suffix == ".parquet":
            do()
        rename(source, goal)

    _files.os.replace = replaced  # in this process only


def full() -> None:
    raise OSError(28, "No space left on device")


def mine(error: str) -> list[str]:
    return [line for line in error.splitlines() if line.startswith("captum-vz: ")]


@pytest.mark.slow
def test_failed_process_is_told_at_once(examples: list[Example], reference: Study, tmp_path: Path) -> None:
    folder = tmp_path / "study"

    def work(rank: int) -> None:
        if rank == 1:
            at_first_shard(full)
        study(folder, examples, shard_size=1)

    found = launch(work, tmp_path)
    assert [code for code, _, _ in found] == [1, 1, 1]
    (line,) = mine(found[1][2])
    assert line.startswith(
        "captum-vz: process 2 of 3 failed, and waits until the others have finished their shards: OSEr"
    )
    assert found[1][1].startswith("OSError: [Errno 28] cannot write")
    for rank in (0, 2):
        assert found[rank][1].startswith(
            f"StudyStoppedError: process {rank + 1} of 3 stopped, because process 2 failed ("
        )
        assert found[rank][1].endswith("Finished shards stay: start again with the same settings to continue.")
        assert "Traceback" not in found[rank][2]
    kept = shards(folder)
    assert 0 < len(kept) < 10
    assert not list(folder.glob(".stopped*"))
    pd.testing.assert_frame_equal(study(folder, examples, shard_size=1).summary, reference.summary, rtol=1e-5)
    assert kept.items() <= shards(folder).items()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_ended_process_is_told(number: int, examples: list[Example], reference: Study, tmp_path: Path) -> None:
    def work(rank: int) -> None:
        if rank == 1:
            at_first_shard(lambda: os.kill(os.getpid(), number))
        study(tmp_path / "study", examples)

    found = launch(work, tmp_path)
    assert found[1][0] == (-9 if number == signal.SIGKILL else 143)
    told = ["captum-vz: process 2 of 3 was told to end by its launcher."] if number == signal.SIGTERM else []
    assert [line.partition(" Finished")[0] for line in mine(found[1][2])] == told
    for rank in (0, 2):
        assert f"process {rank + 1} of 3 stopped, because another process ended without a word" in found[rank][1]
    assert len(shards(tmp_path / "study")) >= 1
    assert_same_study(study(tmp_path / "study", examples), reference)


@pytest.mark.slow
def test_error_of_the_main_process_reaches_all(examples: list[Example], tmp_path: Path) -> None:
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / "thesis.tex").touch()
    found = launch(lambda rank: study(tmp_path / "study", examples), tmp_path)
    assert [error.partition(":")[0] for _, error, _ in found] == ["ValueError"] * 3

    def at_the_end(rank: int) -> None:
        engines.Processes.each, each = (
            lambda self, *rest: (each(self, *rest), at_first_file())[0],
            engines.Processes.each,
        )
        study(tmp_path / "other", examples)

    def at_first_file() -> None:
        _files.os.replace = lambda *_: full()

    found = launch(at_the_end, tmp_path)
    assert all("No space left" in error for _, error, _ in found), found


def test_engine_that_does_not_fit_refused(
    examples: list[Example], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ArgumentError, match="engine is 'spark': pass one of 'local', 'accelerate', 'ray'"):
        study(tmp_path / "s", examples, engine="spark")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for engine in ("local", "ray"):
        with pytest.raises(ArgumentError, match=f"engine is '{engine}', but 2 processes were launched: pass 'acc"):
            study(tmp_path / "s", examples, engine=engine)
    assert not (tmp_path / "s").exists()


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torch.distributed.run", "accelerate.commands.launch"])
def test_launched_study_equals_one_process(
    launcher: str, examples: list[Example], reference: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["study", "--grammar", "6", "--methods", "random", "value-zeroing", "--quiet"]
    two = {
        "torch.distributed.run": f"--nproc-per-node 2 --master-port {free_port()}",
        "accelerate.commands.launch": "--multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no "
        "--dynamo_backend no --main_process_port 0",
    }[launcher].split()
    study_two = ["-m", "captum_vz", *options, "--folder", "two", "--engine", "accelerate"]
    subprocess.run(
        [sys.executable, "-m", launcher, *two, *study_two],
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert main([*options, "--folder", "one", "--engine", "local"]) == 0
    assert_same_study(Study("two"), Study("one"))


@pytest.fixture(scope="module")
def cluster() -> Any:
    """Ray with two CPUs in this machine."""
    if find_spec("ray") is None:
        missing('Ray is not installed: pip install -e ".[ray]"')
    import ray

    for left in (2, 1, 0):  # Ray waits 30 seconds for its own processes, which a busy machine may need
        try:
            ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
            break
        except Exception:
            ray.shutdown()
            if not left:
                raise
    yield ray
    ray.shutdown()


@pytest.mark.slow
def test_study_on_ray_equals_one_process(
    cluster: Any, examples: list[Example], reference: Study, tmp_path: Path, own_names: None
) -> None:
    """A worker dies on the way, which costs its block only. The files are the same to the last bit."""
    deaths = tmp_path / "deaths"

    def deadly() -> tuple[Any, Any]:
        """A model whose process is killed at its third text, once."""
        model, tokenizer = load_model()
        calls = []

        def die(*_: Any) -> None:
            calls.append(1)
            if len(calls) == 3:
                with contextlib.suppress(FileExistsError):
                    deaths.touch(exist_ok=False)
                    os.kill(os.getpid(), signal.SIGKILL)

        model.register_forward_pre_hook(die)
        return model, tokenizer

    found = study(tmp_path / "s", examples, {"agreement": deadly}, engine="ray")
    assert deaths.exists()
    assert_same_study(found, reference)
    expected, got = shards(reference.folder), shards(found.folder)
    assert {name: data for name, (_, data) in got.items()} == {name: data for name, (_, data) in expected.items()}
    study(tmp_path / "s", examples, {"agreement": deadly}, engine="ray")
    assert shards(found.folder) == got  # nothing is computed again


@pytest.mark.exhaustive
def test_block_that_kills_its_workers_ends_the_study(cluster: Any, examples: list[Example], tmp_path: Path) -> None:
    def deadly() -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(
        RuntimeError, match=f"died {engines.TRIES} times while they computed shard . of 'agreement'.*stay"
    ):
        study(tmp_path / "s", examples[:2], {"agreement": deadly}, engine="ray")
    study(tmp_path / "s", examples[:2])


@pytest.mark.exhaustive
def test_error_of_a_worker_is_raised(cluster: Any, examples: list[Example], tmp_path: Path) -> None:
    def train() -> tuple[Any, Any]:
        model, tokenizer = load_model()
        return model.train(), tokenizer

    with pytest.raises(ValueError, match=r"train mode: call model\.eval"):
        study(tmp_path / "s", examples, {"agreement": train}, engine="ray")


def nearest(batch: Batch) -> Any:
    return 1 / (1 + (batch.inputs["input_ids"] - batch.inputs["input_ids"][:, :1]).abs())


@pytest.mark.exhaustive
def test_plugins_and_functions_reach_workers(
    cluster: Any, examples: list[Example], tmp_path: Path, own_names: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(PLUGIN)
    own = ["--methods", "ids", "fails", "captums", "random", "--metrics", "largest", "cue_dot", "--plugin", "mine.py"]
    for engine in ("ray", "local"):
        assert main(["study", "--grammar", "4", *own, "--folder", engine, "--quiet", "--engine", engine]) == 0
    assert_same_study(Study("ray"), Study("local"))
    methods = {"nearest": nearest, "half": lambda batch: batch.inputs["input_ids"] * 0.5}
    two = [
        run_study({"agreement": load_model}, examples, name, methods, "cue_dot", engine=name[1:], quiet=True)
        for name in ("1ray", "1local")
    ]
    assert_same_study(*two)


def test_ray_that_is_missing_is_named(examples: list[Example], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ModuleNotFoundError, match=r"engine='ray' needs ray.*pip install \"captum-vz\[ray\]\""):
        study(tmp_path / "s", examples, engine="ray")
    assert json.loads((tmp_path / "s" / "study.json").read_text())["models"] == ["agreement"]
