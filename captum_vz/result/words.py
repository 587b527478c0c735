"""The words, sentences and sections that tokens belong to, and common words."""

from __future__ import annotations

import operator
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from captum_vz.errors import ArgumentError
from captum_vz.subjects.texts import content_specials
from captum_vz.text import MARKED, word_spans
from captum_vz.visualization import readable_tokens
from captum_vz.visualization.tokens import STOP_WORDS

Section = tuple[str, int, int]  #: the name of a section, its first token and the token after its last
KINDS = ("stop", "punctuation", "special")
UNFINISHED = "\N{REPLACEMENT CHARACTER}"
CONTEXT = 8  # tokens that are decoded before each token
_CLAUSE_ENDS = frozenset(",;:")
_SENTENCE_END = re.compile(r"[.!?…]+[\"')\]]*(?=\s|$)|[。！？]+|\n+")


@dataclass(frozen=True)
class TokenText:
    """Tokens as a person reads them, and the groups that they form. Masks and unknown words are no special tokens."""

    ids: tuple[int, ...]  #: the token ids; -1 for a group of several tokens
    labels: tuple[str, ...]  #: the tokens, as :func:`~captum_vz.visualization.readable_tokens` writes them
    words: tuple[int, ...]  #: the number of each token's word
    word_texts: tuple[str, ...]  #: the words
    sentences: tuple[int, ...]  #: the number of each token's sentence
    special: tuple[bool, ...]  #: whether each token is special, such as BOS or the marks of a chat template
    sections: tuple[Section, ...] = ()  #: the named parts, such as the messages of a chat

    @classmethod
    def of(
        cls,
        tokenizer: Any,
        ids: Sequence[int],
        sections: Sequence[Section] = (),
        offsets: Sequence[tuple[int, int]] = (),
    ) -> TokenText:
        """Read the text of token ids, and split it. `offsets` are the characters of each token in the user's text."""
        text, starts, ends = closed(*decoded(tokenizer, ids), offsets)
        marks = set(tokenizer.all_special_ids) | {
            number for number, one in getattr(tokenizer, "added_tokens_decoder", {}).items() if one.special
        }
        special = tuple(number in marks for number in ids)
        content = content_specials(tokenizer).values()
        letters = list(text)
        for start, end, alone in zip(starts, ends, special, strict=True):
            if alone:  # "hat</s>" is a word and a mark
                letters[start:end] = " " * (end - start)
        inner = {place for start, stop in word_spans("".join(letters)) for place in range(start + 1, stop)}
        spans = _merged(word_spans("".join(letters)), zip(starts, ends, strict=True))
        firsts = [first for first, _ in spans]
        # The full stop of "e.g." ends no sentence.
        stops = [match.end() for match in _SENTENCE_END.finditer(text) if match.start() not in inner]
        labels = tuple(readable_tokens(tokenizer, ids))
        keys, sentences = list[tuple[bool, int]](), list[int]()  # whether it is a word of the text, and its number
        for index, (start, end, alone) in enumerate(zip(starts, ends, special, strict=True)):
            start += len(text[start:end]) - len(text[start:end].lstrip())  # a token may begin with a space
            word = bisect_right(firsts, start) - 1
            inside = not alone and word >= 0 and start < spans[word][1]
            keys.append((True, word) if inside else (False, index))
            sentences.append(bisect_right(stops, start))
        texts = tuple(text[slice(*spans[place])] if inside else labels[place] for inside, place in dict.fromkeys(keys))
        groups = tuple(_numbered(keys)), texts, tuple(_numbered(sentences))
        ends_texts = tuple(mark and number not in content for number, mark in zip(ids, special, strict=True))
        return cls(tuple(ids), labels, *groups, ends_texts, tuple(sections))

    def after(self, names: Sequence[str]) -> TokenText:
        """This text after sources that are no tokens, such as the patches of an image. Each is a word of its own."""
        count = len(names)
        return replace(
            self,
            ids=(*(-1,) * count, *self.ids),
            labels=(*names, *self.labels),
            words=(*range(count), *(count + word for word in self.words)),
            word_texts=(*names, *self.word_texts),
            sentences=(*(0,) * count, *(min(count, 1) + one for one in self.sentences)),
            special=(*(False,) * count, *self.special),
        )

    def mask(self, kinds: Iterable[str | Collection[str]]) -> Tensor:
        """Whether each token belongs to one of the kinds of words, `(tokens,)`."""
        masked = torch.zeros(len(self.ids), dtype=torch.bool)
        for kind in kinds:
            if isinstance(kind, str) and kind not in KINDS:
                raise ArgumentError(f"{kind!r} is no kind of token: pass {', '.join(KINDS)}, or a list of words.")
            if kind == "special":
                masked |= torch.tensor(self.special)
                continue
            listed = STOP_WORDS if kind == "stop" else {str(word).strip().lower() for word in kind}
            for index, word in enumerate(self.words):
                text = self.word_texts[word].strip().lower()
                found = not re.search(r"\w", text) if kind == "punctuation" else text in listed
                masked[index] |= found and not self.special[index]
        return masked

    def groups(self, by: Any, apart: Collection[int] = ()) -> tuple[list[int], tuple[Section, ...] | None]:
        """The group of each token, numbered from 0 in the order of the text, and the names of given groups.

        Args:
            by: "words", "clauses" (to the next comma, semicolon or colon), "sentences", "sections", or spans: a list of
                (start, stop), or a dict of names to such pairs. Tokens outside all spans are groups of their own, and
                special tokens are no part of words, clauses or sentences. Or a list with the number of each token's
                group.
            apart: Tokens that are no part of clauses and sentences either.
        """
        if by == "words":
            return list(self.words), None
        if by in ("sentences", "clauses"):
            ends = [by == "clauses" and self.word_texts[word] in _CLAUSE_ENDS for word in self.words]
            before = zip(self.sentences, accumulate(ends, initial=0), accumulate(self.special), strict=False)
            alone = [place if mark or place in apart else None for place, mark in enumerate(self.special)]
            return _numbered(list(zip(before, alone, strict=True))), None
        if by == "sections":
            if not self.sections:
                raise ArgumentError("The prompt has no sections: pass spans, such as {'question': (0, 7)}.")
            return self._of_spans(self.sections), self.sections
        if isinstance(by, (list, tuple)) and by and all(isinstance(one, int) for one in by):
            if len(by) != len(self.ids):
                raise ArgumentError(f"by has {len(by)} numbers, but there are {len(self.ids)} prompt tokens.")
            return _numbered(by), None
        try:
            pairs = by.items() if isinstance(by, dict) else enumerate(by)
            sections = tuple((str(name), operator.index(start), operator.index(stop)) for name, (start, stop) in pairs)
        except (TypeError, ValueError) as error:
            raise ArgumentError(
                f"by is {by!r}: pass 'words', 'clauses', 'sentences', 'sections', or spans: pairs of positions (start, "
                "stop)."
            ) from error
        return self._of_spans(sections), sections if isinstance(by, dict) else None

    def _of_spans(self, spans: Sequence[Section]) -> list[int]:
        owner: list[Any] = [None] * len(self.ids)
        for name, start, stop in spans:
            if not 0 <= start < stop <= len(self.ids):
                raise ArgumentError(f"The span {name} is ({start}, {stop}): pass 0 <= start < stop <= {len(self.ids)}.")
            if any(owner[start:stop]):
                raise ArgumentError(f"The span {name} ({start}, {stop}) overlaps another: pass disjoint spans.")
            owner[start:stop] = [(name, start)] * (stop - start)
        return _numbered([("alone", index) if one is None else one for index, one in enumerate(owner)])

    def grouped(self, member: Sequence[int], names: Sequence[Section] | None) -> TokenText:
        """The groups as if each was one token."""
        tokens: list[list[int]] = [[] for _ in range(max(member) + 1)]
        for place, group in enumerate(member):
            tokens[group].append(place)
        named, sizes = {start: name for name, start, _ in names or ()}, Counter(self.words)
        labels = tuple(named.get(one[0]) or self._joined(one, sizes) for one in tokens)
        return TokenText(
            tuple(self.ids[one[0]] if len(one) == 1 else -1 for one in tokens),
            labels,
            tuple(range(len(tokens))),
            labels,
            tuple(_numbered([self.sentences[one[0]] for one in tokens])),
            tuple(all(self.special[i] for i in one) for one in tokens),
        )

    def _joined(self, places: Sequence[int], sizes: Mapping[int, int]) -> str:
        """The text of a group: the words of its tokens, of which `sizes` has the number of tokens in the text."""
        words = dict.fromkeys(self.words[place] for place in places)
        if sum(sizes[word] for word in words) != len(places):
            return "".join(self.labels[place] for place in places)
        return re.sub(r" (?=[.,;:!?…])", "", " ".join(self.word_texts[word] for word in words))


def decoded(tokenizer: Any, ids: Sequence[int]) -> tuple[str, list[int], list[int]]:
    """The text of the ids, and the characters at which each token starts and ends.

    Each token is what it adds to the text of a few tokens before it, because tokenizers decode in context. A character
    of several tokens belongs to all of them: until its last token, it is decoded as a replacement character.
    """

    def decode(start: int, stop: int) -> str:
        kept = list(ids[start:stop])
        return str(tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    text, starts, ends = "", list[int](), list[int]()
    for position in range(len(ids)):
        first = max(0, position - CONTEXT)
        before, after = decode(first, position) if position else "", decode(first, position + 1)
        whole = before.rstrip(UNFINISHED)
        if whole != before:
            text = text[: len(whole) - len(before)]
        starts.append(len(text))
        text += after[len(whole) :]
        ends.append(len(text))
    return text, starts, [min(end, len(text)) for end in ends]


def closed(
    text: str, starts: list[int], ends: list[int], offsets: Sequence[tuple[int, int]]
) -> tuple[str, list[int], list[int]]:
    """What :func:`decoded` returns, without the spaces that WordPiece adds around the marks of "3.14" and "e.g."."""
    stops = [0, *(stop for _, stop in offsets)]
    added = {
        start
        for start, end, before, (first, stop) in zip(starts, ends, stops, offsets, strict=False)
        if before == first and text[start:end].startswith(" ") and end - start > stop - first > 0
    }
    kept = [place for place in range(len(text)) if place not in added]
    found = MARKED.finditer("".join(text[place] for place in kept))
    marks = {place for match in found for place in kept[slice(*match.span())] if not text[place].isalnum()}
    gone = sorted(place for place in added if not marks.isdisjoint((place - 1, place + 1)))
    starts, ends = ([place - bisect_left(gone, place) for place in places] for places in (starts, ends))
    letters = list(text)
    for place in gone:
        letters[place] = ""
    return "".join(letters), starts, ends


def _merged(words: list[tuple[int, int]], tokens: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The words, those that one token holds together as one: an added token may be "New York"."""
    firsts, lasts = zip(*words, strict=True) if words else ((), ())
    held = [(bisect_right(lasts, start), bisect_left(firsts, end)) for start, end in tokens]
    for first, stop in sorted(held, reverse=True):
        if stop - first > 1:
            words[first:stop] = [(words[first][0], words[stop - 1][1])]
    return words


def _numbered(keys: Sequence[Any]) -> list[int]:
    """Numbers from 0 in the order of first appearance."""
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return [numbers[key] for key in keys]
