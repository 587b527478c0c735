"""`captum_vz.verify` and `captum-vz verify`: what passes, and what each wrong model is told."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from captum_vz import UnsupportedLayerError, ValueZeroing, verify
from captum_vz._engine import value_zeroing
from captum_vz.cli import main
from captum_vz.errors import ArgumentError
from captum_vz.testbed import load_model
from captum_vz.verification import VerificationReport, checks
from captum_vz.verification.checks import LayerVerification
from captum_vz.verification.recorded import defined_map, plain_run
from tests.command import refused
from tests.engine.blocks import WIDTH, Block, Convolution, Halves, Noise, as_added, block_of, sequences
from tests.engine.compare import assert_same
from tests.engine.parameters import quick, sampled
from tests.reference import FAMILIES
from tests.verification.test_definition import ValueInAGate

SENTENCES = ["some hat [MASK] small.", "the pictures of some hat [MASK] scaring marcus."]


def named(report: VerificationReport, name: str) -> list[Any]:
    return [check for check in report.checks if check.name == name]


class Stack(nn.Module):
    """Embeddings and two blocks. `attend` says whether the mask is used, `prepare` changes the embeddings."""

    def __init__(self, *blocks: nn.Module, masked: bool = True, centered: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(30, WIDTH).double()
        self.layers = nn.ModuleList(blocks or (Block(), Block()))
        self.masked, self.centered = masked, centered
        self.eval()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.words(input_ids)
        if self.centered:
            x = x - x.mean(0)
        mask = as_added(attention_mask[:, None, None].bool()).to(x) if self.masked else None
        for layer in self.layers:
            x = layer(x, mask)
        return x


def texts(*lengths: int) -> dict[str, Tensor]:
    ids = torch.randint(1, 30, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return {"input_ids": ids * mask, "attention_mask": mask.long()}


@pytest.mark.parametrize("name", sampled(FAMILIES, "bert", "gpt2", "gemma2", "t5-decoder", "wav2vec2"))
def test_families_pass(name: str) -> None:
    case = FAMILIES[name].case
    report = verify(case.model, case.inputs, case.layers)
    assert report.passed, str(report)
    assert {check.difference < 1e-8 for check in named(report, "map")} == {True}


@pytest.mark.parametrize("name", quick(["swin", "longformer", "deberta", "bloom"], "bloom"))
def test_attention_in_windows_and_inline_passes(name: str) -> None:
    size: dict[str, Any] = {"vocab_size": 30, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    bert = {**size, "intermediate_size": 48, "max_position_embeddings": 32}
    swin = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [2], "num_heads": [2], "window_size": 4}
    model = {
        "swin": lambda: transformers.SwinModel(transformers.SwinConfig(**swin)),
        "longformer": lambda: transformers.LongformerModel(transformers.LongformerConfig(**bert, attention_window=4)),
        "deberta": lambda: transformers.DebertaModel(transformers.DebertaConfig(**bert)),
        "bloom": lambda: transformers.BloomModel(transformers.BloomConfig(**size)),
    }[name]()
    inputs = {"pixel_values": torch.randn(2, 3, 16, 16)} if name == "swin" else texts(9, 6)
    report = verify(model.eval(), inputs)
    assert report.passed, str(report)


@pytest.mark.parametrize("dtype", quick([torch.float64, torch.float32, torch.bfloat16, torch.float16], torch.bfloat16))
def test_dtypes_pass(dtype: torch.dtype) -> None:
    model, tokenizer = load_model()
    report = verify(model.to(dtype), tokenizer(SENTENCES, padding=True, return_tensors="pt"))
    assert report.passed, str(report)
    assert report.dtype == str(dtype).removeprefix("torch.")
    naive = named(report, f"naive in {report.dtype}")
    assert len(naive) == (4 if dtype in (torch.bfloat16, torch.float16) else 0)
    rounding = [check.difference for check in named(report, "rounding")]
    assert (max(rounding) == 0) == (dtype == torch.float64)
    assert not any(check.difference < max(rounding) for check in naive)  # half precision rounds more


def test_all_checks_of_a_batch() -> None:
    model, tokenizer = load_model()
    report = verify(model, tokenizer(SENTENCES, padding=True, return_tensors="pt"))
    outcomes = {check.name: check.outcome for check in report.checks}
    assert {name for name, outcome in outcomes.items() if outcome == "passed"} == {
        *("rerun", "map", "replay: packed pairs", "replay: definition", "zeros", "rounding"),
        *("rows", "chunk sizes", "batch", "padding"),
    }
    assert report.layers == ("BertLayer",) * 4


@pytest.mark.parametrize("lengths", [(6, 6), (6, 4), (6,)])
def test_padding_and_batch_are_checked(lengths: tuple[int, ...]) -> None:
    assert verify(Stack(Block()), texts(*lengths)).passed
    report = verify(Stack(Block(), masked=False), texts(*lengths))
    assert not report.passed
    assert named(report, "padding")[-1].outcome == "failed"
    assert "does not use attention_mask" in report.verdict


def test_padding_without_a_mask_is_told() -> None:
    model, tokenizer = load_model()
    inputs = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    layer = model.bert.encoder.layer[0]
    with pytest.warns(UserWarning, match="pass attention_mask") as told:
        assert verify(model, inputs["input_ids"], layer).passed
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        verify(model, inputs, layer)


@pytest.mark.parametrize("count", [1, 2])
def test_mixed_examples_are_found(count: int) -> None:
    report = verify(Stack(centered=True), texts(*[6] * count))
    assert {check.outcome for check in named(report, "map")} == {"passed"}
    assert {check.outcome for check in named(report, "batch")} == {"failed"}
    assert "mixes the examples of a batch" in report.verdict


def test_value_used_twice_does_not_pass() -> None:
    """The map is wrong or refused, and the report says which."""
    block = block_of(ValueInAGate())
    report = verify(block, sequences(2), block)
    assert not report.passed
    (served,) = named(report, "map")
    if served.outcome == "refused":
        with pytest.raises(UnsupportedLayerError, match=re.escape(served.note)):
            ValueZeroing(block, block).attribute(sequences(2))
    else:
        assert report.verdict.startswith("failed: map of layer 0 (Block): in example ")
        assert "Do not use maps of this layer" in report.verdict


class DeltaFirst(Block):
    """Returns what it adds, and then its hidden states."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        y = super().forward(x, mask)
        return y - x, y


class StackOfDeltas(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([DeltaFirst(), DeltaFirst()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            _, x = layer(x)
        return x


def test_output_is_what_the_next_layer_is_given() -> None:
    """The first layer's map is right or refused: never the map of what the layer adds."""
    model = StackOfDeltas().eval()
    run = plain_run(lambda: model(sequences(2)), list(model.layers))[0]
    assert run.place == 1
    expected = defined_map(run, "self", (2, 6, 6), None, None, 6).scores
    found = verify(model, sequences(2), model.layers)
    outcome = named(found, "map")[0].outcome
    if outcome == "passed":
        scores = ValueZeroing(model, model.layers[0], normalize=False).attribute(sequences(2))
        assert_same(scores, expected)
    else:
        assert outcome in ("failed", "refused")
        assert not found.passed


class Wrong:
    """A replay whose outputs are wrong, for one target or for all."""

    def __init__(self, replay: Any, target: int | None) -> None:
        self.replay, self.name, self.fits, self.target = replay, replay.name, replay.fits, target

    def __call__(self, problem: Any) -> Iterator[Any]:
        for chunk in self.replay(problem):
            wrong = (chunk.target == self.target)[:, None] if self.target is not None else torch.tensor(True)
            yield chunk._replace(output=torch.where(wrong, chunk.output + 0.01, chunk.output))


def library_layer() -> nn.Module:
    """A layer whose replays are not compared with the definition. In layers of unknown code, they are."""
    return nn.TransformerEncoderLayer(WIDTH, 4, 24, batch_first=True).double().eval()


@pytest.mark.parametrize("target", [None, 3])
@pytest.mark.parametrize("name", ["packed pairs", "definition"])
def test_wrong_replay_is_found(name: str, target: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    replays = [Wrong(one, target) if one.name == name else one for one in value_zeroing.REPLAYS]
    monkeypatch.setattr(value_zeroing, "REPLAYS", tuple(replays))
    block = library_layer()
    report = verify(block, sequences(2), block)
    (served,), (wrong,) = named(report, "map"), named(report, f"replay: {name}")
    assert wrong.outcome == "failed"
    assert served.outcome == ("failed" if name == "packed pairs" else "passed")
    assert not report.passed
    if target is not None:
        assert "example 0, the row of token 3" in wrong.note


class WrongInChunks(Wrong):
    """A replay whose outputs are wrong if the caller says how many sources to zero at a time."""

    def __call__(self, problem: Any) -> Iterator[Any]:
        return self.replay(problem) if problem.asked.max_groups is None else super().__call__(problem)


def test_map_that_depends_on_the_chunk_size_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    replays = tuple(WrongInChunks(one, None) for one in value_zeroing.REPLAYS)
    monkeypatch.setattr(value_zeroing, "REPLAYS", replays)
    block = library_layer()
    report = verify(block, sequences(2), block)
    assert {check.outcome for check in named(report, "map")} == {"passed"}
    assert {check.outcome for check in named(report, "chunk sizes")} == {"failed"}
    assert report.verdict.startswith("failed: chunk sizes of layer 0 (TransformerEncoderLayer)")
    assert {check.name for check in report.checks if check.outcome == "failed"} == {"chunk sizes"}


def test_wrong_zeros_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A causal model with a score, far below the tolerance of a row, for a later token."""
    layer = library_layer()
    empty_map = value_zeroing.ReplayProblem.empty_map
    monkeypatch.setattr(value_zeroing.ReplayProblem, "empty_map", lambda self: empty_map(self) + 1e-14)
    later = torch.ones(6, 6, dtype=torch.bool).triu(1)
    report = verify(lambda x: layer(x, later), sequences(2), layer)
    assert {check.outcome for check in named(report, "map")} == {"passed"}
    assert named(report, "zeros")[0].outcome == "failed"
    assert "30 of 30 scores that are 0 by the definition are not 0" in report.verdict


@pytest.mark.parametrize(("dtype", "failed"), [(torch.float64, "map"), (torch.float32, "rounding")])
def test_definition_that_is_no_number_fails(dtype: torch.dtype, failed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64 it is compared with the map. In float32 it only says how exact float32 is."""

    def without_numbers(*given: Any) -> Any:
        found = defined_map(*given)
        if given[3] is None:  # the dtype of the layer
            found.scores[:, 2] = torch.nan
        return found

    monkeypatch.setattr(checks, "defined_map", without_numbers)
    block = Block().to(dtype)
    report = verify(block, sequences(2).to(dtype), block)
    assert not report.passed
    assert report.verdict.startswith(f"failed: {failed} of layer 0")
    json.loads(report.to_json(), parse_constant=pytest.fail)


def test_map_that_is_no_number_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    compute = LayerVerification.checks
    monkeypatch.setattr(LayerVerification, "checks", lambda self, run: compute(_with_nan(self), run))
    report = verify(Stack(Block()), texts(6))
    assert {named(report, name)[0].outcome for name in ("map", "replay: packed pairs", "chunk sizes")} == {"failed"}
    assert "where the definition gives" in report.verdict


def _with_nan(layer: LayerVerification) -> LayerVerification:
    compute = layer.compute
    layer.compute = lambda: compute().index_fill(2, torch.tensor([1]), torch.nan)
    return layer


def test_refused_layer_does_not_pass() -> None:
    block = Block(after=Noise())
    report = verify(block, sequences(2), block)
    assert report.verdict.startswith("refused: captum_vz gives no map of layer 0 (Block). ")
    assert not report.passed


def test_changes_below_rounding_fail() -> None:
    block = Block().float()
    report = verify(lambda x: block(x + 1e7 * torch.ones_like(x)), sequences(2).float(), block)
    assert named(report, "rounding")[0].outcome == "failed"
    assert "model.double()" in report.verdict


@pytest.mark.parametrize("layer", [lambda: Block(after=Convolution()), lambda: Halves(lambda x: x)])
def test_layers_that_mix_or_have_windows_pass(layer: Any) -> None:
    block = layer()
    assert verify(block, sequences(2), block).passed


def test_tokens_first_is_not_taken_for_a_batch() -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 32).eval()
    report = verify(layer, sequences(2).float(), layer)
    assert report.passed
    assert [check.note for check in named(report, "batch")] == [
        "dimension 0 of the inputs is not the batch: it is [2], and maps have 6 examples"
    ]
    assert report.verdict.endswith("Not checked: batch, padding.")


def test_further_arguments_are_passed() -> None:
    model = Stack()
    report = verify(model, texts(6)["input_ids"], additional_forward_args=texts(6)["attention_mask"])
    assert report.passed
    assert named(report, "batch")[0].outcome == "passed"


def test_number_of_sources_is_bounded() -> None:
    block = Block()
    replays = [verify(block, sequences(1, 9), block, max_sources=most) for most in (3, 32)]
    assert all(report.passed for report in replays)
    for wrong in (0, 2.5):
        with pytest.raises(ArgumentError, match="integer of at least"):
            verify(block, sequences(1), block, max_sources=wrong)  # type: ignore[arg-type]


def test_function_needs_layers() -> None:
    with pytest.raises(ArgumentError, match="pass layers="):
        verify(lambda x: x, sequences(1))


def test_model_is_left_as_found() -> None:
    model, inputs = Stack(), texts(6, 4)
    before, output = {name: value.clone() for name, value in model.state_dict().items()}, model(**inputs)
    verify(model, inputs)
    for name, value in model.state_dict().items():
        assert_same(value, before[name], 0)
    assert_same(model(**inputs), output, 0)
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in model.modules())


def test_report_as_text_and_json() -> None:
    report = verify(Stack(masked=False), texts(6, 4))
    found = json.loads(report.to_json())
    assert (found["passed"], found["verdict"], found["layers"]) == (False, report.verdict, ["Block", "Block"])
    assert len(found["checks"]) == len(report.checks)
    assert {check["outcome"] for check in found["checks"]} == {"passed", "skipped", "failed"}
    lines = str(report).splitlines()
    assert lines[0] == report.verdict
    heads = ["check", "layers", "worst", "difference", "allowed", "outcome"]
    assert [line.split() for line in lines].count(heads) == 1
    assert [line.split()[0] for line in lines if line.endswith(" failed")] == ["padding"]


def test_report_says_how_maps_came_about() -> None:
    """By layer: the tap, the layout, the replay, and why replays before it failed."""
    # Of at most 16 tokens, the definition would run first.
    stack = Stack(Block(), Block(), Block(after=Convolution()))
    notes = [(name, note) for name, note in verify(stack, texts(18)).notes() if "read at" in note]
    way = "read at AttentionInterface, seen as tokens, by"
    assert notes[0] == ("Block 0-1", f"{way} packed pairs")
    assert notes[1][0] == "Block 2"
    assert notes[1][1].startswith(f"{way} definition (not packed pairs: ")


@pytest.mark.parametrize("verbose", [False, True])
def test_command_says_its_verdict_first(capsys: pytest.CaptureFixture[str], verbose: bool) -> None:
    assert main(["verify", *(["--verbose"] if verbose else [])]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("passed: the maps of 4 layers are those of the definition")
    assert ("BertLayer 0-3: read at" in out) is verbose
    assert not err


def test_progress_names_each_layer() -> None:
    told: list[str] = []
    verify(Stack(), texts(6), advance=told.append)
    assert told == ["layer 0", "layer 1", "chunk sizes, batches and padding"]


def test_long_inputs_verify_folded_pairs() -> None:
    """Short inputs skip this replay, and long ones are computed by it."""
    layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True).eval()
    for tokens, outcome in ((8, "skipped"), (160, "passed")):
        states = torch.randn(1, tokens, 64, generator=torch.Generator().manual_seed(3))
        report = verify(layer, states, layer, max_sources=2)
        assert [check.outcome for check in named(report, "replay: folded pairs")] == [outcome]


def test_command_fails_with_status_1(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    replays = tuple(Wrong(one, None) for one in value_zeroing.REPLAYS)
    monkeypatch.setattr(value_zeroing, "REPLAYS", replays)
    with pytest.raises(SystemExit) as left:
        main(["verify", "some hat [MASK] small.", "--json"])
    assert left.value.code == 1
    found = json.loads(capsys.readouterr().out)
    assert found["passed"] is False
    assert found["layers"] == ["BertLayer"] * 4


def test_command_verifies_the_model_of_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    _, tokenizer = load_model()
    size = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.BertConfig(vocab_size=len(tokenizer), **size)
    model = transformers.BertForMaskedLM(config).eval()
    model.save_pretrained("mine")
    tokenizer.save_pretrained("mine")
    capsys.readouterr()
    options = ["verify", SENTENCES[0], "--model", "mine"]
    assert main(options) == 0
    out, err = capsys.readouterr()
    expected = json.loads(verify(model, dict(tokenizer(SENTENCES[0], return_tensors="pt"))).to_json())
    assert expected["layers"] == ["BertLayer"] * 3
    assert (out.splitlines()[0].partition(",")[0], err) == (expected["verdict"].partition(",")[0], "")
    assert main([*options, "--json"]) == 0
    assert_same_report(json.loads(capsys.readouterr().out), expected)


def assert_same_report(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(found) == list(expected)
    assert (found["passed"], found["layers"], found["dtype"]) == (True, expected["layers"], expected["dtype"])
    for one, other in zip(found["checks"], expected["checks"], strict=True):
        assert (one["name"], one["layer"], one["outcome"]) == (other["name"], other["layer"], other["outcome"])
        assert one["difference"] == pytest.approx(other["difference"], abs=1e-6)


def test_command_refuses_an_empty_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert "the text is empty" in refused(capsys, "verify", " ")
