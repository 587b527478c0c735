"""A testbed that needs no download: an embedded masked language model and sentences whose cue is known.

Agreement is the case in which one knows what a model must look at: in "the pictures of some hat [MASK] scaring
marcus" only the cue, *pictures*, tells that the target is *are*. The model reads it nearly always; whether an
attribution shows it is the question of Mohebbi et al. (2023, https://aclanthology.org/2023.eacl-main.245).

    load_agreement_model     the embedded model and its tokenizer
    agreement_sentences      sentence pairs with known cue and target, from the package's own grammar
    encode_record            a pair's masked sentence as tokens, with the token positions of cue and target
    form_ids, prefers_good   the two forms as token ids, and which of them a model prefers
    read_paradigm, held_out  BLiMP's own pairs in the same format, and those that the model was not trained on
    mask_target, split_words, expand_contractions   what turns a BLiMP pair into a masked sentence

>>> model, tokenizer = load_agreement_model()
>>> record = agreement_sentences(1, paradigm="relational_noun")[0]
>>> encoded = encode_record(tokenizer, record)
>>> tokens = encoded.encoding.tokens()
>>> tokens[encoded.target], [tokens[position] for position in encoded.cue]
('[MASK]', ['documentary'])
"""

from captum_vz.testbed.data import expand_contractions, held_out, mask_target, read_paradigm, split_words
from captum_vz.testbed.encoding import EncodedRecord, encode_record, form_ids
from captum_vz.testbed.evaluation import prefers_good
from captum_vz.testbed.grammar import agreement_sentences
from captum_vz.testbed.model import load_agreement_model

__all__ = [
    "EncodedRecord",
    "agreement_sentences",
    "encode_record",
    "expand_contractions",
    "form_ids",
    "held_out",
    "load_agreement_model",
    "mask_target",
    "prefers_good",
    "read_paradigm",
    "split_words",
]
