"""What the names of a config's fields do not tell, a row for each model type that needs one."""

from __future__ import annotations

from typing import Any

TINY_MLP = {"intermediate_size": 96, "moe_intermediate_size": 32}

EXCEPTIONS: dict[str, dict[str, Any]] = {
    "lilt": {"hidden_size": 96},
    "dots1": {"moe_intermediate_size": 32, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "esm": {"vocab_size": 128, "mask_token_id": 3, "pad_token_id": 1},
    "autoformer": {"prediction_length": 6, "context_length": 8},
    "informer": {"prediction_length": 6, "context_length": 8},
    "time_series_transformer": {"prediction_length": 6, "context_length": 8},
}
