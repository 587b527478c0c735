"""A small lower-casing WordPiece tokenizer that encodes any text."""

import random
import string
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIAL: Final = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
# The characters of Latin text in lower case and without accents, and common signs. A punctuation mark is always a token
# of its own. The other characters may also continue a word.
CHARACTERS: Final = string.ascii_lowercase + string.digits + "ßæœøðþłđħŋı" + "€£¥°©®™½¼¾²³×÷±µ"
PUNCTUATION: Final = string.punctuation + "‘’“”„‚«»‹›–—…·•§¶†‡¿¡′″"
# Longer words, in characters, become one [UNK].
LONGEST_WORD: Final = 200


def build_tokenizer(sentences: Iterable[str], max_length: int, shared: int = 10) -> PreTrainedTokenizerFast:
    """A WordPiece tokenizer (Wu et al. 2016, https://arxiv.org/abs/1609.08144) for the words of a text.

    Each word of `sentences` is one piece. Other words are split into beginnings and endings that several words of
    `sentences` share, and into single characters if there are no such pieces.

    Args:
        sentences: The text.
        max_length: The maximum length of the model's input, in tokens.
        shared: The number of different words in which a beginning or an ending must occur to become a piece.

    >>> tokenizer = build_tokenizer(["She hopes and jokes.", "We hoped and joked."], max_length=64, shared=2)
    >>> tokenizer.tokenize("We hoped; she copes!")
    ['we', 'hoped', ';', 'she', 'c', '##o', '##p', '##es', '!']
    """
    normalizer = normalizers.BertNormalizer(lowercase=True)
    pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    # WordPieceTrainer of tokenizers breaks ties at random, so that two trainings would give different vocabularies.
    words = {word for text in sentences for word, _ in pre_tokenizer.pre_tokenize_str(normalizer.normalize_str(text))}
    parts = Counter(part for word in words for cut in range(1, len(word)) for part in (word[:cut], f"##{word[cut:]}"))
    characters = [*CHARACTERS, *(f"##{character}" for character in CHARACTERS), *PUNCTUATION]
    common = sorted(part for part, count in parts.items() if count >= shared)
    vocabulary = dict.fromkeys(SPECIAL + characters + sorted(words) + common)

    tokenizer = Tokenizer(
        models.WordPiece(
            {piece: index for index, piece in enumerate(vocabulary)},
            unk_token="[UNK]",
            max_input_chars_per_word=LONGEST_WORD,
        )
    )
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre_tokenizer
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, SPECIAL.index(token)) for token in ("[CLS]", "[SEP]")],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_max_length=max_length,
    )


def drop_matches(word: str, vocabulary: Mapping[str, int], rate: float, draw: random.Random) -> list[int]:
    """The ids of the pieces of a word, split by MaxMatch-Dropout.

    The word is split as by WordPiece, longest match first, but each match is dropped with probability `rate` (Hiraoka
    2022, https://aclanthology.org/2022.coling-1.430).

    Args:
        word: A word. The vocabulary must hold each of its characters, both as a beginning and as a continuation.
        vocabulary: A dict from pieces to ids.
        rate: 0 splits as the tokenizer does. 1 splits into single characters.
        draw: The random number generator.

    >>> vocabulary = {"h": 0, "##a": 1, "##t": 2, "##s": 3, "hat": 4, "hats": 5}
    >>> [drop_matches("hats", vocabulary, rate, random.Random(1)) for rate in (0, 0.5, 1)]
    [[5], [4, 3], [0, 1, 2, 3]]
    """
    ids: list[int] = []
    rest = word
    while rest:
        prefix = "##" if ids else ""
        length = next(
            n for n in range(len(rest), 0, -1) if n == 1 or (prefix + rest[:n] in vocabulary and draw.random() >= rate)
        )
        ids.append(vocabulary[prefix + rest[:length]])
        rest = rest[length:]
    return ids
