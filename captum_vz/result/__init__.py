"""The one result of `explain`, `compare` and `attribute_generation`: rows x layers x tokens, by methods.

This file has the explanations of several texts: a table, and a picture of their words.
"""

from __future__ import annotations

import re
from collections import UserList
from typing import TYPE_CHECKING

import torch
from matplotlib.figure import Figure
from torch import Tensor

from captum_vz.result.explanation import Explanation
from captum_vz.result.part import Maps, Part, Row
from captum_vz.result.words import TokenText
from captum_vz.visualization.forms import html_table, text_table
from captum_vz.visualization.pictures import axes
from captum_vz.visualization.pictures.files import Content, Picture, largest, set_content
from captum_vz.visualization.tokens import shortened

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Explanation", "Explanations", "Maps", "Part", "Row", "TokenText"]


class Explanations(UserList[Explanation]):
    """What :func:`captum_vz.explain` returns for a list of texts: a list of :class:`Explanation`.

    It prints a line for each text: what the model predicts, and the three words with the largest scores.
    """

    def words(self) -> dict[str, Tensor]:
        """The scores `(occurrences,)` of each word in all texts, those with the largest mean size first.

        They are the scores of the first row of each text. The tokens of a word are added up. Words are compared in
        lower case. Special tokens and punctuation are left out.
        """
        found: dict[str, list[float]] = {}
        for one in self:
            for word, score in words_of(one):
                found.setdefault(word.lower(), []).append(score)
        scores = {word: torch.tensor(numbers) for word, numbers in found.items()}
        return dict(sorted(scores.items(), key=lambda item: -float(item[1].abs().mean())))

    def plot(self, *, most: int = 15, title: str | None = None) -> Figure:
        """A bar for the mean score of each word, and a dot for each of its occurrences.

        The words are so many as `most` with the largest mean size of their scores. Without a title, it names the method
        and the number of texts.
        """
        words = dict(list(self.words().items())[:most])
        label = "score" if self[0].is_signed else "share of the row"
        size = 6.4, 0.9 + 0.22 * len(words)
        figure = Picture(figsize=size, dpi=axes.DPI[0], layout="constrained")
        panel, means = figure.subplots(), torch.stack([scores.mean() for scores in words.values()])
        places = range(len(words))
        panel.barh(places, means.tolist(), color="#9ecae1", height=0.7)
        for place, scores in zip(places, words.values(), strict=True):
            # Dots of a word lie in order, so that equal scores do not hide each other.
            heights = place + torch.linspace(-0.25, 0.25, len(scores)) if len(scores) > 1 else torch.tensor([place])
            panel.plot(scores, heights, ".", color="#08519c", alpha=0.6, markersize=4)
        panel.axvline(0, color="0.4", linewidth=0.6)
        axes.write_plain_labels(panel.yaxis, places, [f"{shortened(w)} ({len(s)})" for w, s in words.items()])
        panel.invert_yaxis()
        panel.set_xlabel(f"{label}: mean (bar), each occurrence (dot)", fontsize=axes.FONT_SIZE)
        panel.tick_params(labelsize=axes.FONT_SIZE, length=2)
        panel.spines[["top", "right"]].set_visible(False)
        axes.write_heading(figure, title or f"{self[0].first.title}: words of {len(self)} texts")
        names = list(words)
        sentence = f"The mean scores of {len(words)} words. The largest are {largest(means, names.__getitem__)}."
        rows = [(word, score) for word, scores in words.items() for score in scores.tolist()]
        set_content(panel, Content(sentence, ("word", label), lambda: rows))
        return figure

    def to_pandas(self) -> pd.DataFrame:
        """The rows of :meth:`Explanation.to_pandas` of all texts, with the number of the text. Needs pandas."""
        import pandas as pd

        tables = [one.to_pandas().assign(text=number) for number, one in enumerate(self)]
        return pd.concat(tables, ignore_index=True)

    def __repr__(self) -> str:
        """A line for each text."""
        return text_table(["", "predicts", "rests on"], self._lines())

    def _repr_html_(self) -> str:
        title = f"{len(self)} texts, {self[0].first.title}"
        return html_table(title, ["text", "predicts", "rests on"], self._lines())

    def _lines(self) -> list[list[str]]:
        lines = list[list[str]]()
        for number, one in enumerate(self):
            best = sorted(words_of(one), key=lambda pair: -abs(pair[1]))[:3]
            predicted = ", ".join(f"{word} {share:.2f}" for word, share in one.predictions[:1])
            form = "+.2f" if one.is_signed else ".2f"
            lines.append([str(number), predicted, ", ".join(f"{word} {score:{form}}" for word, score in best)])
        return lines


def words_of(found: Explanation) -> list[tuple[str, float]]:
    """The words of a text with their scores in the first row, without special tokens and punctuation."""
    names, scores = dict[int, str](), dict[int, float]()
    numbers, special = found.words or range(len(found.tokens)), found.special or [False] * len(found.tokens)
    for token, number, alone, score in zip(found.tokens, numbers, special, found.scores.tolist(), strict=True):
        if not alone:
            names[number] = names.get(number, "") + token.removeprefix("##").strip()
            scores[number] = scores.get(number, 0.0) + score
    return [(names[number], score) for number, score in scores.items() if re.search(r"\w", names[number])]
