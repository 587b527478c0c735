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
`prefers_good`             whether a model prefers the right form of the target
`read_paradigm`            the sentence pairs of a BLiMP paradigm, in the same format
`held_out`                 the BLiMP pairs that the embedded model was not trained on
`mask_target`              a BLiMP pair with its masked sentence
`expand_contractions`      a sentence without negative contractions
========================== ===================================================================================

:mod:`captum_vz.text` finds the tokens of these sentences.

>>> from captum_vz.text import encode_record
>>> model, tokenizer = load_model()
>>> record = agreement_sentences(1, paradigm="relational_noun")[0]
>>> encoded = encode_record(tokenizer, record)
>>> tokens = encoded.encoding.tokens()
>>> tokens[encoded.target], [tokens[position] for position in encoded.cue]
('[MASK]', ['documentary'])
"""

from captum_vz.testbed.data import expand_contractions, held_out, mask_target, read_paradigm
from captum_vz.testbed.grammar import agreement_sentences
from captum_vz.testbed.model import load_model, prefers_good

__all__ = [
    "agreement_sentences",
    "expand_contractions",
    "held_out",
    "load_model",
    "mask_target",
    "prefers_good",
    "read_paradigm",
]
