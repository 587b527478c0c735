"""The scores of a generated text: each new token, each layer, back to the prompt. As tables, files and pictures."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from captum.attr import LLMAttributionResult
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from captum_vz._files import write_file
from captum_vz.errors import ArgumentError
from captum_vz.functional import normalize_rows
from captum_vz.generation.inseq_form import as_inseq
from captum_vz.result.words import TokenText
from captum_vz.visualization import View, view
from captum_vz.visualization.pictures.axes import FONT_SIZE, write_plain_labels
from captum_vz.visualization.pictures.files import Content, Picture, set_content
from captum_vz.visualization.pictures.scales import make_scale, set_ticks
from captum_vz.visualization.tokens import shortened

if TYPE_CHECKING:
    from pandas import DataFrame

FORMAT = "captum_vz generation 1"

# In inches. A cell is as high as a line of text.
CELL, LETTER, MARGIN = 0.17, 0.075, 0.9
MOST_COLUMNS = 64  # of a panel, about ten inches


@dataclass(frozen=True)
class GenerationAttribution:
    """How much each generated token depends on each token of the prompt, and on each generated token before it.

    m is the number of prompt tokens and n the number of generated tokens. For methods whose rows sum to 1, row t of
    `scores` and row t of `prefix` together sum to 1. In a model with an encoder, the prompt tokens are the tokens of
    the encoder, then the tokens with which the decoder starts.

    Attributes:
        scores: The scores of the prompt tokens, `(n, m, layers)`.
        prefix: The scores of the generated tokens, `(n, n, layers)`. Only entries before the diagonal differ from 0.
        prompt: The prompt tokens.
        generated: The generated tokens.
        layers: The names of the layers.
        method: The name of the method.
        text: The generated text.
    """

    scores: Tensor
    prefix: Tensor
    prompt: TokenText
    generated: TokenText
    layers: tuple[str, ...]
    method: str
    text: str
    _again: Callable[[list[int]], Tensor | None] | None = field(default=None, repr=False, compare=False)

    @property
    def prompt_share(self) -> Tensor:
        """How much of each generated token's row lies on the prompt, `(n, layers)`."""
        return self.scores.sum(1)

    def mask(self, *kinds: str | Collection[str]) -> Tensor:
        """Which prompt tokens are of the given kinds, `(m,)`. The scores do not change.

        Pictures, tables and :meth:`to_llm_attribution_result` take the mask and leave these tokens out.

        Args:
            kinds: "stop" (common English words), "punctuation", "special" (special tokens), or lists of words. Words
                are compared decoded, without spaces, in lower case. All pieces of a word belong to the word.

        Returns:
            True for tokens of these kinds.
        """
        return self.prompt.mask(kinds)

    def grouped(self, by: Any, *, joint: bool = True) -> GenerationAttribution:
        """The scores of words, sentences, sections or spans of the prompt.

        The method runs again, and treats all tokens of a group together: values are zeroed jointly before layers are
        joined. A rollout joins the rows of a group by their mean. The last prompt token is then kept apart until the
        layers are joined, because its row belongs to the first generated token. The scores of a group's tokens are
        added up if the method has no joint form (ALTILogit, ALTIPlus, gradients).

        Args:
            by: "words", "sentences", "sections" (the messages of a chat), or spans: a list of (start, stop), or a dict
                of names to (start, stop). Tokens outside all spans are groups of their own. Or a list with the number
                of each token's group, as in Captum's `feature_mask`.
            joint: Whether to run the method again. If False, the scores of a group's tokens are added up.

        Returns:
            The result with one column for each group. `prompt` holds the groups.
        """
        member, names = self.prompt.groups(by)
        if joint and self._again is None:
            raise ArgumentError(
                "This result has no model: it was loaded from a file, or is grouped already. Call grouped on the "
                "original result, or pass joint=False to add the scores of each group."
            )
        found = self._again(member) if joint and self._again is not None else None
        if found is None:
            found = torch.cat([summed(self.scores, member), self.prefix], dim=1)
        count = max(member) + 1
        prompt = self.prompt.grouped(member, names)
        return replace(self, scores=found[:, :count], prefix=found[:, count:], prompt=prompt, _again=None)

    def to_pandas(self, *, mask: Tensor | None = None, layer: int | None = None) -> DataFrame:
        """A table with one row for each generated token, source token and layer. Needs pandas.

        Args:
            mask: Prompt tokens whose rows are left out, `(m,)`.
            layer: One layer. None: all layers.
        """
        try:
            import pandas as pd
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError("to_pandas needs pandas: pip install pandas, or the extra [study].") from error
        kept = self._kept(mask)
        layers = range(len(self.layers)) if layer is None else [self.layer_index(layer)]
        rows = []
        for index in layers:
            for step, token in enumerate(self.generated.labels):
                for part, text, scores, sources in (
                    ("prompt", self.prompt, self.scores[step, :, index].tolist(), kept),
                    ("generated", self.generated, self.prefix[step, :, index].tolist(), range(step)),
                ):
                    name = self.layers[index]
                    rows += [(name, step, token, part, i, text.labels[i], scores[i]) for i in sources]
        return pd.DataFrame(rows, columns=["layer", "step", "token", "part", "source", "source_token", "score"])

    def to_json(self, path: str | PathLike[str] | None = None, *, mask: Tensor | None = None) -> str:
        """The tokens and all scores as JSON. Scores are lists of layers, of generated tokens, of sources.

        Args:
            path: A file to which the text is written as well.
            mask: Prompt tokens that are of no interest, `(m,)`. It is written, and no score is left out.
        """
        hidden = self.check_mask(mask)
        record = {
            "method": self.method,
            "text": self.text,
            "prompt": list(self.prompt.labels),
            "prompt_ids": list(self.prompt.ids),
            "generated": list(self.generated.labels),
            "generated_ids": list(self.generated.ids),
            "layers": list(self.layers),
            "mask": None if hidden is None else hidden.tolist(),
            "scores": self.scores.permute(2, 0, 1).tolist(),
            "prefix": self.prefix.permute(2, 0, 1).tolist(),
            "prompt_share": self.prompt_share.T.tolist(),
        }
        text = json.dumps(record, ensure_ascii=False)
        if path is not None:
            write_file(path, text)
        return text

    def save(self, path: str | PathLike[str]) -> None:
        """Write the result to one file, in the format of safetensors. :meth:`load` reads it."""
        about = {
            "prompt": asdict(self.prompt),
            "generated": asdict(self.generated),
            "layers": self.layers,
            "method": self.method,
            "text": self.text,
        }
        tensors = {"scores": self.scores.contiguous(), "prefix": self.prefix.contiguous()}
        write_file(path, save(tensors, {"format": FORMAT, "about": json.dumps(about)}))

    @classmethod
    def load(cls, path: str | PathLike[str]) -> GenerationAttribution:
        """Read a result that :meth:`save` wrote. It has no model, so `grouped` needs `joint=False`."""
        try:
            with safe_open(path, "pt") as file:
                metadata = file.metadata() or {}
                if metadata.get("format") != FORMAT:
                    raise ArgumentError(f"{path} holds no result of a generation: pass a file that save wrote.")
                scores, prefix = (file.get_tensor(name) for name in ("scores", "prefix"))
        except SafetensorError as error:
            raise ArgumentError(f"{path} cannot be read: {error}. Pass a file that save wrote.") from error
        about = json.loads(metadata["about"])
        prompt, generated = (_tokens(about[name]) for name in ("prompt", "generated"))
        return cls(scores, prefix, prompt, generated, tuple(about["layers"]), about["method"], about["text"])

    def plot(self, layer: int = -1, *, mask: Tensor | None = None, prefix: bool = False) -> Figure:
        """Draw the scores of a layer: generated tokens from top to bottom, prompt tokens from left to right.

        Colours of shares are by the square root. Long prompts are drawn in several rows of panels. The share of the
        prompt stands at the right of each row.

        Args:
            layer: The layer, negative ones from the end.
            mask: Prompt tokens that are left out, `(m,)`.
            prefix: Whether to draw the generated tokens as columns as well.
        """
        index, kept = self.layer_index(layer), self._kept(mask)
        given = [self.prompt.labels[i] for i in kept]
        scores, before = self.scores[:, kept, index], self.prefix[:, :-1, index]
        return _draw(
            torch.cat([scores, before], dim=1) if prefix else scores,
            self.generated.labels,
            [*given, *self.generated.labels[:-1]] if prefix else given,
            split=len(given),
            share=self.prompt_share[:, index],
            title=f"{self.method}, {self.layers[index]}",
        )

    def view(
        self,
        layer: int = -1,
        *,
        step: int | None = 0,
        mask: Tensor | None = None,
        title: str | None = None,
        theme: str = "auto",
    ) -> View:
        """An interactive page: pointing at a generated token colors the tokens that it draws on.

        Args:
            layer: The layer that is shown at first, negative ones from the end.
            step: The generated token that is chosen at first, negative ones from the end. None: none.
            mask: Prompt tokens that are left out, `(m,)`. The other scores do not change.
            title: The heading of the page.
            theme: "light", "dark", or "auto", see :func:`captum_vz.visualization.view`.

        Returns:
            A view. A notebook shows it, and `save(path)` writes it to one file.
        """
        kept = self._kept(mask)
        maps = torch.cat([self.scores[:, kept], self.prefix], dim=1)
        words = max(self.prompt.words, default=-1) + 1
        return view(
            {self.method: {name: maps[..., index] for index, name in enumerate(self.layers)}},
            self.generated.labels,
            columns=[*(self.prompt.labels[i] for i in kept), *self.generated.labels],
            offset=len(kept),
            words=self.generated.words,
            column_words=[*(self.prompt.words[i] for i in kept), *(words + word for word in self.generated.words)],
            special=[*(self.prompt.special[i] for i in kept), *self.generated.special],
            token=step,
            layer=self.layer_index(layer),
            title="Which tokens does each new token draw on?" if title is None else title,
            theme=theme,
        )

    def to_llm_attribution_result(
        self, layer: int = -1, *, mask: Tensor | None = None, renormalize: bool = False
    ) -> LLMAttributionResult:
        """Captum's result, with its `plot_token_attr` and `plot_seq_attr`. It has no columns for generated tokens.

        Args:
            layer: The layer, negative ones from the end.
            mask: Prompt tokens whose scores are set to 0, `(m,)`.
            renormalize: Whether to divide each row by its sum over the prompt.
        """
        scores = self.scores[..., self.layer_index(layer)]
        mask = self.check_mask(mask)
        scores = scores if mask is None else scores.masked_fill(mask, 0)
        scores = normalize_rows(scores) if renormalize else scores
        return LLMAttributionResult(
            input_tokens=list(self.prompt.labels),
            output_tokens=list(self.generated.labels),
            seq_attr=scores.sum(0),
            token_attr=scores,
        )

    def to_inseq(self, layer: int = -1) -> Any:
        """A `FeatureAttributionOutput` of inseq, with its `show`, `aggregate` and `save`. Needs inseq.

        The source of an encoder-decoder has scores of its own. Otherwise, the prompt and the generated tokens are
        inseq's target. NaN stands for later tokens. Tokens are labels, without the marks of a tokenizer.

        Args:
            layer: The layer, negative ones from the end.
        """
        index = self.layer_index(layer)
        about = {"attribution_method": self.method, "layer": self.layers[index], "generated_texts": [self.text]}
        return as_inseq(self.scores[..., index], self.prefix[..., index], self.prompt, self.generated, about)

    def layer_index(self, layer: int) -> int:
        """The index of a layer, from 0."""
        count = len(self.layers)
        if not -count <= layer < count:
            raise ArgumentError(f"layer {layer} is out of range: there are {count}, so pass {-count} to {count - 1}.")
        return layer % count

    def check_mask(self, mask: Any) -> Tensor | None:
        """The mask as a tensor on the CPU."""
        if mask is None:
            return None
        mask = torch.as_tensor(mask).cpu()
        if mask.dtype != torch.bool or mask.shape != (len(self.prompt.ids),):
            raise ArgumentError(
                f"mask is {tuple(mask.shape)} of {mask.dtype}: pass bools ({len(self.prompt.ids)},), one for each "
                "prompt token."
            )
        return mask

    def _kept(self, mask: Any) -> list[int]:
        """The positions of the prompt tokens that a mask does not leave out."""
        hidden = self.check_mask(mask)
        return [i for i in range(len(self.prompt.ids)) if hidden is None or not hidden[i]]


def summed(scores: Tensor, member: list[int]) -> Tensor:
    """Scores `(n, m, layers)` with one column for each group, `(n, groups, layers)`: the sum of its tokens."""
    index = torch.tensor(member)[None, :, None].expand_as(scores)
    return scores.new_zeros(len(scores), max(member) + 1, scores.shape[2]).scatter_add(1, index, scores)


def _tokens(fields: dict[str, Any]) -> TokenText:
    sections = tuple((str(name), int(start), int(stop)) for name, start, stop in fields.pop("sections"))
    return TokenText(**{name: tuple(values) for name, values in fields.items()}, sections=sections)


def _draw(
    columns: Tensor, generated: Sequence[str], sources: Sequence[str], *, split: int, share: Tensor, title: str
) -> Figure:
    """Draw scores, generated tokens from top to bottom. See :meth:`GenerationAttribution.plot`.

    Args:
        columns: The scores, `(n, columns)`.
        generated: The labels of the rows.
        sources: The labels of the columns.
        split: How many first columns are prompt tokens. A line stands after them.
        share: The share of the prompt in each row, `(n,)`. It is left out if scores are signed.
        title: The title.
    """
    if not sources:
        raise ArgumentError("The mask leaves out all prompt tokens: there is nothing to draw. Keep at least one.")
    labels, steps = [shortened(label) for label in sources], [shortened(label) for label in generated]
    scale = make_scale([columns], None, None)
    signed = scale.signed
    panels = math.ceil(len(labels) / MOST_COLUMNS)
    width = math.ceil(len(labels) / panels)
    shares = None if signed else [f"{value:.2f}" for value in share.tolist()]
    top = LETTER * max(map(len, labels)) + 0.25
    side = LETTER * max(map(len, steps)) + (0.0 if shares is None else 0.9)
    inches = (max(width * CELL, 2.2) + side + MARGIN, panels * (len(steps) * CELL + top) + 0.9)
    figure = Picture(figsize=inches, dpi=150, layout="constrained")
    axes: list[Axes] = figure.subplots(panels, 1, squeeze=False).flatten().tolist()
    for index, panel in enumerate(axes):
        start = index * width
        shown = torch.full((len(steps), width), float("nan"), dtype=torch.float64)
        part = columns[:, start : start + width]
        shown[:, : part.shape[1]] = part
        image = panel.imshow(shown.numpy(), cmap=scale.colors, norm=scale.shared, aspect="auto")
        _label(panel, labels[start : start + width], steps, shares if index == 0 else None)
        if start < split < start + part.shape[1]:
            panel.axvline(split - start - 0.5, color="black", linewidth=0.8)
    bar = figure.colorbar(image, ax=axes, shrink=min(1, 3 / inches[1]), anchor=(0, 1), aspect=15, pad=0.02)
    bar.set_label("score" if signed else "share of the row", fontsize=FONT_SIZE)
    set_ticks(bar, scale, 5 if inches[1] > 1.8 else 3)
    bar.ax.tick_params(labelsize=FONT_SIZE - 1)
    figure.supylabel("generated token", fontsize=FONT_SIZE + 1)
    figure.suptitle(title, fontsize=FONT_SIZE + 2)
    set_content(axes[0], _content(columns, steps, labels, "score" if signed else "share of the row"))
    return figure


def _label(panel: Axes, columns: list[str], steps: list[str], share: list[str] | None) -> None:
    panel.xaxis.tick_top()
    write_plain_labels(panel.xaxis, range(len(columns)), columns, rotation=90, fontsize=FONT_SIZE)
    write_plain_labels(panel.yaxis, range(len(steps)), steps, fontsize=FONT_SIZE)
    panel.tick_params(length=0)
    if share is not None:
        right = panel.secondary_yaxis("right")
        right.set_yticks(range(len(steps)), share, fontsize=FONT_SIZE - 1, color="#555555")
        right.set_ylabel("prompt share", fontsize=FONT_SIZE - 1, color="#555555")
        right.tick_params(length=0)
        right.spines[:].set_visible(False)


def _content(scores: Tensor, steps: list[str], labels: list[str], name: str) -> Content:
    """Steps by sources in words and as a table."""

    def table() -> list[tuple[Any, ...]]:
        return [
            (i, steps[i], j, labels[j], value) for i, row in enumerate(scores.tolist()) for j, value in enumerate(row)
        ]

    best = scores.abs().max(1).indices.tolist()
    each = zip(steps, best, scores, strict=True)
    most = ", ".join(f"{step} on {labels[j]} {float(row[j]):.2f}" for step, j, row in each)
    sentence = f"{len(steps)} generated tokens by {len(labels)} sources. Each depends most: {most}."
    return Content(sentence, ("step", "generated token", "in", "source token", name), table)
