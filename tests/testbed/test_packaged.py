"""Models of packages: what says that one is missing, and the cache of a converted file."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from captum_vz.cli import main
from captum_vz.errors import ArgumentError
from captum_vz.testbed import load_model, models
from captum_vz.testbed.models import EMBEDDED, PACKAGED

LOADED: Any = load_model("causal")


@pytest.fixture
def converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes "smollm2" a file that transformers reads as the embedded causal model. The folder that it becomes."""
    gguf = tmp_path / "package" / "weights.gguf"
    gguf.parent.mkdir()
    gguf.touch()
    monkeypatch.setattr(models, "model_source", {**EMBEDDED, "smollm2": gguf}.get)
    cache = tmp_path / "cache"
    cache.mkdir()
    monkeypatch.setattr("huggingface_hub.cached_assets_path", lambda *names, **further: cache)

    def read(*names: Any, **options: Any) -> Any:
        assert options.pop("gguf_file") == "weights.gguf"
        model = load_model("causal")[0]
        model.config.quantization_config = {"quant_method": "gguf"}
        return model

    tokenizers = transformers.AutoTokenizer.from_pretrained
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", read)
    monkeypatch.setattr(
        "transformers.AutoTokenizer.from_pretrained",
        lambda folder, **options: LOADED[1] if "gguf_file" in options else tokenizers(folder, **options),
    )
    return cache / "weights"


@pytest.mark.parametrize("name", PACKAGED)
def test_missing_package_is_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, PACKAGED[name].modules[-1], None)
    with pytest.raises(ArgumentError, match=f"model {name} needs a package: pip install") as caught:
        load_model(name)
    for command in (["explain", "a"], ["study", "--grammar", "2", "--folder", str(tmp_path / "out")]):
        assert main([*command, "--model", name]) == 2
        assert str(caught.value) in capsys.readouterr().err.replace("\n", " ")
    assert not (tmp_path / "out").exists()


def test_file_is_converted_once(converted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = load_model("smollm2")
    assert all(map(torch.equal, model.state_dict().values(), LOADED[0].state_dict().values()))
    assert not hasattr(model.config, "quantization_config")
    assert tokenizer.get_vocab() == LOADED[1].get_vocab()
    assert list(converted.parent.iterdir()) == [converted]
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", None)
    load_model("smollm2")


def test_interrupted_conversion_leaves_nothing(converted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("os.rename", lambda *given: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            load_model("smollm2")
    assert list(converted.parent.iterdir()) == []
    load_model("smollm2")


def test_two_processes_convert_at_once(converted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one is faster: its folder is there when this one is ready."""
    own = os.rename

    def late(made: Path, folder: Path) -> None:
        monkeypatch.setattr("os.rename", own)
        load_model("smollm2")
        own(made, folder)

    monkeypatch.setattr("os.rename", late)
    load_model("smollm2")
    assert list(converted.parent.iterdir()) == [converted]
