"""A testbed without downloads: four embedded language models, and sentences whose cue is known.

In sentences with agreement, it is known which token a model must use. In "the pictures of some hat [MASK] scaring
marcus", only the cue *pictures* decides that the target is *are*. The model predicts the right form nearly always.
Whether an attribution shows the cue is the question of Mohebbi et al. (2023,
https://aclanthology.org/2023.eacl-main.245).

========================== ===================================================================================
function                   returns
========================== ===================================================================================
`load_model`               an embedded model and its tokenizer: "agreement" (the default), "six-layers",
                           "pre-norm" or "causal"
`agreement_sentences`      sentence pairs with known cue and target, from the package's own grammar
`encode_record`            the tokens of a masked sentence, and the token positions of its cue and target
`form_ids`, `prefers_good` the token ids of the two forms of the target, and whether a model prefers the good form
`read_paradigm`            the sentence pairs of a BLiMP paradigm, in the same format
`held_out`                 the BLiMP pairs that the embedded model was not trained on
`mask_target`              a BLiMP pair with its masked sentence
`split_words`              the words of a sentence
`expand_contractions`      a sentence without negative contractions
========================== ===================================================================================

:mod:`captum_vz.testbed.check` grades the exercises of the tutorials.

>>> model, tokenizer = load_model()
>>> record = agreement_sentences(1, paradigm="relational_noun")[0]
>>> encoded = encode_record(tokenizer, record)
>>> tokens = encoded.encoding.tokens()
>>> tokens[encoded.target], [tokens[position] for position in encoded.cue]
('[MASK]', ['documentary'])
"""

from captum_vz.testbed.data import expand_contractions, held_out, mask_target, read_paradigm
from captum_vz.testbed.evaluation import prefers_good
from captum_vz.testbed.grammar import agreement_sentences
from captum_vz.testbed.model import load_model
from captum_vz.text import EncodedRecord, encode_record, form_ids, split_words

__all__ = [
    "EncodedRecord",
    "agreement_sentences",
    "encode_record",
    "expand_contractions",
    "form_ids",
    "held_out",
    "load_model",
    "mask_target",
    "prefers_good",
    "read_paradigm",
    "split_words",
]
