"""Pure tensor functions. They use no modules, keep no state, and each cites its equation.

A *map* is `(batch, out, in)`: row i says how much output token i depends on each input token j.

================================= =================================== ==============================================
function                          takes                               returns
================================= =================================== ==============================================
`cosine_distance`                 two `(..., d)`                      `(...)`, zero where nothing changed
`euclidean_distance`              the same                            the same
`half_squared_distance`           the same                            the same
`l1_distance`                     the same                            the same
`unit_vectors`                    `(..., d)`                          the same shape, vectors of length 1
`Intervention`                    weights, values, zeroed sources     contexts without these sources
`ZeroValue`, `MeanValue`          the same                            the same, with other values
`Knockout`                        the same                            the same, with other weights
`normalize_rows`                  scores `(..., in)`                  the same shape, rows sum to 1
`widen`                           values of any dtype                 the same values in at least float32
`add_residual`                    a map                               a map with a residual on its diagonal
`rollout`                         one map a layer                     one map a layer, rows sum to 1 as in the maps
`encoder_decoder_rollout`         an encoder's map, a decoder's maps  one map a layer, rows sum to 1 as in the maps
`receptive_fields`                one map a layer                     counts `(batch, tokens)` for each layer
`attention_flow`                  one map a layer                     one map, rows sum to 1
`pool_groups`                     a map of tokens                     a map of words, spans or regions
`word_mask`, `patch_mask`         a tokenizer's output, a picture      a `feature_mask` of words, of regions
`token_scores`                    attributions `(batch, tokens, d)`   `(batch, tokens)`
`deciding_layer`                  a token's rows, a relevance         the layer whose row agrees most, all products
`to_embeddings`                   `(batch, tokens)`, the embeddings   the shape of the embeddings, for Captum's metrics
`head_vectors`                    values, output projection           vectors of each head `(batch, in, head, d)`
`frozen_norm`                     vectors, the scale of a norm        the vectors after the linear part of the norm
`contributions`                   weights, vectors of parts           a vector for each output and source
`contribution_norms`              the same                            the lengths of these vectors: a map
`mixing_norms`                    the same                            `(batch, out, 2)`: from others, from itself
`alti_contributions`              vectors of sources, their sum       how near each is to the sum: a map
`logit_contributions`             updates and maps, one a layer       contributions of input tokens to a logit
================================= =================================== ==============================================
"""

from captum_vz.functional.contributions import (
    alti_contributions,
    contribution_norms,
    contributions,
    frozen_norm,
    head_vectors,
    logit_contributions,
    mixing_norms,
)
from captum_vz.functional.groups import patch_mask, pool_groups, word_mask
from captum_vz.functional.interventions import Intervention, Knockout, MeanValue, ZeroValue
from captum_vz.functional.rollout import (
    Residual,
    add_residual,
    attention_flow,
    encoder_decoder_rollout,
    receptive_fields,
    rollout,
)
from captum_vz.functional.scores import (
    Distance,
    cosine_distance,
    deciding_layer,
    euclidean_distance,
    half_squared_distance,
    l1_distance,
    normalize_rows,
    to_embeddings,
    token_scores,
    unit_vectors,
    widen,
)

__all__ = [
    "Distance",
    "Intervention",
    "Knockout",
    "MeanValue",
    "Residual",
    "ZeroValue",
    "add_residual",
    "alti_contributions",
    "attention_flow",
    "contribution_norms",
    "contributions",
    "cosine_distance",
    "deciding_layer",
    "encoder_decoder_rollout",
    "euclidean_distance",
    "frozen_norm",
    "half_squared_distance",
    "head_vectors",
    "l1_distance",
    "logit_contributions",
    "mixing_norms",
    "normalize_rows",
    "patch_mask",
    "pool_groups",
    "receptive_fields",
    "rollout",
    "to_embeddings",
    "token_scores",
    "unit_vectors",
    "widen",
    "word_mask",
]
