"""Captum attribution classes, one in each file. The baselines without a model share one."""

from captum_vz._engine import AttentionBlock
from captum_vz.attr._base import LayerMaps, MapRun
from captum_vz.attr._base.map_aggregation import MapAggregation
from captum_vz.attr._call.target import Wanted
from captum_vz.attr._logit_updates import LogitTerms
from captum_vz.attr.alti import ALTI
from captum_vz.attr.alti_logit import ALTILogit
from captum_vz.attr.alti_plus import ALTIPlus
from captum_vz.attr.attention_flow import AttentionFlow
from captum_vz.attr.attention_rollout import AttentionRollout
from captum_vz.attr.attn_lrp import AttnLRP
from captum_vz.attr.globenc import GlobEnc
from captum_vz.attr.hidden_token_attribution import HiddenTokenAttribution
from captum_vz.attr.layer_alti import LayerALTI
from captum_vz.attr.layer_attention import LayerAttention
from captum_vz.attr.layer_attention_gradient import LayerAttentionGradient
from captum_vz.attr.layer_attention_norm import LayerAttentionNorm
from captum_vz.attr.model_free import ModelFreeAttribution, PositionAttribution, RandomAttribution
from captum_vz.attr.rollout import Rollout
from captum_vz.attr.token_attribution import TokenAttribution
from captum_vz.attr.value_gates import ValueGates
from captum_vz.attr.value_zeroing import ValueZeroing
from captum_vz.attr.value_zeroing_effect import ValueZeroingEffect
from captum_vz.attr.value_zeroing_rollout import ValueZeroingRollout

__all__ = [
    "ALTI",
    "ALTILogit",
    "ALTIPlus",
    "AttentionBlock",
    "AttentionFlow",
    "AttentionRollout",
    "AttnLRP",
    "GlobEnc",
    "HiddenTokenAttribution",
    "LayerALTI",
    "LayerAttention",
    "LayerAttentionGradient",
    "LayerAttentionNorm",
    "LayerMaps",
    "LogitTerms",
    "MapAggregation",
    "MapRun",
    "ModelFreeAttribution",
    "PositionAttribution",
    "RandomAttribution",
    "Rollout",
    "TokenAttribution",
    "ValueGates",
    "ValueZeroing",
    "ValueZeroingEffect",
    "ValueZeroingRollout",
    "Wanted",
]
