"""What the page shows for a text, an image or a sound, and the files to download. Texts are limited and escaped."""

from __future__ import annotations

import json
import shutil
import tempfile
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, NamedTuple

from matplotlib.figure import Figure

from captum_vz import __version__
from captum_vz.app import explained_by, written
from captum_vz.app.inputs import Wish
from captum_vz.errors import ArgumentError, renamed
from captum_vz.generation import GenerationAttribution, attribute_generation
from captum_vz.methods import METHODS, residual_text
from captum_vz.result import Explanation
from captum_vz.study.comparison import choose_foil, truth_of
from captum_vz.subjects import Subject, subject_of
from captum_vz.subjects.heads import CHOICE, OF_IMAGES, SEQ2SEQ
from captum_vz.subjects.signals import read_input
from captum_vz.subjects.texts import check_prompt, prepare_text
from captum_vz.visualization import View, add_provenance, draw_comparison, draw_image, weights_fingerprint
from captum_vz.visualization.forms import html_table, note, page

TITLE: Final = "Which token does each token draw on?"
CHARACTERS_PER_TOKEN: Final = 16  # of the longest text, before it is tokenized
MOST_METHODS: Final = 6
MOST_NEW_TOKENS: Final = 32
MOST_SOURCES: Final = 20  # of an image or a sound, in the table; the picture shows all
#: The names of the fields for arguments.
FIELDS: Final = {name: name.capitalize() for name in ("token", "layer", "target", "foil", "methods")} | {
    "text_pair": "Second text",
}
KEPT: Final = 16  # folders with files to download
#: What a model or its files may raise for a text or a name that they cannot use.
ERRORS: Final = (AssertionError, IndexError, LookupError, MemoryError, OSError, RuntimeError, TypeError, ValueError)
_fingerprint: Final = lru_cache(maxsize=2)(weights_fingerprint)


class Answer(NamedTuple):
    """What the page shows, in the order of its outputs. Parts that are not computed yet are empty."""

    told: str  # remarks, or what was refused
    view: str = ""
    layers: str | None = None  # the path of the picture of the layers
    shares: str = ""  # the table of methods
    methods: str | None = None  # the path of the picture of methods
    files: list[str] | None = None  # to download; Gradio takes no tuple


class Answers:
    """Computes what the page shows. Files to download lie in a temporary folder until :meth:`close`.

    The page offers `models`. If `any_model`, other folders and ids may be named as well; no model is downloaded. A text
    has at most `max_tokens`.
    """

    def __init__(self, models: tuple[str, ...], any_model: bool, max_tokens: int) -> None:
        self.models, self.any_model, self.max_tokens = models, any_model, max_tokens
        self.load: Callable[[str], Subject] = lru_cache(maxsize=2)(lambda name: subject_of(name, hub=False))
        self._folder = Path(tempfile.mkdtemp(prefix="captum-vz-demo-"))
        self._written: deque[Path] = deque()

    def close(self) -> None:
        """Delete the files."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def steps(self, *wanted: Any, **more: Any) -> Iterator[Answer]:
        """The answer without pictures and files, which take longer, then the whole answer; see `_explain`."""
        try:
            # Not around a yield: other code runs there, whose warnings are its own.
            with _remembered() as remarks:
                answer = self._explain(remarks, *wanted, **more)
                first = next(answer)
            yield first
            yield from answer
        except ERRORS as error:
            yield Answer(_refusal(error))

    def generate(self, *wanted: Any) -> Answer:
        """The generated text, the view, the picture of steps as `methods`, and the files; see `_generate`."""
        try:
            with _remembered() as remarks:
                return self._generate(remarks, *wanted)
        except ERRORS as error:
            return Answer(_refusal(error))

    def _explain(
        self,
        remarks: list[warnings.WarningMessage],
        text: str,
        model: str,
        methods: Sequence[str],
        token: str | None = "",
        layer: float | None = None,
        pair: str | None = "",
        target: str | None = "",
        truth: bool = False,
        other: str | None = "",
        file: str | None = None,
        foil: str | None = "",
    ) -> Iterator[Answer]:
        """The two answers of :meth:`steps` to what the fields of the page hold, with the warnings that were given."""
        if not methods or len(methods) > MOST_METHODS:
            raise ArgumentError(f"{len(methods)} methods are chosen: choose 1 to {MOST_METHODS}.")
        token, target, foil, pair, other = ((one or "").strip() for one in (token, target, foil, pair, other))
        wish = Wish(None, target or None, foil or None, token or None, -1 if layer is None else int(layer))
        subject = self._load(model)
        explained: Any = text
        if not subject.reads_text:
            explained, text = _signal(subject, file, truth or bool(other))
        else:
            self._check_text(subject, text, pair, file)
        lines = [line.strip() for line in pair.splitlines() if line.strip()]
        second: Any = (lines if subject.task == CHOICE else pair) or None
        if subject.task == SEQ2SEQ:  # each token that it writes, as in captum_vz.explain
            if truth or other:
                raise ArgumentError(f"{model} writes a text of its own: nothing is blanked out or compared.")
            yield self._steps(written(subject, text, second, wish, methods[0]), remarks, subject, text, model)
            return
        why = ""
        if truth and wish.target is None and wish.foil is None:
            chosen, why = choose_foil(text, subject, token or None)
            wish = replace(wish, foil=chosen)
        tables = {name: METHODS[name] for name in methods}
        found = explained_by(subject, explained, second, wish, tables, skip=True)
        first = found.rows[0]
        where = "" if first.token is None else f", position {first.token}"
        told = [f"Explained: {first.name}{where}.", *(f"Without {name}: {one}" for name, one in found.refused.items())]
        if truth:
            blanked = truth_of(text, subject, wish.token, wish.target, wish.foil)
            found.truth = blanked.shares
            told.append(f"Blanking out: each token's share of what changes the {blanked.answer}.")
            told += [f"{_sentence(why)}."] if why else []
        told += [f"{_sentence(line)}." for line in found.told]
        files = Files(self._new_folder(), subject.model, model, ", ".join(found.parts), text)
        view = found.view(title=text, about=files.about)
        shown = view.frame()
        if other:
            self._check_text(subject, other)
            compared = explained_by(subject, other, second, replace(wish, token=None), tables, skip=True)
            shown += compared.view(title=other, about=files.about).frame()
        shares = _table(found, subject.reads_text)
        yield Answer(note([*told, *_told(remarks)]), shown, shares=shares)
        files.save_page(view)
        alone = replace(found, parts={found.method: found.first}, truth=None)
        layers = files.save_picture(alone.plot(), "layers", found.method)
        if subject.task in OF_IMAGES:  # the first row of each method, over the image as the model sees it
            rows = {one.title: one.rows[0].scores for one in found.parts.values()}
            drawn = draw_image(rows, read_input(subject, explained)["pixel_values"], first.token, scale="panel")
        else:
            drawn = draw_comparison(found.shares, found.tokens, found.token, truth=found.truth, scopes=found.scopes)
        by_method = files.save_picture(drawn, "methods")
        found.to_csv(files.folder / "methods.csv")
        files.save_json(_record(text, model, found), "maps")
        yield Answer(note([*told, *_told(remarks)]), shown, layers, shares, by_method, files.paths)

    def _generate(
        self, remarks: list[Any], text: str, model: str, method: str, count: float, hidden: Sequence[str]
    ) -> Answer:
        if not 1 <= count <= MOST_NEW_TOKENS:
            raise ArgumentError(f"{count:g} new tokens are asked for: choose 1 to {MOST_NEW_TOKENS}.")
        subject = self._load(model)
        self._check_text(subject, text)
        if not getattr(subject.model, "can_generate", bool)() or subject.model.config.is_encoder_decoder:
            raise ArgumentError(f"{model} is a {type(subject.model).__name__}, which continues no text.")
        check_prompt(text, subject, int(count))
        found = attribute_generation(subject, text, method, int(count), do_sample=False)
        mask = found.mask(*hidden)
        if mask.all():
            raise ArgumentError("All prompt tokens are left out: leave out fewer.")
        return self._steps(found, remarks, subject, text, model, mask)

    def _steps(
        self,
        found: GenerationAttribution,
        remarks: list[Any],
        subject: Subject,
        text: str,
        model: str,
        mask: Any = None,
    ) -> Answer:
        """The generated text, the view, the picture of steps as `methods`, and the files."""
        named = ", ".join(filter(None, (found.method, residual_text(found.first.method.residual))))
        files = Files(self._new_folder(), subject.model, model, named, text)
        shown = found.view(mask=mask, title=f"{text} … {found.text}")
        does = "answers" if subject.task == SEQ2SEQ else "continues"
        view = replace(shown, subtitle=f"{model} {does} the text ({named}).", about=files.about)
        files.save_page(view)
        steps = files.save_picture(found.plot(-1, mask=mask), "steps")
        files.save_json(json.loads(found.to_json(mask=mask)), "scores")
        told = note([f"{text} … {found.text}", *_told(remarks)])
        return Answer(told, view.frame(), methods=steps, files=files.paths)

    def _load(self, model: str) -> Subject:
        """The model, if it is offered."""
        if model not in self.models and not self.any_model:
            raise ArgumentError(f"{model!r} is not offered here: choose one of {', '.join(self.models)}.")
        return self.load(model)

    def _check_text(self, subject: Subject, text: str, pair: str = "", file: str | None = None) -> None:
        """Check that a text is one for this model, and within the limits."""
        name, most = type(subject.model).__name__, CHARACTERS_PER_TOKEN * self.max_tokens
        if subject.tokenizer is None:
            raise ArgumentError(f"The model is a {name}, which takes no text.")
        if file is not None:
            raise ArgumentError(f"The model is a {name}, which reads a text: take the file away, or choose a model.")
        if not isinstance(text, str) or not text.strip():
            raise ArgumentError("The text is empty: write a sentence.")
        if len(text) + len(pair) > most:
            raise ArgumentError(
                f"The text has {len(text) + len(pair)} characters: this page takes at most {most}. Shorten it."
            )
        count = len(prepare_text(subject.model, subject.tokenizer, text).tokens)
        count += len(subject.tokenizer(pair)["input_ids"]) if pair.strip() else 0
        if count > self.max_tokens:
            raise ArgumentError(f"The text has {count} tokens: this page takes at most {self.max_tokens}. Shorten it.")

    def _new_folder(self) -> Path:
        """A folder for the files of one answer. The oldest folders are deleted."""
        while len(self._written) >= KEPT:
            shutil.rmtree(self._written.popleft(), ignore_errors=True)
        self._written.append(Path(tempfile.mkdtemp(dir=self._folder)))
        return self._written[-1]


class Files:
    """The files of one answer, in an empty folder. They say where their numbers come from."""

    def __init__(self, folder: Path, explained: Any, model: str, method: str, text: str) -> None:
        self.folder, weights = folder, _fingerprint(explained)
        self.origin = {"package": f"captum_vz {__version__}", "model": model, "model class": type(explained).__name__}
        self.origin |= {"weights": weights, "method": method, "text": text}
        self.about = {"model": model, "weights": f"sha256 {weights[:12]}"}  # for the foot of a view

    @property
    def paths(self) -> list[str]:
        """All files, by name."""
        return [str(path) for path in sorted(self.folder.iterdir())]

    def save_page(self, view: View) -> None:
        """The view as a page, with a table that says where the numbers come from."""
        origin = html_table("Where the numbers come from", ["field", "value"], [*map(list, self.origin.items())])
        (self.folder / "page.html").write_text(page(TITLE, view.frame(), origin), "ascii")

    def save_picture(self, figure: Figure, name: str, method: str | None = None) -> str:
        """The path of a figure as PNG, which is also written as SVG. `method` is the one that it shows; None: all."""
        fields: dict[str, Any] = self.origin if method is None else self.origin | {"method": method}
        add_provenance(figure, **fields | {"model": None}, name=self.origin["model"])
        for ending in ("png", "svg"):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # characters that the font does not have
                figure.savefig(self.folder / f"{name}.{ending}")
        return str(self.folder / f"{name}.png")

    def save_json(self, record: Mapping[str, Any], name: str) -> None:
        """Numbers as JSON, with where they come from."""
        (self.folder / f"{name}.json").write_text(json.dumps({**record, "provenance": self.origin}), "utf-8")


def _table(found: Explanation, is_text: bool) -> str:
    """The shares of all methods. For an image or a sound: the sources with the largest shares of the first method."""
    caption, kept = f"{_sentence(found.first.heading(found.rows[0]))}, as shares", None
    if not is_text and len(found.tokens) > MOST_SOURCES:
        largest = found.scores.abs().topk(MOST_SOURCES).indices.tolist()
        kept = sorted({*largest} if found.token is None else {*largest, found.token})
        caption += f", where {found.method} is largest"
    return found.html_table(caption, kept)


def _signal(subject: Subject, file: str | None, more: bool) -> tuple[Path, str]:
    """The file of an image or a sound, and its name. `more`: whether something is asked that only texts have."""
    kind = "an image" if subject.task in OF_IMAGES else "a sound (WAV)"
    name = type(subject.model).__name__
    if file is None:
        raise ArgumentError(f"The model is a {name}, which takes {kind}: choose a file in the options.")
    if more:
        raise ArgumentError(f"The model is a {name}: only texts are blanked out, or compared with another text.")
    return Path(file), Path(file).name


@contextmanager
def _remembered() -> Iterator[list[warnings.WarningMessage]]:
    """The warnings of the block, of which the page tells those of users."""
    with warnings.catch_warnings(record=True) as remarks:
        warnings.simplefilter("always", UserWarning)
        yield remarks


def _refusal(error: BaseException) -> str:
    return note([" ".join(_sentence(error).split()) or type(error).__name__], alert=True)


def _sentence(line: Any) -> str:
    """A message of the command line, which begins with a small letter, as a sentence of a page with its fields."""
    told = renamed(line, FIELDS)
    return told[:1].upper() + told[1:]


def _told(remarks: list[Any]) -> list[str]:
    return list(dict.fromkeys(_sentence(str(one.message)) for one in remarks if one.category is UserWarning))


def _record(text: str, model: str, found: Explanation) -> dict[str, Any]:
    maps = not found.has_rows_only(False)
    more = {"predictions": [{"token": word, "probability": number} for word, number in found.predictions]}
    return {
        "text": text,
        "model": model,
        "tokens": found.tokens,
        "token": found.token,
        "methods": {
            name: one.to_dict() | one.layers_to_dict(maps) | {"layer": one.layer, **more}
            for name, one in found.parts.items()
        },
    }
