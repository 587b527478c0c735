"""Trains an embedded masked model: ``python tutorials/training/train_masked.py --blimp PATH``.

The objective is masked language modelling (Devlin et al. 2019) on grammatical sentences only. The target is masked with
probability 0.8, other words with probability 0.15. Words other than the target are sometimes split into sub-words. The
model thereby learns to infer number from endings, and to handle words that are not in its training.
"""

import argparse
import json
import random
import string
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from captum_vz.testbed import agreement_sentences, held_out, load_model, prefers_good, read_paradigm
from captum_vz.testbed.grammar import expand_contractions
from captum_vz.text import Record, encode_record, form_ids

#: The terms of BLiMP's paradigms on which the models are trained.
AGREEMENT: Final = ("anaphor_agreement", "determiner_noun_agreement", "subject_verb_agreement")

SPECIAL: Final = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
# The characters of Latin text in lower case and without accents, and common signs. A punctuation mark is always a token
# of its own. The other characters may also continue a word.
CHARACTERS: Final = string.ascii_lowercase + string.digits + "ßæœøðþłđħŋı" + "€£¥°©®™½¼¾²³×÷±µ"
PUNCTUATION: Final = string.punctuation + "‘’“”„‚«»‹›–—…·•§¶†‡¿¡′″"
LONGEST_WORD: Final = 200  # longer words, in characters, become one [UNK]


def build_tokenizer(sentences: Iterable[str], max_length: int, shared: int = 10) -> PreTrainedTokenizerFast:
    """A WordPiece tokenizer (Wu et al. 2016, https://arxiv.org/abs/1609.08144) for the words of a text.

    Each word of `sentences` is one piece. Other words are split into beginnings and endings that at least `shared`
    words of `sentences` have, and into single characters if there are no such pieces.

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

    pieces = {piece: index for index, piece in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.WordPiece(pieces, unk_token="[UNK]", max_input_chars_per_word=LONGEST_WORD))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre_tokenizer
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, SPECIAL.index(token)) for token in ("[CLS]", "[SEP]")],
    )
    names = {f"{token[1:-1].lower()}_token": token for token in SPECIAL}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=max_length, **names)


def drop_matches(word: str, vocabulary: Mapping[str, int], rate: float, draw: random.Random) -> list[int]:
    """The ids of the pieces of a word, split by MaxMatch-Dropout.

    The word is split as by WordPiece, longest match first, but each match is dropped with probability `rate` (Hiraoka
    2022, https://aclanthology.org/2022.coling-1.430). The vocabulary holds each character of the word.

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


#: The grammar's part of the training data is agreement_sentences(GRAMMAR_PAIRS, GRAMMAR_SEED).
GRAMMAR_PAIRS: Final = 8_000
GRAMMAR_SEED: Final = 2023

MAX_LENGTH: Final = 128
BATCH_SIZE: Final = 64
LEARNING_RATE: Final = 1e-3
MASK_TARGET: Final = 0.8
MASK_OTHER: Final = 0.15
DROP_MATCHES: Final = 0.1
DEFAULTS: Final = {"output": Path("agreement"), "epochs": 30, "layers": 4, "width": 128}
#: What only the masked models choose.
CHOICES: Final = {"learning_rate": LEARNING_RATE, "dropout": 0.1, "architecture": "bert"}
#: The class of each architecture, the name of its head, and the positions that its embeddings have more than tokens.
ARCHITECTURES: Final = {
    "bert": ("BertForMaskedLM", "cls", 0),
    # RoBERTa's positions begin after the padding's id, which is 0 here.
    "roberta-prelayernorm": ("RobertaPreLayerNormForMaskedLM", "lm_head", 1),
}


class Example(NamedTuple):
    """The token ids of a grammatical sentence, and the position of its target."""

    ids: list[int]
    target: int


def training_records(blimp: str | Path) -> list[Record]:
    """All pairs of BLiMP's agreement paradigms, except the held-out halves."""
    training: list[Record] = []
    held = {name: {record["pairID"] for record in half} for name, half in held_out(blimp).items()}
    for path in sorted(Path(blimp).glob("*.jsonl")):
        with path.open(encoding="utf-8") as lines:
            term = json.loads(lines.readline() or "{}").get("linguistics_term")
        if term in AGREEMENT:
            records = read_paradigm(blimp, path.stem)
            training += [record for record in records if record["pairID"] not in held.get(path.stem, ())]
    return training


def drop_held_out(records: list[Record], blimp: str | Path) -> list[Record]:
    """The records that share no sentence with the held-out halves. Case and contractions are ignored."""
    held = {sentence for half in held_out(blimp).values() for record in half for sentence in _sentences(record)}
    return [record for record in records if held.isdisjoint(_sentences(record))]


def _sentences(record: Record) -> set[str]:
    return {expand_contractions(record[key]).lower() for key in ("sentence_good", "sentence_bad")}


def training_pairs(blimp: str | Path, grammar_pairs: int = GRAMMAR_PAIRS) -> list[Record]:
    """The training data: BLiMP's agreement pairs and pairs of the grammar, without the held-out sentences."""
    return drop_held_out(training_records(blimp) + agreement_sentences(grammar_pairs, GRAMMAR_SEED), blimp)


def train_model(
    tokenizer: PreTrainedTokenizerFast,
    records: Sequence[Record],
    epochs: int,
    seed: int = 0,
    layers: int = 4,
    width: int = 128,
    heads: int = 4,
    learning_rate: float = LEARNING_RATE,
    dropout: float = 0.1,
    architecture: str = "bert",
) -> PreTrainedModel:
    """A masked language model trained from scratch on the good sentences of `records`.

    Records with a form that is not a single token are left out. The same seed, number of threads and machine give the
    same weights. The feed-forward layers are four times as wide as the hidden states. The layers of the architecture
    "bert" norm sums (post-norm), those of "roberta-prelayernorm" norm their inputs.
    """
    torch.manual_seed(seed)
    name, head, more = ARCHITECTURES[architecture]
    kind = getattr(transformers, name)
    model = kind(
        kind.config_class(
            vocab_size=len(tokenizer),
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            intermediate_size=4 * width,
            max_position_embeddings=MAX_LENGTH + more,
            pad_token_id=tokenizer.pad_token_id,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
        )
    )
    examples = training_examples(tokenizer, records)
    loss = partial(_loss, model.base_model, getattr(model, head), tokenizer)
    fit(model, examples, tokenizer, loss, learning_rate, epochs, seed)
    return model.eval()


def fit(
    model: nn.Module,
    examples: list[Example],
    tokenizer: PreTrainedTokenizerFast,
    loss_of: Callable[[list[Example]], Tensor],
    learning_rate: float,
    epochs: int,
    seed: int,
) -> None:
    """Train a model: AdamW, one cycle of the learning rate up to `learning_rate`, gradients of norm 1 at most."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    steps: dict[str, Any] = {"total_steps": epochs * -(-len(examples) // BATCH_SIZE), "pct_start": 0.1}
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, cycle_momentum=False, **steps)
    draw = random.Random(seed)
    for epoch in range(epochs):
        start, losses = time.perf_counter(), []
        for batch in batches(examples, tokenizer, draw):
            loss = loss_of(batch)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.detach())
        mean = torch.stack(losses).mean()
        print(f"epoch {epoch + 1}/{epochs}: loss {mean:.3f}, {time.perf_counter() - start:.0f} s", flush=True)


def training_examples(tokenizer: PreTrainedTokenizerFast, records: Sequence[Record]) -> list[Example]:
    """The good sentences of the records whose forms are single tokens."""
    examples = []
    for record in records:
        if (forms := form_ids(tokenizer, record)) is not None:
            encoded = encode_record(tokenizer, record)
            ids = encoded.encoding["input_ids"][0].tolist()
            ids[encoded.target] = forms[0]
            examples.append(Example(ids, encoded.target))
    return examples


def batches(
    examples: list[Example], tokenizer: PreTrainedTokenizerFast, draw: random.Random
) -> Iterator[list[Example]]:
    """Each example once, with some of its words split, in batches of similar length."""
    vocabulary = tokenizer.get_vocab()
    words = {index: piece for piece, index in vocabulary.items() if piece.isalnum()}
    drawn = []
    for ids, target in examples:
        pieces = [
            drop_matches(words[token], vocabulary, DROP_MATCHES, draw)
            if token in words and place != target
            else [token]
            for place, token in enumerate(ids)
        ]
        drawn.append(Example(list(chain(*pieces)), sum(map(len, pieces[:target]))))
    drawn.sort(key=lambda example: len(example.ids) + 2 * draw.random())
    starts = list(range(0, len(drawn), BATCH_SIZE))
    draw.shuffle(starts)
    for start in starts:
        yield drawn[start : start + BATCH_SIZE]


def _loss(encoder: nn.Module, head: nn.Module, tokenizer: PreTrainedTokenizerFast, batch: list[Example]) -> Tensor:
    """The cross-entropy of the masked tokens. Logits are computed for masked tokens only."""
    pad = tokenizer.pad_token_id
    ids = pad_sequence([torch.tensor(one.ids) for one in batch], batch_first=True, padding_value=pad)
    masked = (torch.rand(ids.shape) < MASK_OTHER) & (ids >= len(SPECIAL))
    targets = torch.tensor([example.target for example in batch])
    masked[torch.arange(len(batch)), targets] = torch.rand(len(batch)) < MASK_TARGET
    shown = ids.masked_fill(masked, tokenizer.mask_token_id)
    hidden = encoder(shown, attention_mask=(ids != pad).long()).last_hidden_state
    return torch.nn.functional.cross_entropy(head(hidden[masked]), ids[masked])


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: str | Path) -> None:
    """Writes a model and its tokenizer in the format of transformers.

    The weights are written in half precision. The configuration says float32, so that the loaded model computes in it.
    """
    # The output layer shares the word embeddings. named_parameters, unlike state_dict, lists them once.
    model.save_pretrained(folder, state_dict={name: weight.half() for name, weight in model.named_parameters()})
    tokenizer.save_pretrained(folder)


class Run(NamedTuple):
    """One run of a training program: its file's name, its command line, the training data, and when it began."""

    program: str
    options: argparse.Namespace
    records: list[Record]
    start: float

    @classmethod
    def begin(cls, program: str, about: str, arguments: Sequence[str] | None, **defaults: Any) -> "Run":
        """Read the command line, whose defaults are given, and the training data."""
        parser = argparse.ArgumentParser(prog=f"python tutorials/training/{program}", description=about.splitlines()[0])
        parser.add_argument("--blimp", type=Path, required=True, help="the folder with BLiMP's .jsonl files")
        parser.add_argument("--output", type=Path, help=f"folder to write (default: {defaults['output']})")
        parser.add_argument("--seed", type=int, default=0)
        parser.add_argument("--epochs", type=int)
        parser.add_argument("--grammar-pairs", type=int, default=GRAMMAR_PAIRS, help="pairs of the package's grammar")
        parser.add_argument("--layers", type=int)
        parser.add_argument("--width", type=int)
        parser.add_argument("--heads", type=int, default=4)
        parser.add_argument("--threads", type=int, default=1, help="weights depend on it (default: 1)")
        if "architecture" in defaults:
            parser.add_argument("--learning-rate", type=float, help="the highest one")
            parser.add_argument("--dropout", type=float)
            parser.add_argument("--architecture", choices=ARCHITECTURES, help="(default: bert)")
        parser.set_defaults(**defaults)
        options = parser.parse_args(arguments)
        start = time.perf_counter()
        torch.set_num_threads(options.threads)
        try:
            return cls(program, options, training_pairs(options.blimp, options.grammar_pairs), start)
        except (FileNotFoundError, ValueError) as error:
            parser.error(str(error))

    @property
    def model_options(self) -> dict[str, Any]:
        """What the training function is given, besides tokenizer and records."""
        names = ("epochs", "seed", "layers", "width", "heads", *CHOICES)
        return {name: getattr(self.options, name) for name in names if hasattr(self.options, name)}

    def new(self, records: Sequence[Record]) -> list[Record]:
        """The records whose sentences are not in the training data."""
        seen = {record["sentence_good"] for record in self.records}
        return [record for record in records if record["sentence_good"] not in seen]

    def write_card(self, model: nn.Module, vocabulary: int, accuracy: dict[str, Any]) -> None:
        """Write and print the card of a model that was written: its settings and its accuracy."""
        settings = {name: value for name, value in vars(self.options).items() if name not in ("blimp", "output")}
        words = [f"--{name.replace('_', '-')} {value}" for name, value in settings.items()]
        card = {
            "command": " ".join([f"python tutorials/training/{self.program} --blimp PATH", *words]),
            "training_pairs": len(self.records),
            "vocabulary": vocabulary,
            "parameters": sum(weight.numel() for weight in model.parameters()),
            "minutes": round((time.perf_counter() - self.start) / 60, 1),
            "torch": torch.__version__,
            "accuracy": accuracy,
        }
        text = json.dumps(card, indent=2)
        (self.options.output / "card.json").write_text(text + "\n", encoding="utf-8")
        print(text)


EVALUATION_PAIRS: Final = 1000  #: the number of sentence pairs of the grammar that `measure` draws


def measure(
    model: Any,
    tokenizer: Any,
    run: Run,
    usable: Callable[[Any, list[Record]], list[Record]],
    prefers: Callable[[Any, Any, list[Record]], Tensor],
    pairs: int = EVALUATION_PAIRS,
) -> dict[str, Any]:
    """The accuracy of a model on the held-out halves of BLiMP and on new sentences of the grammar.

    Sentences of the training do not count as new. For ``"held_out"`` and ``"grammar"``, for each paradigm and
    ``"overall"``: the number of `usable` pairs, and the share of them in which the model `prefers` the good form.
    ``"dropped"`` counts the other pairs.
    """
    held = [record for records in held_out(run.options.blimp).values() for record in records]
    results: dict[str, Any] = {}
    for name, records in {"held_out": held, "grammar": run.new(agreement_sentences(pairs))}.items():
        kept = usable(tokenizer, records)
        results[name] = {"dropped": len(records) - len(kept)} | accuracies(kept, prefers(model, tokenizer, kept))
    return results


def single_tokens(tokenizer: Any, records: Sequence[Record]) -> list[Record]:
    """The records whose two forms are single tokens."""
    return [record for record in records if form_ids(tokenizer, record) is not None]


def accuracies(records: Sequence[Record], right: Tensor) -> dict[str, Any]:
    """The number and the share of right ones of all records, ``"overall"``, and of those of each paradigm."""
    paradigms = [record["UID"] for record in records]
    of_each = {name: right[[name == one for one in paradigms]] for name in dict.fromkeys(paradigms)}
    some = ({"overall": right} | of_each).items()
    return {name: {"pairs": len(its), "accuracy": round(its.double().mean().item(), 4)} for name, its in some}


def main(arguments: Sequence[str] | None = None) -> None:
    """Train a model by the options of the command line. Write it with a card of its settings and accuracy."""
    run = Run.begin("train_masked.py", str(__doc__), arguments, **DEFAULTS, **CHOICES)
    folder, records = run.options.output, run.records
    sentences = [record[key] for record in records for key in ("sentence_good", "sentence_bad")]
    tokenizer = build_tokenizer(sentences, MAX_LENGTH)
    model = train_model(tokenizer, records, **run.model_options)
    save_model(model, tokenizer, folder)
    run.write_card(model, len(tokenizer), measure(*load_model(folder), run, single_tokens, prefers_good))


if __name__ == "__main__":
    main()
