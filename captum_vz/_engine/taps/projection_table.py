"""TODO."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from functools import cache
from operator import attrgetter

from torch import Tensor, nn


def _own(head: int, heads: int, features: int) -> slice:
    """The projection holds values only, head by head."""
    return _part(head, heads, features)


def _last_third(head: int, heads: int, features: int) -> slice:
    """Queries, keys and values side by side, each head by head."""
    return _part(2 * heads + head, 3 * heads, features)


def _interleaved(head: int, heads: int, features: int) -> slice:
    """For each head its query, key and value."""
    return _part(3 * head + 2, 3 * heads, features)


def _in_four_blocks(head: int, heads: int, features: int) -> slice:
    """Four blocks, one for each core that the model was trained on, of queries, values and keys, in this order."""
    in_block = heads // 4
    block, place = divmod(head, in_block)
    return _part((3 * block + 1) * in_block + place, 3 * heads, features)


def _part(number: int, parts: int, features: int) -> slice:
    width = features // parts
    return slice(number * width, (number + 1) * width)


class Mask(Enum):
    """What the numbers of a family's masks mean."""

    USUAL = auto()  # with four axes added to the scores; else 1 where something is seen
    ADDED = auto()  # added, with however many axes
    FACTOR = auto()  # 1 where something is seen, and 0 elsewhere
    HIDES = auto()  # True where something is not seen
    BLOCKS = auto()  # (batch, 1, block, row, 3 rows): what a block sees of its neighbours and itself


@dataclass(frozen=True)
class ValueProjection:
    """Where the values of an attention module are.

    Attributes:
        projection: Name of the submodule whose output `(batch, in, features)` holds the values; or of a parameter
            `(d, heads, d_head)` that the hidden states are multiplied with.
        heads: Name of the attention module's attribute that counts its heads.
        head_columns: (head, heads, features) -> the features that are this head's values.
        groups: Name of the attribute that counts the groups of heads that share a value, behind the group's queries
            and its key; `head_columns` is not asked then.
        bias: Name of a parameter that is added to the values behind the projection.
        mask: What the numbers of its masks mean.
        sequence_first: Whether the layer's tensors are (tokens, batch, d).
        transposed: Whether what the projection returns is (in, batch, features), unlike the layer's tensors.
        beside: Name of a submodule that gives values of the same tokens for other rows, if these are there.
        pads: Whether the model pads its inputs behind their end, to a multiple of what is attended to at a time.
    """

    projection: str
    heads: str = "num_attention_heads"
    head_columns: Callable[[int, int, int], slice] = _own
    groups: str | None = None
    bias: str | None = None
    mask: Mask = Mask.USUAL
    sequence_first: bool = False
    transposed: bool = False
    beside: str | None = None
    pads: bool = False

    def columns(self, module: nn.Module, features: int) -> list[slice]:
        """The features of each head's values."""
        heads = int(attrgetter(self.heads)(module))
        if self.groups is None:
            return [self.head_columns(head, heads, features) for head in range(heads)]
        groups = int(attrgetter(self.groups)(module))
        size = heads // groups + 2
        return [_part(head * groups // heads * size + size - 1, groups * size, features) for head in range(heads)]

    def zero(self, module: nn.Module) -> list[Tensor] | float:
        """What the projection returns for a value that is zero, for each head; a number where it is that for all."""
        if self.bias is None:
            return 0.0
        bias = getattr(module, self.bias).detach()
        return [-bias[columns] for columns in _heads_of(bias, int(attrgetter(self.heads)(module)))]


def _heads_of(bias: Tensor, heads: int) -> list[slice]:
    return [_own(head, heads, len(bias)) for head in range(heads)]


BERT_LIKE = ValueProjection("value")


BART_LIKE = ValueProjection("v_proj", "num_heads")


LONGFORMER = ValueProjection("value", "num_heads", mask=Mask.ADDED, transposed=True, beside="value_global", pads=True)


BIGBIRD = ValueProjection("value", mask=Mask.FACTOR, pads=True)


DEFORMABLE = ValueProjection("value_proj", "n_heads")


VALUE_PROJECTIONS = {
    "BarkSelfAttention": ValueProjection("att_proj", "num_heads", _last_third),
    "BigBirdBlockSparseAttention": BIGBIRD,
    "BigBirdPegasusBlockSparseAttention": BIGBIRD,
    "BigBirdPegasusSelfAttention": BERT_LIKE,
    "BigBirdSelfAttention": BERT_LIKE,
    "BlipAttention": ValueProjection("qkv", "num_heads", _last_third),
    "BlipTextSelfAttention": BERT_LIKE,
    "BloomAttention": ValueProjection("query_key_value", "num_heads", _interleaved),
    "BrosSelfAttention": BERT_LIKE,
    "CanineSelfAttention": BERT_LIKE,
    "ClvpSelfAttention": BART_LIKE,
    "CodeGenAttention": ValueProjection("qkv_proj", head_columns=_in_four_blocks),
    "ConvBertSelfAttention": BERT_LIKE,
    "CpmAntAttention": ValueProjection("project_v", "num_heads"),
    "CvtSelfAttention": ValueProjection("projection_value", "num_heads"),
    "DabDetrDecoderLayerCrossAttention": ValueProjection("cross_attn_value_proj", "decoder_attention_heads"),
    "DabDetrDecoderLayerSelfAttention": ValueProjection("self_attn_value_proj", "self_attn.attention_heads"),
    "Data2VecVisionSelfAttention": BERT_LIKE,
    "DeformableDetrMultiscaleDeformableAttention": DEFORMABLE,
    "DonutSwinSelfAttention": BERT_LIKE,
    "FalconAttention": ValueProjection("query_key_value", "num_heads", groups="num_kv_heads"),
    "FastSpeech2ConformerAttention": ValueProjection("linear_v", "num_heads"),
    "FlavaSelfAttention": BERT_LIKE,
    "FunnelRelMultiheadAttention": ValueProjection("v_head", "config.n_head"),
    "GLPNEfficientSelfAttention": BERT_LIKE,
    "GPTJAttention": ValueProjection("v_proj"),
    "GPTNeoSelfAttention": BART_LIKE,
    "GPTNeoXJapaneseAttention": ValueProjection("query_key_value", head_columns=_interleaved),
    "GotOcr2VisionAttention": ValueProjection("qkv", head_columns=_last_third),
    "GroupViTAttention": BART_LIKE,
    "HieraMaskUnitAttention": ValueProjection("qkv", "num_heads", _last_third),
    "IBertSelfAttention": BERT_LIKE,
    "ImageGPTAttention": ValueProjection("c_attn", "num_heads", _last_third),
    "Kosmos2_5VisionAttention": ValueProjection("value", "n_heads"),
    "LEDDecoderAttention": BART_LIKE,
    "LEDEncoderSelfAttention": LONGFORMER,
    "LayoutLMv3SelfAttention": BERT_LIKE,
    "LiltSelfAttention": BERT_LIKE,
    "LongT5LocalAttention": ValueProjection("v", "n_heads", mask=Mask.BLOCKS),
    "LongformerSelfAttention": LONGFORMER,
    "LukeSelfAttention": BERT_LIKE,
    "MPNetSelfAttention": ValueProjection("v"),
    "MaskFormerSwinSelfAttention": BERT_LIKE,
    "MegatronBertSelfAttention": BERT_LIKE,
    "MgpstrAttention": ValueProjection("qkv", "num_heads", _last_third),
    "MobileViTSelfAttention": BERT_LIKE,
    "MptAttention": ValueProjection("Wqkv", "n_heads", _last_third, mask=Mask.HIDES),
    "MvpAttention": BART_LIKE,
    "PerceiverSelfAttention": ValueProjection("value", "num_heads"),
    "ProphetNetAttention": ValueProjection("value_proj", "num_attn_heads"),
    "ProphetNetNgramSelfAttention": ValueProjection("value_proj", "num_attn_heads"),
    "PvtEfficientSelfAttention": BERT_LIKE,
    "PvtV2SelfAttention": BERT_LIKE,
    "RTDetrMultiscaleDeformableAttention": DEFORMABLE,
    "RTDetrV2MultiscaleDeformableAttention": DEFORMABLE,
    "RemBertSelfAttention": BERT_LIKE,
    "RfDetrMultiscaleDeformableAttention": DEFORMABLE,
    "RoFormerSelfAttention": BERT_LIKE,
    "SamHQVisionAttention": ValueProjection("qkv", head_columns=_last_third),
    "SamVisionAttention": ValueProjection("qkv", head_columns=_last_third),
    "SegGptAttention": ValueProjection("qkv", head_columns=_last_third),
    "SpeechT5Attention": BART_LIKE,
    "Swin2SRSelfAttention": BERT_LIKE,
    "Swinv2SelfAttention": BERT_LIKE,
    "TableTransformerAttention": BART_LIKE,
    "TapasSelfAttention": BERT_LIKE,
    "TimesformerSelfAttention": ValueProjection("qkv", "num_heads", _last_third),
    "UnlimitedOcrSamVisionAttention": ValueProjection("qkv", head_columns=_last_third),
    "ViltSelfAttention": BERT_LIKE,
    "VisualBertSelfAttention": BERT_LIKE,
    "VitDetAttention": ValueProjection("qkv", "num_heads", _last_third),
    "VitsAttention": BART_LIKE,
    "XGLMAttention": BART_LIKE,
    "XLNetRelativeAttention": ValueProjection("v", "n_head", sequence_first=True),
    "YosoSelfAttention": BERT_LIKE,
    # Names that several families share are keyed with their file.
    "modeling_dab_detr.DetrAttention": BART_LIKE,
    "modeling_deberta.DisentangledSelfAttention": ValueProjection("in_proj", head_columns=_interleaved, bias="v_bias"),
    "modeling_deberta_v2.DisentangledSelfAttention": ValueProjection("value_proj"),
    "modeling_fsmt.Attention": ValueProjection("v_proj", "num_heads", mask=Mask.HIDES, sequence_first=True),
    "modeling_openai.Attention": ValueProjection("c_attn", "n_head", _last_third),
    "modeling_sew_d.DisentangledSelfAttention": ValueProjection("value_proj"),
}


def family_of(module: nn.Module) -> ValueProjection | None:
    """The row for this module's class, or for one that it inherits from."""
    return _row_among(type(module).__mro__)


@cache
def _row_among(classes: tuple[type, ...]) -> ValueProjection | None:
    for cls in classes:
        file = cls.__module__.rsplit(".", 1)[-1]
        row = VALUE_PROJECTIONS.get(f"{file}.{cls.__name__}", VALUE_PROJECTIONS.get(cls.__name__))
        if row is not None:
            return row
    return None
