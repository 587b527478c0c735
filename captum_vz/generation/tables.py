"""A result as a table, as JSON and as a file."""

from __future__ import annotations

import json
from dataclasses import asdict
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from captum_vz.errors import ArgumentError
from captum_vz.generation.words import TokenText

if TYPE_CHECKING:
    from pandas import DataFrame

    from captum_vz.generation.result import GenerationAttribution

FORMAT = "captum_vz generation 1"


def to_pandas(found: GenerationAttribution, mask: Tensor | None, layer: int | None) -> DataFrame:
    """A long table: step, token, source, source token, part, layer, score."""
    try:
        import pandas as pd
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("to_pandas needs pandas: pip install pandas, or the extra [study].") from error
    hidden = found.check_mask(mask)
    layers = range(len(found.layers)) if layer is None else [found.layer_index(layer)]
    rows = []
    for index in layers:
        for step, token in enumerate(found.generated.labels):
            for part, text, scores in (
                ("prompt", found.prompt, found.scores[step, :, index]),
                ("generated", found.generated, found.prefix[step, :step, index]),
            ):
                for source, score in enumerate(scores.tolist()):
                    if part == "generated" or hidden is None or not hidden[source]:
                        rows.append((found.layers[index], step, token, part, source, text.labels[source], score))
    return pd.DataFrame(rows, columns=["layer", "step", "token", "part", "source", "source_token", "score"])


def to_json(found: GenerationAttribution, path: str | PathLike[str] | None, mask: Tensor | None) -> str:
    """All scores, by layer, step and source."""
    hidden = found.check_mask(mask)
    record = {
        "method": found.method,
        "text": found.text,
        "prompt": list(found.prompt.labels),
        "prompt_ids": list(found.prompt.ids),
        "generated": list(found.generated.labels),
        "generated_ids": list(found.generated.ids),
        "layers": list(found.layers),
        "mask": None if hidden is None else hidden.tolist(),
        "scores": found.scores.permute(2, 0, 1).tolist(),
        "prefix": found.prefix.permute(2, 0, 1).tolist(),
        "prompt_share": found.prompt_share.T.tolist(),
    }
    text = json.dumps(record, ensure_ascii=False)
    if path is not None:
        Path(path).write_text(text, "utf-8")
    return text


def save(found: GenerationAttribution, path: str | PathLike[str]) -> None:
    """Scores as tensors, all other fields as JSON in the file's metadata."""
    about = {
        "prompt": asdict(found.prompt),
        "generated": asdict(found.generated),
        "layers": found.layers,
        "method": found.method,
        "text": found.text,
    }
    tensors = {"scores": found.scores.contiguous(), "prefix": found.prefix.contiguous()}
    save_file(tensors, path, {"format": FORMAT, "about": json.dumps(about)})


def load(path: str | PathLike[str]) -> dict[str, Any]:
    """The fields of a result in a file."""
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise ArgumentError(f"{path} holds no result of a generation: pass a file that save wrote.")
            tensors = {name: file.get_tensor(name) for name in ("scores", "prefix")}
    except SafetensorError as error:
        raise ArgumentError(f"{path} cannot be read: {error}. Pass a file that save wrote.") from error
    about = json.loads(metadata["about"])
    texts = {name: _tokens(about[name]) for name in ("prompt", "generated")}
    return {**tensors, **texts, "layers": tuple(about["layers"]), "method": about["method"], "text": about["text"]}


def _tokens(fields: dict[str, Any]) -> TokenText:
    sections = tuple((str(name), int(start), int(stop)) for name, start, stop in fields.pop("sections"))
    return TokenText(**{name: tuple(values) for name, values in fields.items()}, sections=sections)
