"""The scores of a generated text: each new token, each layer, back to the prompt. As tables, files and pictures."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from captum.attr import LLMAttributionResult
from matplotlib.figure import Figure
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from captum_vz._files import write_file, written
from captum_vz.errors import ArgumentError
from captum_vz.functional import normalize_rows
from captum_vz.generation.drawing import draw_steps
from captum_vz.generation.inseq_form import as_inseq
from captum_vz.methods import Method
from captum_vz.result import Explanation, Part, Row, TokenText
from captum_vz.tables import text_table
from captum_vz.visualization import View, view

if TYPE_CHECKING:
    from pandas import DataFrame

FORMAT = "captum_vz generation 1"


@dataclass(frozen=True, eq=False)
class StoredMethod(Method):
    """The method of a result that was read from a file."""

    def rows(self, subject: Any, question: Any, features: Any) -> Sequence[Tensor]:
        """Refused."""
        raise ArgumentError(f"{self.title} was read from a file, without its model: explain the text again.")


class StoredAmounts(StoredMethod):
    """The same, whose scores are amounts of an output, with signs."""

    is_signed = True


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
    """

    prompt: TokenText = field(kw_only=True)
    generated: TokenText = field(kw_only=True)
    text: str = field(kw_only=True)
    _again: Callable[[list[int]], Tensor | None] | None = field(default=None, repr=False, compare=False, kw_only=True)

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
        again: Callable[[list[int]], Tensor | None] | None = None,
    ) -> GenerationAttribution:
        """The result of scores `(n, m + n, layers)`."""
        raw = scores.permute(0, 2, 1)
        rows = [Row(f"{step} {label}", None, raw[step, -1]) for step, label in enumerate(generated.labels)]
        part = Part(name, method, rows, raw, layers, len(layers) - 1 if method.layered else None)
        before = max(prompt.words, default=-1) + 1
        return cls(
            [*prompt.labels, *generated.labels],
            {name: part},
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
        prompt = self.prompt.grouped(member, names)
        own = self.method, self.first.method
        return self.of(*own, found, self.layers, prompt, self.generated, self.text)

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

    def to_dict(self, mask: Tensor | None = None) -> dict[str, Any]:
        """The tokens and all scores, as lists of layers, of generated tokens, of sources.

        Args:
            mask: Prompt tokens of no interest, `(m,)`. It is written, and no score is left out.
        """
        hidden = self.check_mask(mask)
        return {
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

    def to_json(self, path: Any = None, *, mask: Tensor | None = None) -> str:
        """A JSON object of :meth:`to_dict`, also written to `path` if it is given."""
        return written(json.dumps(self.to_dict(mask), ensure_ascii=False), path)

    def printed(self, color: bool = False, columns: int | None = None) -> str:
        """A line for each generated token: the share of the prompt, and the tokens that it draws on most."""
        rows = []
        for step, (label, row) in enumerate(zip(self.generated.labels, self.rows, strict=True)):
            best = row.scores.abs().argsort(descending=True, stable=True)[:3].tolist()
            share = "" if self.is_signed else f"{self.prompt_share[step, -1]:.2f}"
            rows.append([step, label, share, *(f"{self.tokens[i]} {row.scores[i]:.2f}" for i in best)])
        heads = [
            "",
            "new token",
            "" if self.is_signed else "prompt share",
            *("strongest", "second", "third")[: len(best)],
        ]
        return f"{self.method}, {self.layers[-1]}\n{text_table(heads, rows, right=[0, 2])}"

    def save(self, path: str | PathLike[str]) -> None:
        """Write the result to one file, in the format of safetensors. :meth:`load` reads it."""
        about = {
            "prompt": asdict(self.prompt),
            "generated": asdict(self.generated),
            "layers": self.layers,
            "method": self.method,
            "text": self.text,
            "signed": self.is_signed,
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
        method = (StoredAmounts if about.get("signed") else StoredMethod)(about["method"])
        both = torch.cat([scores, prefix], dim=1)
        return cls.of(about["method"], method, both, tuple(about["layers"]), prompt, generated, about["text"])

    def plot(self, layer: int = -1, *, mask: Tensor | None = None, prefix: bool = False, **options: Any) -> Figure:
        """Draw the scores of a layer: generated tokens from top to bottom, prompt tokens from left to right.

        Colours of shares are by the square root. Long prompts are drawn in several rows of panels. The share of the
        prompt stands at the right of each row.

        Args:
            layer: The layer; negative counts from the end.
            mask: Prompt tokens that are left out, `(m,)`.
            prefix: Whether to draw the generated tokens as columns as well.
            options: None is known.
        """
        if options:
            raise ArgumentError(f"plot has no {', '.join(options)}: pass layer=, mask= or prefix=.")
        index, kept = self.layer_index(layer), self._kept(mask)
        given = [self.prompt.labels[i] for i in kept]
        scores, before = self.scores[:, kept, index], self.prefix[:, :-1, index]
        return draw_steps(
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
        title: str = "",
        theme: str = "auto",
        about: Mapping[str, str] | None = None,
    ) -> View:
        """An interactive page: pointing at a generated token colors the tokens that it draws on.

        Args:
            layer: The layer that is shown at first; negative counts from the end.
            step: The generated token that is chosen at first; negative counts from the end. None: none.
            mask: Prompt tokens that are left out, `(m,)`. The other scores do not change.
            title: The heading of the page.
            about: Where the numbers come from, by field.
            theme: "light", "dark", or "auto", see :func:`captum_vz.visualization.view`.
        """
        kept = self._kept(mask)
        shown = [*kept, *range(len(self.prompt.ids), len(self.tokens))]
        maps = self.all_scores[:, shown]
        return view(
            {self.method: {name: maps[..., index] for index, name in enumerate(self.layers)}},
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
            layer: The layer; negative counts from the end.
        """
        index = self.layer_index(layer)
        about = {
            "attribution_method": self.method,
            "layer": self.layers[index],
            "generated_texts": [self.text],
        }
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
