"""Encoders of sentences: the prompts before a text, and the embedding that the model's own `encode` returns."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from captum_vz.errors import ArgumentError
from captum_vz.testbed.models import model_source

POOLING = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}
QUERY, DOCUMENT = ("query",), ("document", "passage", "corpus")  # the prompts of encode_query and encode_document


@dataclass(frozen=True)
class Embedding:
    """What makes embeddings `(batch, d)` of tokens, as sentence-transformers does."""

    run: Callable[..., Tensor]  # takes inputs by keyword, and `prompt_length`: how many tokens pooling may leave out
    prompts: Mapping[str, str] = field(default_factory=dict)  # the texts that are put before a text, by their names
    default: str | None = None  # the name of the prompt of all texts
    length: Callable[[str], int | None] = lambda prompt: None  # how many tokens of a prompt the pooling leaves out
    own: Callable[[str, str], Tensor] | None = None  # the model's embedding of a text and a prompt; None: only `run`
    chosen: tuple[str, str] | None = None  # the user's names for a text and for the second one; empty: no prompt

    def __call__(self, **inputs: Any) -> Tensor:
        """The embeddings of tokens without a prompt."""
        return self.run(**inputs)

    def after(self, prompt: str) -> Callable[..., Tensor]:
        """The function that makes the embeddings of tokens that begin with a prompt."""
        return partial(self.run, prompt_length=self.length(prompt)) if prompt else self.run

    def names(self, count: int) -> Sequence[str]:
        """The names of the prompts of one or two texts. Two texts are a query and a document, if these have prompts."""
        asked = [next((name for name in names if self.prompts.get(name)), "") for names in (QUERY, DOCUMENT)]
        names = self.chosen or ((self.default,) * 2 if self.default else asked if count == 2 else ("", ""))
        for name in names:
            if name and name not in self.prompts:
                known = ", ".join(map(repr, self.prompts))
                told = f"the prompts of the model are {known}: pass one of these, a pair of them, or '' for no prompt"
                told = told if known else "the model has no prompts: leave it out"
                raise ArgumentError(f"prompt_name is {name!r}, but {told}.", "prompt_name")
        return names[:count]


def of_sentence_transformer(given: Any) -> Embedding:
    """The embedding of a SentenceTransformer: all its modules, its prompts, and the dimensions that it keeps."""

    def run(prompt_length: int | None = None, **inputs: Any) -> Tensor:
        length = {} if prompt_length is None else {"prompt_length": prompt_length}
        return given({**inputs, **length})["sentence_embedding"][:, : given.truncate_dim]

    def length(prompt: str) -> int | None:
        return given.preprocess(["a"], prompt=prompt).get("prompt_length")

    def own(text: str, prompt: str) -> Tensor:
        return given.encode([text], prompt=prompt, convert_to_tensor=True, show_progress_bar=False)

    return Embedding(run, given.prompts, given.default_prompt_name, length, own)


def of_folder(name: str, model: Any) -> Embedding | None:
    """The embedding that the folder of a sentence encoder describes. None: it describes none."""
    folder = model_source(name) or Path(name)
    if not (folder / "modules.json").is_file():
        return None
    kinds = {one["type"].rpartition(".")[2]: one["path"] for one in json.loads((folder / "modules.json").read_text())}
    known = json.loads((folder / kinds.get("Pooling", "") / "config.json").read_text())
    settings = folder / "config_sentence_transformers.json"
    prompted = json.loads(settings.read_text()) if settings.is_file() else {}
    # Earlier releases saved a mark for each way of pooling, which new ones save by its name.
    marks = [POOLING.get(mode) for mode, value in known.items() if mode.startswith("pooling_mode_") and value is True]
    modes = [known["pooling_mode"]] if "pooling_mode" in known else marks
    is_known = set(kinds) <= {"Transformer", "Pooling", "Normalize"} and known.get("include_prompt", True)
    if not is_known or modes not in (["mean"], ["cls"]) or prompted.get("truncate_dim"):
        raise ArgumentError(
            f"{name} is a sentence encoder of {', '.join(kinds)}, which is not read from its folder: load it with "
            "SentenceTransformer(folder), and pass this object."
        )

    def run(prompt_length: int | None = None, **inputs: Any) -> Tensor:
        """The mean of the states of all tokens, or the state of the first token."""
        states: Tensor = model(**inputs).last_hidden_state
        there = inputs["attention_mask"][..., None].to(states.dtype)
        return states[:, 0] if modes == ["cls"] else (states * there).sum(1) / there.sum(1)

    return Embedding(run, prompted.get("prompts") or {}, prompted.get("default_prompt_name"))


def prompts_of(embedding: Embedding, texts: Sequence[Any]) -> tuple[list[str], list[str]]:
    """The prompt of each text, and sentences that name it. The output of a tokenizer has its prompt already."""
    named = list(zip(texts, embedding.names(len(texts)), ("the text", "the second text"), strict=False))
    prompts = [embedding.prompts[name] if name and isinstance(one, str) else "" for one, name, _ in named]
    shown = zip(prompts, named, strict=True)
    told = [f"{what} is read after the prompt {name!r}, {prompt!r}" for prompt, (_, name, what) in shown if prompt]
    return prompts, told


def check_own(embedding: Embedding, found: Tensor, text: str, prompt: str) -> None:
    """Refuse an encoder whose own `encode` returns another embedding of a text than the one that is explained."""
    if embedding.own is None:
        return
    expected = embedding.own(text, prompt).to(found)
    moved = ((found - expected).norm() / expected.norm()).item()
    if not moved < (1e-3 if found.dtype == torch.float32 else 5e-2):
        raise ArgumentError(
            f"the model's encode returns an embedding that differs by {moved:.2g} of its length from that of its "
            "modules: it does more than they do. Explain a function of your own with ValueZeroingEffect."
        )
