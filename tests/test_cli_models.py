"""Models that the command loads: complete ones, and one line for all others."""

import json
import os
import pickle
import shutil
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from captum_vz._names import MODELS
from captum_vz.cli import main
from captum_vz.testbed import load_model
from tests.command import Output, refused
from tests.explaining.models import byte_tokenizer
from tests.reference.case import BEFORE_5

SENTENCE = "the pictures of some hat [MASK] scaring marcus."
TINY = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
Weights = dict[str, Tensor]


@pytest.fixture
def tokenizer() -> transformers.PreTrainedTokenizerFast:
    return load_model()[1]


@pytest.fixture
def agreement(saved: Callable[..., str]) -> str:
    return saved(*load_model())


def change_weights(folder: str, change: Callable[[Weights], Weights]) -> None:
    path = f"{folder}/model.safetensors"
    save_file(change(load_file(path)), path, {"format": "pt"})


def explained(capsys: Output, *arguments: str) -> tuple[dict[str, Any], str]:
    """What the command prints as JSON, and what it tells on stderr."""
    status = main(["explain", *arguments, "--json"])
    out, err = capsys.readouterr()
    assert status == 0, err
    return json.loads(out), err


# Weights


def without(part: str) -> Callable[[Weights], Weights]:
    return lambda weights: {name: one for name, one in weights.items() if part not in name}


def with_other_names(weights: Weights) -> Weights:
    return {name.replace("query", "qry"): one for name, one in weights.items()}


def with_a_smaller_layer(weights: Weights) -> Weights:
    small = "2.output.dense.bias"
    return {name: one[:-1].contiguous() if name.endswith(small) else one for name, one in weights.items()}


SMALLER = "do not fit: the checkpoint holds bert.encoder.layer.2.output.dense.bias"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (without(".layer.2."), r"BertForMaskedLM needs bert.encoder.layer.2.attention.output.LayerNorm.bias, "),
        (with_other_names, "It holds others that the model does not use: bert.encoder.layer.0.attention.self.qry.bias"),
        (without("cls.predictions.transform"), "needs cls.predictions.transform.LayerNorm.bias, "),
        (with_a_smaller_layer, SMALLER if BEFORE_5 else f"{SMALLER} (127,) for (128,)"),
        (without(""), " others, which the checkpoint lacks. They would be random numbers."),
    ],
)
def test_missing_weights_are_refused(
    change: Callable[[Weights], Weights], told: str, agreement: str, capsys: Output
) -> None:
    """By a study as well, before anything is computed."""
    change_weights(agreement, change)
    for command in (["explain", SENTENCE], ["study", "--grammar", "2", "--quiet", "--folder", f"{agreement}/out"]):
        assert told in refused(capsys, *command, "--model", agreement)


MINE = {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config", "AutoModelForMaskedLM": "mine.Model"}}


@pytest.mark.parametrize(
    ("file", "change", "told"),
    [
        ("model.safetensors", lambda data: data[:1000], "one of its files is damaged or not complete"),
        ("tokenizer.json", lambda _: b"{}", "one of its files is damaged or not complete ('added_tokens')"),
        ("config.json", lambda data: json.dumps(json.loads(data) | MINE).encode(), "it needs Python code of its own"),
    ],
)
def test_damaged_files_and_code_are_told(
    file: str, change: Callable[[bytes], bytes], told: str, agreement: str, capsys: Output
) -> None:
    Path(agreement, "mine.py").write_text(f"import os; os.mkdir({agreement + '/trapped'!r})")
    Path(agreement, file).write_bytes(change(Path(agreement, file).read_bytes()))
    assert told in refused(capsys, "explain", SENTENCE, "--model", agreement)
    assert not Path(agreement, "trapped").exists()


def test_unexpected_weights_are_told(agreement: str, capsys: Output) -> None:
    change_weights(agreement, lambda weights: weights | {"bert.encoder.layer.0.lora_A": torch.ones(2)})
    found, err = explained(capsys, SENTENCE, "--model", agreement)
    assert err == (
        f"captum-vz: BertForMaskedLM does not use all weights of {agreement!r}: bert.encoder.layer.0.lora_A stay out.\n"
    )
    assert found["scores"] == explained(capsys, SENTENCE)[0]["scores"]
    ids = {"bert.embeddings.position_ids": torch.arange(128)[None]}  # as transformers stored them before version 4.31
    change_weights(agreement, lambda weights: without("lora")(weights) | ids)
    assert "cls.predictions.decoder.weight" not in load_file(f"{agreement}/model.safetensors")  # it is tied
    assert explained(capsys, SENTENCE, "--model", agreement)[1] == ""


def test_unused_parts_may_be_missing(saved: Callable[..., str], tokenizer: Any, capsys: Output) -> None:
    model = transformers.BertForTokenClassification(transformers.BertConfig(vocab_size=len(tokenizer), **TINY))
    found, err = explained(capsys, "[MASK]", "--model", saved(model, tokenizer), "--method", "value-zeroing")
    assert len(found["maps"]) == 2
    assert err == ""
    folder = saved(transformers.BertModel(model.config, add_pooling_layer=False), tokenizer)
    assert explained(capsys, "[MASK]", "--model", folder)[1] == ""
    change_weights(folder, without("layer.1"))
    assert "needs encoder.layer.1." in refused(capsys, "explain", "[MASK]", "--model", folder)
    words = byte_tokenizer(eos_token="</s>", pad_token="<pad>")
    config = transformers.T5Config(vocab_size=len(words), d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=2)
    config.decoder_start_token_id = 0
    folder = saved(transformers.T5EncoderModel(config), words)
    assert len(explained(capsys, "a b", "--model", folder)[0]["maps"]) == 2
    config.is_encoder_decoder = True
    saved(transformers.T5Model(config), words)
    change_weights(folder, without("decoder"))
    assert len(explained(capsys, "a b", "--model", folder)[0]["maps"]) == 2
    change_weights(folder, without("block.1"))
    assert "needs encoder.block.1." in refused(capsys, "explain", "a b", "--model", folder)


class Trap:
    def __reduce__(self) -> Any:
        return os.mkdir, ("trapped",)


def test_pickled_weights_are_not_read(
    agreement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(agreement, "model.safetensors").unlink()
    for data in (pickle.dumps(Trap()), None):
        path = Path(agreement, "pytorch_model.bin")
        torch.save(load_model()[0].state_dict(), path) if data is None else path.write_bytes(data)
        told = refused(capsys, "explain", SENTENCE, "--model", agreement)
        assert "there is no model.safetensors. This command reads no pickles" in told
        assert "weights_only" not in told
    assert not Path("trapped").exists()


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("attn_implementation", "someone/kernel"),
        ("_attn_implementation", {"": "someone/kernel"}),
        ("_attn_implementation_internal", "someone/kernel"),
    ],
)
def test_attention_of_a_config_is_not_followed(key: str, name: Any, agreement: str, capsys: Output) -> None:
    """A kernel of the hub would be fetched and run."""
    path = Path(agreement, "config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: name}))
    found, err = explained(capsys, SENTENCE, "--model", agreement)
    assert (found["scores"], err) == (pytest.approx(explained(capsys, SENTENCE)[0]["scores"], abs=1e-6), "")


@pytest.mark.parametrize("name", ["BertModel", "GPT2LMHeadModel", "T5EncoderModel"])
def test_model_without_its_tokenizer_is_refused(name: str, saved: Callable[..., str], capsys: Output) -> None:
    kind = getattr(transformers, name)
    told = refused(capsys, "explain", "hello world", "--model", saved(kind(kind.config_class(**TINY))))
    assert "comes without a tokenizer: its vocabulary holds no word. Save its tokenizer in the same folder" in told
    folder = saved(transformers.BertModel(transformers.BertConfig(vocab_size=100, **TINY)), load_model()[1])
    told = refused(capsys, "explain", SENTENCE, "--model", folder)
    assert "but the model knows 0 to 99: pass the model's own tokenizer" in told


# The hub


@pytest.mark.parametrize("name", ["no/such-model", "nosuchmodel"])
def test_unreachable_hub_is_told(name: str, tmp_path: Path, capsys: Output) -> None:
    """By a study as well, before anything is computed."""
    study = ["study", "--grammar", "2", "--folder", str(tmp_path / "out"), "--model", "agreement", name]
    for command in (["explain", SENTENCE, "--model", name], study):
        told = refused(capsys, *command)
        assert f"cannot load the model {name!r}: there is no such folder, and the Hugging Face hub cannot be" in told
        assert all(own in told for own in MODELS)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", [["explain", "a"], ["study", "--grammar", "2", "--folder", "s"]])
def test_model_that_the_hub_does_not_have(command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    """The hub is asked once, and answers that it has no such file."""
    asked = []

    class NotFound(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            asked.append(self.path)
            self.send_error(404)

        def log_message(self, *_: Any) -> None:
            pass

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("NO_PROXY", "localhost")
    with ThreadingHTTPServer(("localhost", 0), NotFound) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://localhost:{server.server_port}")
        told = refused(capsys, *command, "--model", "no/such-model")
        server.shutdown()
    assert "there is no such folder, and the Hugging Face hub has no such model" in told
    assert asked == ["/no/such-model/resolve/main/config.json"]


def test_slow_name_server_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    """The search for an address takes no limit of seconds."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("captum_vz.subjects.loading.HUB_SECONDS", 0.01)
    over, waited = threading.Event(), []
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: waited.append(over.wait(300)))
    assert "cannot be reached" in refused(capsys, "explain", "a", "--model", "no/such-model")
    assert not waited
    over.set()


def test_known_model_needs_no_network(
    agreement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    cache = tmp_path / "hub"
    commit = "0" * 40
    model = cache / "models--some--model"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text(commit)
    shutil.copytree(agreement, model / "snapshots" / commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("transformers.utils.hub.constants.HF_HUB_CACHE", str(cache))
    found, _ = explained(capsys, SENTENCE, "--model", "some/model")
    assert found["scores"] == explained(capsys, SENTENCE)[0]["scores"]
