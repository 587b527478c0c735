"""A lower-casing WordPiece tokenizer, small enough to ship, that takes any text."""

import random
import string
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIAL: Final = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
# What remains of Latin text once it is lower-cased and its accents are stripped, and common signs. Punctuation always
# stands alone; everything else may also continue a word.
CHARACTERS: Final = string.ascii_lowercase + string.digits + "ßæœøðþłđħŋı" + "€£¥°©®™½¼¾²³×÷±µ"
PUNCTUATION: Final = string.punctuation + "‘’“”„‚«»‹›–—…·•§¶†‡¿¡′″"
# A word of more characters than this is one [UNK].
LONGEST_WORD: Final = 200


def build_tokenizer(sentences: Iterable[str], max_length: int, shared: int = 10) -> PreTrainedTokenizerFast:
    """Builds a WordPiece tokenizer (Wu et al. 2016, https://arxiv.org/abs/1609.08144) around the words of a text.

    Every word of `sentences` is one piece. Other words fall apart into beginnings and endings that several of those
    words share, and single characters where these do not suffice.

    Args:
        sentences: The text.
        max_length: The longest sequence that the model takes, in tokens.
        shared: In how many different words a beginning or an ending must occur to be a piece.

    >>> tokenizer = build_tokenizer(["She hopes and jokes.", "We hoped and joked."], max_length=64, shared=2)
    >>> tokenizer.tokenize("We hoped; she copes!")
    ['we', 'hoped', ';', 'she', 'c', '##o', '##p', '##es', '!']
    """
    normalizer = normalizers.BertNormalizer(lowercase=True)
    pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    # tokenizers' own WordPieceTrainer breaks ties by chance: two trainings would not give the same vocabulary.
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
    """Splits a word as WordPiece does, longest match first, but overlooks each match with probability `rate`.

    Source: MaxMatch-Dropout (Hiraoka 2022, https://aclanthology.org/2022.coling-1.430).

    Args:
        word: A word of characters that are all pieces, at the start of a word and within.
        vocabulary: Pieces and their ids.
        rate: 0 splits as the tokenizer does; 1 gives single characters.
        draw: Where the chance comes from.

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
