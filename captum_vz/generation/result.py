"""The scores of a generated text: each new token, each layer, back to the prompt. As tables, files and pictures."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from itertools import product
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from captum.attr import LLMAttributionResult
from matplotlib.figure import Figure
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from captum_vz._files import write_file
from captum_vz.errors import ArgumentError, needs_extra
from captum_vz.functional import normalize_rows
from captum_vz.generation.forms import StoredMethod, inseq_form, over_signal
from captum_vz.methods import Method, check_layer
from captum_vz.result import Explanation, Part, Row, TokenText
from captum_vz.visualization import View, draw_comparison, terminal_text, view
from captum_vz.visualization.forms import text_table

if TYPE_CHECKING:
    from pandas import DataFrame

FORMAT = "captum_vz generation 1"
STRONGEST = 3  # tokens in a line


@dataclass(repr=False)
class GenerationAttribution(Explanation):
    """How much each generated token depends on each token of the prompt, and on each generated token before it.

    It is an :class:`~captum_vz.result.Explanation` with a row for each generated token. Its tokens are those of the
    prompt, m, and the generated ones, n. For methods whose rows sum to 1, row t of `scores` and row t of `prefix`
    together sum to 1. In a model with an encoder, the prompt tokens are the tokens of the encoder, then the tokens with
    which the decoder starts.

    Attributes:
        prompt: The prompt tokens.
        generated: The generated tokens.
        text: The generated text.
        deciding: For each generated token the layer of the second method that decides, with `layer="deciding"`; None:
            no token supports it but the first one and the one before it. Empty: there is one method.
    """

    prompt: TokenText = field(kw_only=True)
    generated: TokenText = field(kw_only=True)
    text: str = field(kw_only=True)
    deciding: list[int | None] = field(default_factory=list, kw_only=True)
    by_rows: bool = True
    _again: Callable[[list[int]], Tensor] | None = field(default=None, compare=False, kw_only=True)

    @classmethod
    def of(
        cls,
        name: str,
        method: Method,
        scores: Tensor,
        layers: tuple[str, ...],
        prompt: TokenText,
        generated: TokenText,
        text: str,
        layer: int | None = None,
        again: Callable[[list[int]], Tensor] | None = None,
    ) -> GenerationAttribution:
        """The result of scores `(n, m + n, layers)`, of all layers or of one."""
        raw = scores.permute(0, 2, 1)
        rows = [Row(f"{step} {label}", None, raw[step, -1]) for step, label in enumerate(generated.labels)]
        shown = (len(layers) - 1 if layer is None else layer) if method.layered else None
        before = max(prompt.words, default=-1) + 1
        return cls(
            [*prompt.labels, *generated.labels],
            {name: Part(name, method, rows, raw, layers, shown)},
            words=[*prompt.words, *(before + word for word in generated.words)],
            special=[*prompt.special, *generated.special],
            prompt=prompt,
            generated=generated,
            text=text,
            _again=again,
        )

    @property
    def all_scores(self) -> Tensor:
        """The scores of all tokens, `(n, m + n, layers)`."""
        return self.first.scores.permute(0, 2, 1)

    @property
    def scores(self) -> Tensor:
        """The scores of the prompt tokens, `(n, m, layers)`."""
        return self.all_scores[:, : len(self.prompt.ids)]

    @property
    def prefix(self) -> Tensor:
        """The scores of the generated tokens, `(n, n, layers)`. Only entries before the diagonal differ from 0."""
        return self.all_scores[:, len(self.prompt.ids) :]

    @property
    def layers(self) -> tuple[str, ...]:
        """The names of the layers."""
        return self.first.layers

    @property
    def prompt_share(self) -> Tensor:
        """How much of each generated token's row lies on the prompt, `(n, layers)`."""
        return self.scores.sum(1)

    def mask(self, *kinds: str | Collection[str]) -> Tensor:
        """Which prompt tokens are of the given kinds, `(m,)`. Pictures and tables take the mask. No score changes.

        Kinds are "stop" (common English words), "punctuation", "special" (special tokens), or lists of words. Words are
        compared decoded, without spaces, in lower case. All pieces of a word belong to the word.
        """
        return self.prompt.mask(kinds)

    def grouped(self, by: Any, *, joint: bool = True) -> GenerationAttribution:
        """The scores of words, clauses, sentences, sections or spans of the prompt.

        The method runs again, and zeroes the values of all tokens of a group together. A rollout joins the rows of a
        group by their mean. The last prompt token, whose row belongs to the first generated token, is kept apart until
        the layers are joined. If the method has no joint form (ALTILogit, ALTIPlus, gradients), scores are added up.

        Args:
            by: "words", "clauses" (to the next comma, semicolon or colon), "sentences", "sections" (the messages of a
                chat), or spans: a list of (start, stop), or a dict of names to (start, stop). Tokens outside all spans
                are groups of their own, and special tokens are no part of words, clauses or sentences. Or a list with
                the number of each token's group, as in Captum's `feature_mask`.
            joint: Whether to run the method again. If False, the scores of a group's tokens are added up.
        """
        member, names = self.prompt.groups(by)
        method = self.first.method
        if not joint or not method.takes_features:
            groups = self.scores.new_zeros(len(self.scores), max(member) + 1, len(self.layers))
            found = torch.cat([groups.index_add(1, torch.tensor(member), self.scores), self.prefix], dim=1)
        elif self._again is None:
            raise ArgumentError("This result has no model: call grouped on the original one, or pass joint=False.")
        else:
            found = self._again(member)
        prompt = self.prompt.grouped(member, names)
        return self.of(self.method, method, found, self.layers, prompt, self.generated, self.text, self.layer)

    def to_pandas(self, *, mask: Tensor | None = None, layer: int | None = None) -> DataFrame:
        """A table with one row for each generated token, source token and layer, or of one `layer`. Needs pandas.

        `mask`, `(m,)`, says which prompt tokens have no rows.
        """
        with needs_extra("to_pandas", "study"):
            import pandas as pd
        given, rows, scores, labels = len(self.prompt.ids), [], self.all_scores.tolist(), self.generated.labels
        kept = [*self._kept(mask), *range(given, len(self.tokens))]
        layers = range(len(self.layers)) if layer is None else [self.layer_index(layer)]
        for index, step, place in product(layers, range(len(labels)), kept):
            if place < given + step:
                part = ("prompt", place) if place < given else ("generated", place - given)
                score = scores[step][place][index]
                rows.append((self.layers[index], step, labels[step], *part, self.tokens[place], score))
        return pd.DataFrame(rows, columns=["layer", "step", "token", "part", "source", "source_token", "score"])

    def to_dict(self, mask: Tensor | None = None) -> dict[str, Any]:
        """The tokens and all scores, as lists of layers, of generated tokens, of sources.

        A `mask` of prompt tokens of no interest, `(m,)`, is written, and no score is left out.
        """
        return {
            "method": self.method,
            "text": self.text,
            "prompt": list(self.prompt.labels),
            "prompt_ids": list(self.prompt.ids),
            "generated": list(self.generated.labels),
            "generated_ids": list(self.generated.ids),
            "layers": list(self.layers),
            "mask": None if mask is None else self._hidden(mask).tolist(),
            "scores": self.scores.permute(2, 0, 1).tolist(),
            "prefix": self.prefix.permute(2, 0, 1).tolist(),
            "prompt_share": self.prompt_share.T.tolist(),
        }

    def printed(
        self,
        color: bool = False,
        columns: int | None = None,
        *,
        layer: int = -1,
        step: int | None = None,
        mask: Tensor | None = None,
    ) -> str:
        """A line for each generated token: the share of the prompt, and the prompt tokens that it draws on most.

        Args:
            color: Whether words and bars have the colours of a terminal.
            columns: The columns of the terminal; None: any number.
            layer: The layer; negative counts from the end.
            step: A generated token, of which all prompt tokens are printed; negative counts from the end. None: all.
            mask: Prompt tokens that are left out, `(m,)`.
        """
        index, kept, labels = self.layer_index(layer), self._kept(mask), self.prompt.labels
        scores, steps = self.scores[..., index], self.generated.labels
        title, rows, form = self._title(index), [], "+.2f" if self.is_signed else ".2f"
        remarks = [*self.told, *self.first.remarks(self.tokens[0], index)]
        if step is not None:
            look: dict[str, Any] = {"full": None if self.is_signed else 1, "signed": self.is_signed}
            lines = terminal_text(labels, scores[step], color=color, columns=columns, **look).split("\n")
            told = f"{title}: how much {steps[step]} (step {step % len(steps)}) draws on each prompt token"
            return "\n".join([told, *(lines[place] for place in kept), *remarks])
        for place, (label, row) in enumerate(zip(steps, scores, strict=True)):
            best = sorted(kept, key=lambda i: -float(row[i].abs()))[:STRONGEST]
            share = "" if self.is_signed else f"prompt {row.sum():.2f}:"
            shares = (row / (row.abs().max() if self.is_signed else 1)).nan_to_num().tolist()
            strong = [(f"{labels[i]} {row[i]:{form}}", shares[i] if color else None) for i in best]
            cell = [part for one in strong for part in (("  ", None), one)][1:]
            rows.append([place, label, share, cell, *([self._read(place, kept)] if self.deciding else [])])
        verb = "rests" if self.first.method.explains_output else "draws"
        told = f"the prompt tokens that each new token {verb} on most"
        told += f", and where {list(self.parts)[1]} reads them" if self.deciding else ""
        return "\n".join([f"{title}: {told}", text_table([""] * len(rows[0]), rows, right=[0]), *remarks])

    def _read(self, step: int, kept: list[int]) -> str:
        """The layer that decides a token, and the token on which its row lies most."""
        row, layer = list(self.parts.values())[1].rows[step].scores, self.deciding[step]
        best = max([*kept, *range(len(self.prompt.ids), len(row))], key=lambda i: float(row[i]))
        return "" if layer is None else f"layer {layer}: {self.tokens[best]} {row[best]:.2f}"

    def save(self, path: str | PathLike[str]) -> None:
        """Write the result to one file, in the format of safetensors. :meth:`load` reads it."""
        about: dict[str, Any] = {"prompt": asdict(self.prompt), "generated": asdict(self.generated)}
        about |= {"layers": self.layers, "method": self.method, "text": self.text, "signed": self.is_signed}
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
        method = StoredMethod(about["method"], is_signed=about.get("signed", False))
        both = torch.cat([scores, prefix], dim=1)
        return cls.of(about["method"], method, both, tuple(about["layers"]), prompt, generated, about["text"])

    def plot(
        self,
        layer: int = -1,
        *,
        mask: Tensor | None = None,
        prefix: bool = False,
        over: Any = None,
        step: int | None = None,
        **options: Any,
    ) -> Figure:
        """Draw the scores of a layer: generated tokens, each with the share of the prompt, by prompt tokens.

        Args:
            layer: The layer; negative counts from the end.
            mask: Prompt tokens that are left out, `(m,)`.
            prefix: Whether to draw the generated tokens as columns as well.
            over: The image or the sound `(samples,)` of the prompt. The scores of its patches are then drawn over it,
                with a panel for each new token; those of its frames below it.
            step: With `over`, the new token that is drawn; None: all, for an image.
            options: Options of :func:`captum_vz.visualization.draw_comparison`, such as `scale` and `size`; with `over`
                those of :func:`~captum_vz.visualization.draw_image` or :func:`~captum_vz.visualization.draw_audio`,
                such as `sampling_rate`.
        """
        if over is not None:
            return over_signal(self, over, self.layer_index(layer), step, options)
        index, shown = self.layer_index(layer), self._kept(mask)
        if not shown:
            raise ArgumentError("The mask leaves out all prompt tokens: there is nothing to draw. Keep at least one.")
        shown += range(len(self.prompt.ids), len(self.tokens) - 1) if prefix else []
        shares = ["" if self.is_signed else f" (prompt {one:.2f})" for one in self.prompt_share[:, index].tolist()]
        names = [f"{row.name}{share}" for row, share in zip(self.rows, shares, strict=True)]
        rows = dict(zip(names, self.all_scores[:, shown, index], strict=True))
        look = {"title": self._title(index), "label": "score" if self.is_signed else "share of the row"}
        return draw_comparison(rows, [self.tokens[place] for place in shown], **(look | options))

    def view(
        self,
        layer: int = -1,
        *,
        step: int | None = 0,
        mask: Tensor | None = None,
        title: str = "",
        theme: str = "auto",
        about: Mapping[str, str] | None = None,
        maps: bool = False,
    ) -> View:
        """An interactive page: pointing at a generated token colors the tokens that it draws on.

        Args:
            layer: The layer that is shown at first; negative counts from the end.
            step: The generated token that is chosen at first; negative counts from the end. None: none.
            mask: Prompt tokens that are left out, `(m,)`. The other scores do not change.
            title: The heading of the page.
            about: Where the numbers come from, by field.
            maps: Has no effect: all generated tokens have their rows.
            theme: "light", "dark", or "auto", see :func:`captum_vz.visualization.view`.
        """
        kept = self._kept(mask)
        shown = [*kept, *range(len(self.prompt.ids), len(self.tokens))]
        scores = self.all_scores[:, shown]
        methods = {self.method: {name: scores[..., index] for index, name in enumerate(self.layers)}}
        if self.deciding:
            name, part = list(self.parts.items())[1]
            methods[name] = {"the layer that decides": torch.stack([row.scores for row in part.rows])[:, shown]}
            layers = zip(self.generated.labels, self.deciding, strict=True)
            told = ", ".join(f"{token} {'none' if one is None else one}" for token, one in layers)
            about = {**(about or {}), f"layer of {name} that decides": told}
        return view(
            methods,
            self.generated.labels,
            columns=[self.tokens[i] for i in shown],
            offset=len(kept),
            words=self.generated.words,
            column_words=[self.words[i] for i in shown],
            special=[self.special[i] for i in shown],
            token=step,
            layer=self.layer_index(layer),
            title=title or "Which tokens does each new token draw on?",
            theme=theme,
            about=about,
        )

    def to_llm_attribution_result(
        self, layer: int = -1, *, mask: Tensor | None = None, renormalize: bool = False
    ) -> LLMAttributionResult:
        """Captum's result, with its `plot_token_attr` and `plot_seq_attr`. It has no columns for generated tokens.

        Args:
            layer: The layer; negative counts from the end.
            mask: Prompt tokens whose scores are set to 0, `(m,)`.
            renormalize: Whether to divide each row by its sum over the prompt.
        """
        scores = self.scores[..., self.layer_index(layer)].masked_fill(self._hidden(mask), 0)
        scores = normalize_rows(scores) if renormalize else scores
        return LLMAttributionResult(
            input_tokens=list(self.prompt.labels),
            output_tokens=list(self.generated.labels),
            seq_attr=scores.sum(0),
            token_attr=scores,
        )

    def to_inseq(self, layer: int = -1) -> Any:
        """A `FeatureAttributionOutput` of inseq, https://github.com/inseq-team/inseq, which has to be installed.

        The tokens of an encoder are inseq's source. Otherwise, prompt and generated tokens are its target. NaN marks
        later tokens. The scores are those of one layer; negative counts from the end.
        """
        return inseq_form(self, self.layer_index(layer))

    def layer_index(self, layer: int) -> int:
        """The index of a layer, from 0."""
        return check_layer(layer, len(self.layers))

    def _title(self, index: int) -> str:
        layer = self.layers[index]
        return self.method if layer in ("output", "scores") else f"{self.method}, {layer}"

    def _hidden(self, mask: Any) -> Tensor:
        """The mask as a tensor on the CPU. None hides nothing."""
        count = len(self.prompt.ids)
        found = torch.as_tensor([False] * count if mask is None else mask).cpu()
        if found.dtype != torch.bool or found.shape != (count,):
            raise ArgumentError(
                f"mask is {tuple(found.shape)} of {found.dtype}: pass bools ({count},), one for each prompt token."
            )
        return found

    def _kept(self, mask: Any) -> list[int]:
        """The positions of the prompt tokens that a mask does not leave out."""
        return (~self._hidden(mask)).nonzero()[:, 0].tolist()


def _tokens(fields: dict[str, list[Any]]) -> TokenText:
    sections = tuple(map(tuple, fields.pop("sections")))
    return TokenText(**{name: tuple(values) for name, values in fields.items()}, sections=sections)
