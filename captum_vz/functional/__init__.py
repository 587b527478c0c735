"""Pure tensor functions: no modules, no state, each citing its equation.

A *map* is `(batch, out, in)`: row i says how much output token i depends on each input token j.

================================= ========================================= ===========================================
function                          takes                                     gives
================================= ========================================= ===========================================
`cosine_distance` and its kin     two `(..., d)`                            `(...)`, zero where nothing changed
`normalize_rows`                  scores `(..., in)`                        the same shape, rows sum to 1
`add_residual`                    one map                                   one map, some weight on its diagonal
`rollout`                         a map a layer, first layer first          a map a layer, rows sum to 1 if theirs do
`encoder_decoder_rollout`         a map a layer of a decoder, an encoder's  a map a layer, rows sum to 1 if theirs do
`attention_flow`                  a map a layer, first layer first          one map, rows sum to 1
`receptive_fields`                a map a layer, first layer first          counts a layer, `(batch, tokens)`
`pool_groups`                     a map of tokens                           a map of words, spans or regions
`head_vectors`                    values, output projection                 each head's vectors `(batch, in, head, d)`
`frozen_norm`                     vectors, a norm's scale                   the norm's linear part of them
`contributions`                   weights, vectors of the parts of a source one vector an output and source
`contribution_norms`              the same                                  their lengths: a map
`alti_contributions`              vectors of sources, their whole           how near each comes to it: a map
`mixing_norms`                    the same                                  `(batch, out, 2)`: from others, from itself
`logit_contributions`             updates `(batch, row, in)`, a map, a layer their sum, each through the maps below it
`token_scores`                    attributions `(batch, tokens, d)`         `(batch, tokens)`
================================= ========================================= ===========================================
"""

from captum_vz.functional.alti import alti_contributions, logit_contributions
from captum_vz.functional.distances import (
    DISTANCES,
    Distance,
    cosine_distance,
    euclidean_distance,
    get_distance,
    half_squared_distance,
    l1_distance,
    unit_vectors,
)
from captum_vz.functional.embeddings import token_scores
from captum_vz.functional.flow import attention_flow
from captum_vz.functional.groups import pool_groups
from captum_vz.functional.norms import (
    contribution_norms,
    contributions,
    frozen_norm,
    head_vectors,
    mixing_norms,
)
from captum_vz.functional.receptive_fields import receptive_fields
from captum_vz.functional.rollout import Residual, add_residual, encoder_decoder_rollout, rollout
from captum_vz.functional.rows import normalize_rows, widen

__all__ = [
    "DISTANCES",
    "Distance",
    "Residual",
    "add_residual",
    "alti_contributions",
    "attention_flow",
    "contribution_norms",
    "contributions",
    "cosine_distance",
    "encoder_decoder_rollout",
    "euclidean_distance",
    "frozen_norm",
    "get_distance",
    "half_squared_distance",
    "head_vectors",
    "l1_distance",
    "logit_contributions",
    "mixing_norms",
    "normalize_rows",
    "pool_groups",
    "receptive_fields",
    "rollout",
    "token_scores",
    "unit_vectors",
    "widen",
]
