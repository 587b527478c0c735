"""A study in several processes: the same rows, and a clear end if one of them fails."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

from captum_vz import _files
from captum_vz.cli import main
from captum_vz.errors import ArgumentError
from captum_vz.study import Batch, Example, Study, run_study
from captum_vz.study.folder import own_device
from captum_vz.testbed import load_model
from tests.engine.parameters import sampled
from tests.study.test_command import PLUGIN
from tests.study.test_run import assert_same_study, in_a_process, parts, study
from tests.view.pages import missing


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, signal.SIGKILL])
def test_processes_share_parts(number: int, examples: list[Example], finished: Study, tmp_path: Path) -> None:
    """Each part is written once. The disk is full for one of three processes, or it is killed: others do its part."""

    def work(rank: int) -> None:
        os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "3"})
        rename, written = os.replace, []

        def noted(source: Any, goal: Path) -> None:
            if goal.suffix == ".parquet":
                if rank == 1 and number:
                    os.kill(os.getpid(), number)
                elif rank == 1:
                    raise OSError(28, "No space left on device")
                written.append(f"{goal.parent.name}/{goal.name}")
            rename(source, goal)

        _files.os.replace = noted  # in this process only
        try:
            found = study(tmp_path / "study", examples)
            (tmp_path / f"{rank}.json").write_text(json.dumps([len(found.summary), written]))
        except OSError as error:
            (tmp_path / "error").write_text(str(error))
            os._exit(1)

    processes = [in_a_process(lambda rank=rank: work(rank)) for rank in range(3)]
    for process in processes:
        process.join(600)  # only a bound for processes that hang; a busy machine needs minutes
    assert [process.exitcode for process in processes] == [0, -number if number else 1, 0]
    if not number:
        assert "cannot write" in (tmp_path / "error").read_text()
    # What the killed process has left is removed after its end.
    assert_same_study(study(tmp_path / "study", examples), finished)
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 2)]
    assert [lines for lines, _ in told] == [len(finished.summary)] * 2
    assert sorted(name for _, names in told for name in names) == sorted(parts(tmp_path / "study"))


LAUNCHERS = {
    "torch.distributed.run": "--standalone --nproc-per-node 2",
    "accelerate.commands.launch": "--multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no "
    "--dynamo_backend no --main_process_port 0",
}


@pytest.mark.slow
@pytest.mark.parametrize("launcher", sampled(LAUNCHERS, "accelerate.commands.launch"))
def test_launched_study_equals_one_process(
    launcher: str, examples: list[Example], finished: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["study", "--grammar", "70", "--methods", "random", "--metrics", "cue_dot"]  # two parts
    two = LAUNCHERS[launcher].split()
    study_two = ["-m", "captum_vz", *options, "--folder", "two", "--engine", "accelerate"]
    run = subprocess.run(
        [sys.executable, "-m", launcher, *two, *study_two],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("rows, summary.csv") == 1  # the main process only
    assert main([*options, "--folder", "one", "--engine", "local", "--quiet"]) == 0
    assert_same_study(Study("two"), Study("one"))


#: What a busy machine needs more of than Ray expects: seconds until a worker has started, missed signs of life; and its
#: memory may be full of others' programs, for which Ray would kill workers.
PATIENCE = {"RAY_worker_register_timeout_seconds": "600", "RAY_health_check_failure_threshold": "100"}
PATIENCE |= {"RAY_gcs_server_port_wait_time_s": "300", "RAY_memory_monitor_refresh_ms": "0"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Ray with two CPUs in this machine, one cluster at a time for all processes of pytest."""
    if find_spec("ray") is None:
        missing('Ray is not installed: pip install -e ".[ray]"')
    import ray

    with FileLock(tmp_path_factory.getbasetemp().parent / "ray.lock"), pytest.MonkeyPatch.context() as patched:
        for name, value in PATIENCE.items():
            patched.setenv(name, value)
        for left in range(4, -1, -1):  # Ray waits 30 seconds for its own processes, and no setting changes that
            try:
                ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=10**8)
                break
            except Exception:
                ray.shutdown()
                if not left:
                    raise
        yield ray
        ray.shutdown()


@pytest.mark.slow
def test_study_on_ray_equals_one_process(
    cluster: Any, examples: list[Example], finished: Study, tmp_path: Path, own_names: None
) -> None:
    """A worker dies on the way, which costs its part only. The files are the same to the last bit."""
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
    assert_same_study(found, finished)
    expected, got = parts(finished.folder), parts(found.folder)
    assert {name: data for name, (_, data) in got.items()} == {name: data for name, (_, data) in expected.items()}
    study(tmp_path / "s", examples, {"agreement": deadly}, engine="ray")
    assert parts(found.folder) == got  # nothing is computed again


@pytest.mark.exhaustive
@pytest.mark.parametrize(("number", "told"), [(signal.SIGKILL, "run out of memory"), (None, "call model.eval")])
def test_failing_workers_end_the_study(
    number: int | None, told: str, cluster: Any, examples: list[Example], tmp_path: Path
) -> None:
    """They are killed, or given a model in train mode."""
    here = os.getpid()

    def failing() -> tuple[Any, Any]:
        model, tokenizer = load_model()
        if number and os.getpid() != here:
            os.kill(os.getpid(), number)
        return model.train(os.getpid() != here), tokenizer

    with pytest.raises((RuntimeError, ValueError), match=told):
        study(tmp_path / "s", examples[:2], {"agreement": failing}, engine="ray")
    study(tmp_path / "s", examples[:2])


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


def test_each_process_has_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert own_device() == torch.device("cpu") or torch.cuda.is_available()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for rank, place in (("0", 0), ("1", 1), ("2", 0)):
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert own_device() == torch.device("cuda", place)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert own_device() == torch.device("cpu")


def test_engine_that_does_not_fit_refused(
    examples: list[Example], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ModuleNotFoundError, match="engine='ray' needs"):
        study(tmp_path / "t", examples, engine="ray")
    assert json.loads((tmp_path / "t" / "study.json").read_text())["models"] == ["agreement"]
    with pytest.raises(ArgumentError, match="engine is 'spark'"):
        study(tmp_path / "s", examples, engine="spark")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for engine in ("local", "ray"):
        with pytest.raises(ArgumentError, match="processes were"):
            study(tmp_path / "s", examples, engine=engine)
    assert not (tmp_path / "s").exists()
