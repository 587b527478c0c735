"""Record the layers of one forward pass, replay them with values zeroed, take them apart.

The rest of the package imports from here, and from no file inside. The rooms, from the ground up: `numerics` (tensors
only), `taps` (where attention is read), `capture` (one pass recorded, one layer run again), `structure` (what a
recorded layer is), `replay` and `decomposition`, then `whole_model` and the driver `value_zeroing`.
"""

from captum_vz._engine.capture import LayerRecord
from captum_vz._engine.capture.forward_pass import LayerPass, LayerResults, check_no_dropout, given_states, layer_hooks
from captum_vz._engine.capture.layer_runner import (
    HALF,
    LAYER_ERRORS,
    caches_in,
    in_float32,
    is_cache,
    is_half,
    tokens_in_caches,
    with_own_caches,
)
from captum_vz._engine.decomposition import INCLUDES, Decomposition, decompositions, projected_vectors
from captum_vz._engine.numerics import (
    SHORT_OF_MEMORY,
    ReturnedTensor,
    budget_of,
    first_tensor,
    is_out_of_memory,
    once_a_pass,
)
from captum_vz._engine.numerics.tolerance import OUTPUT_ROUNDING, CannotReplayError, Readings, is_reproduced, not_finite
from captum_vz._engine.replay import Request
from captum_vz._engine.replay.unknown_code import check_unknown_code
from captum_vz._engine.structure import AttentionSite, attention_site
from captum_vz._engine.structure.attention_block import AttentionBlock
from captum_vz._engine.structure.dependence import OtherMixing
from captum_vz._engine.structure.find_layers import find_layers
from captum_vz._engine.structure.modules import Norm, keeps_examples_apart, matrix, read_norm
from captum_vz._engine.taps.changes import is_hooked_by_captum, random_states, repeated
from captum_vz._engine.taps.handler import AttentionHandler
from captum_vz._engine.taps.projection import ValueProjection
from captum_vz._engine.value_zeroing import (
    REPLAYS,
    ImpreciseError,
    OutputDistance,
    ReplayTrace,
    traced_replays,
    value_zeroing_scores,
)
from captum_vz._engine.whole_model import ModelGates, ModelReplay
from captum_vz._engine.whole_model.gradients import (
    EmbeddingLeaf,
    ExplainedTensors,
    first_module_holding,
    relevance_gradients,
)
