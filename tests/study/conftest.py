"""The embedded model, and the grammar's sentences as examples."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from matplotlib.figure import Figure
from transformers import BertForMaskedLM, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from captum_vz.study import METHODS, METRICS, Example
from captum_vz.testbed import agreement_sentences, load_model

Shipped = tuple[BertForMaskedLM, PreTrainedTokenizerFast]
Decoder = tuple[GPT2LMHeadModel, PreTrainedTokenizerFast]


def parts_of(figure: Any) -> Iterator[Any]:
    """A figure, and all figures inside of it."""
    yield figure
    for part in figure.subfigs:
        yield from parts_of(part)


@pytest.fixture(scope="session")
def shipped() -> Shipped:
    return load_model()


@pytest.fixture(scope="session")
def precise(shipped: Shipped) -> Shipped:
    """The same in float64."""
    model, tokenizer = shipped
    return copy.deepcopy(model).double(), tokenizer


@pytest.fixture(scope="session")
def decoder() -> Decoder:
    """A small GPT-2 with random weights and the embedded model's sub-words, without mask and special tokens."""
    _, tokenizer = load_model()
    tokenizer.mask_token = None
    tokenizer.backend_tokenizer.post_processor = None
    config = GPT2Config(vocab_size=len(tokenizer), n_layer=2, n_head=2, n_embd=16, n_positions=32)
    config.bos_token_id = config.eos_token_id = None
    return GPT2LMHeadModel(config).double().eval(), tokenizer


@pytest.fixture(scope="session")
def examples() -> list[Example]:
    return [Example.from_record(record) for record in agreement_sentences(10, seed=3)]


@pytest.fixture(scope="session")
def finished(examples: list[Example], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A small study of all examples."""
    from tests.study.test_run import study

    with without_drawing():
        return study(tmp_path_factory.mktemp("finished") / "study", examples)


def never() -> Any:
    """Loads a model that nobody may ask for."""
    raise AssertionError("loaded")


def empty_figures() -> Any:
    empty = dict.fromkeys(("draw_summary", "draw_differences"), lambda *_: Figure())
    return patch.multiple("captum_vz.study.results", **empty)


@contextmanager
def without_drawing() -> Iterator[None]:
    """Figures of studies are empty, and files have no picture, for tests that look at none: drawing takes long."""
    with patch.object(Figure, "savefig", _write), empty_figures():
        yield


def _write(figure: Figure, file: Any, **options: Any) -> None:
    file.write_bytes(b"\x89PNG") if isinstance(file, Path) else file.write(b"\x89PNG")


@pytest.fixture
def undrawn() -> Iterator[None]:
    with without_drawing():
        yield


@pytest.fixture
def own_names() -> Iterator[None]:
    """What a test registers is gone after it."""
    registered: tuple[dict[str, Any], ...] = (METHODS, METRICS)
    before = [dict(registry) for registry in registered]
    yield
    for registry, known in zip(registered, before, strict=True):
        registry.clear()
        registry.update(known)
