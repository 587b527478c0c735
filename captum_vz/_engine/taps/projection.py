"""Value projections of attention modules that compute attention inline, and the masks of their layers.

The weights of inline attention cannot be read. Hooks on the value projection show its values, and let the definition
zero them. The table of families has one row for each attention class. Masks are read from the layer's arguments.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from operator import attrgetter
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from captum_vz._engine.numerics import mask_as_bool, tensors_in
from captum_vz._engine.numerics.tolerance import CannotReplayError
from captum_vz._engine.taps.changes import Changes
from captum_vz._engine.taps.handler import current_handler
from captum_vz._private import tree_leaves


def _slice(number: int, parts: int, features: int) -> slice:
    """Return part `number` of `features` features in equal parts. As `head_columns`, they are values alone."""
    width = features // parts
    return slice(number * width, (number + 1) * width)


def _last_third(head: int, heads: int, features: int) -> slice:
    """The projection returns all queries, all keys, then all values, each head after head."""
    return _slice(2 * heads + head, 3 * heads, features)


def _interleaved(head: int, heads: int, features: int) -> slice:
    """The projection returns the query, key and value of the first head, then those of the next."""
    return _slice(3 * head + 2, 3 * heads, features)


def _in_four_blocks(head: int, heads: int, features: int) -> slice:
    """The projection returns four blocks of queries, values and keys, one for each core used in training."""
    in_block = heads // 4
    block, index = divmod(head, in_block)
    return _slice((3 * block + 1) * in_block + index, 3 * heads, features)


class Mask(Enum):
    """What the numbers in the masks of a family mean."""

    USUAL = auto()  # added to the scores if it has four axes, else 1 where a source is visible
    ADDED = auto()  # added to the scores for any number of axes
    FACTOR = auto()  # 1 where a source is visible, 0 elsewhere
    HIDES = auto()  # True where a source is hidden
    BLOCKS = auto()  # (batch, 1, block, row, 3 rows): what a row sees of the previous, its own and the next block


@dataclass(frozen=True, eq=False)  # rows of families are keys, also if two are alike
class ValueProjection:
    """Where the values of an attention module are."""

    # The submodule whose output (batch, in, features) holds the values, or a parameter (d, heads, d_head) that the
    # hidden states are multiplied by.
    projection: str
    heads: str = "num_attention_heads"  # the attribute that holds the number of heads
    # (head, heads, features) -> the features that hold the values of this head.
    head_columns: Callable[[int, int, int], slice] = _slice
    # The attribute that holds the number of groups of heads. The heads of a group share a value, which follows the
    # queries and the key of the group. `head_columns` is not used then.
    groups: str | None = None
    bias: str | None = None  # a parameter that is added to the values after the projection
    mask: Mask = Mask.USUAL  # what the numbers in the masks mean
    sequence_first: bool = False  # whether the tensors of the layer are (tokens, batch, d)
    transposed: bool = False  # whether the projection returns (in, batch, features), unlike the layer's other tensors
    # A submodule that computes a second value of each token, used by other rows (global attention).
    second_projection: str | None = None
    pads: bool = False  # whether the model pads its inputs at the end, to a multiple of an attention block's length
    # The projection's output -> the values in it, a view (batch, in, d) or (batch, in, head, d_head). The user says so
    # of a layer without a row, and `projection` is then a path in the layer.
    select: Callable[[Tensor], Tensor] | None = None
    others: tuple[ValueProjection, ...] = ()  # the values of further heads, if each head has a module of its own

    @property
    def parts(self) -> tuple[ValueProjection, ...]:
        return (self, *self.others)

    def rows(self, projected: Tensor) -> Tensor:
        """Return a copy of the values in the projection's output, `(batch, in, features)`."""
        part = self._part(projected)
        if self.select is not None:
            return part.clone().flatten(2)
        # Some have no axis of examples, or grids in place of sequences.
        return (part[None] if part.dim() == 2 else part.flatten(1, -2)).clone()

    def with_rows(self, rows: Tensor, projected: Tensor) -> Tensor:
        """Return the projection's output with other values `(batch, in, features)`."""
        projected = projected.clone()
        part = self._part(projected)
        part.copy_(rows.reshape(part.shape))
        return projected

    def _part(self, projected: Tensor) -> Tensor:
        """The view of the projection's output that holds the values, examples first."""
        if self.select is not None:
            return self.select(projected)
        return projected.transpose(0, 1) if self.transposed or self.sequence_first else projected

    def in_run(self, module: nn.Module, holder: nn.Module, projected: list[Any]) -> tuple[InlineValues, Tensor]:
        """Where the values are in one run of an attention module, of which parts of `holder` returned `projected`."""
        if self.others:
            return self._in_parts(holder, dict(projected))
        other = None if self.second_projection is None else getattr(module, self.second_projection)
        projection, first = attrgetter(self.projection)(holder), projected[0][1]
        columns = self._columns(module, first)
        zero: list[Tensor | float] = [0.0] * len(columns)
        if self.bias is not None:
            zero = [-x for x in getattr(module, self.bias).detach().chunk(len(columns))]
        return InlineValues(self, projection, other, columns, zero), self.rows(first)

    def _in_parts(self, layer: nn.Module, projected: dict[Any, Tensor]) -> tuple[InlineValues, Tensor]:
        rows, columns, places, start = [], list[slice](), {}, 0
        for part in self.parts:
            module = attrgetter(part.projection)(layer)
            rows.append(part.rows(projected[module]))
            columns += [slice(start + own.start, start + own.stop) for own in part._columns(layer, projected[module])]
            places[module] = part, slice(start, start := start + rows[-1].shape[-1])
        zero: list[Tensor | float] = [0.0] * len(columns)
        return InlineValues(self, next(iter(places)), None, columns, zero, places), torch.cat(rows, dim=-1)

    def _columns(self, module: nn.Module, projected: Tensor) -> list[slice]:
        """Return the features of `rows` that hold the values of each head."""
        part, features = self._part(projected), self.rows(projected).shape[-1]
        # Selected heads have an axis, or are taken for one.
        heads = int(attrgetter(self.heads)(module)) if self.select is None else part.shape[2:-1].numel()
        if self.groups is None:
            return [self.head_columns(head, heads, features) for head in range(heads)]
        groups = int(attrgetter(self.groups)(module))
        size = heads // groups + 2
        return [_slice(head * groups // heads * size + size - 1, groups * size, features) for head in range(heads)]


@dataclass(frozen=True)
class InlineValues:
    """Where the values are of an attention that its module computes inline."""

    row: ValueProjection  # where they are in the projection's output
    projection: nn.Module | nn.Parameter  # what projects them
    other_projection: nn.Module | None  # what projects values of the same tokens for some other rows, if it exists
    columns: list[slice]  # the features of each head's values
    zero: list[Tensor | float]  # what is projected for a value of each head that is zero
    places: dict[Any, tuple[ValueProjection, slice]] = field(default_factory=dict)  # of each of several projections

    def by_head(self, rows: Tensor) -> Tensor:
        """The values of all heads in `rows (batch, in, features)`, `(batch, in, head * d_head)`."""
        return torch.cat([rows[..., columns] for columns in self.columns], dim=-1)

    def change(self, rows: Tensor, changed: Tensor, new: Callable[[Tensor], Tensor]) -> None:
        """Write into `rows (n, in, features)`, where `changed (n, head, in)` is True, what `new` makes of the values.

        `new` is given the values `(n, head, in, d_head)`. CannotReplayError: heads that share their values are not
        changed alike.
        """
        parts = zip(self.columns, self.zero, strict=True)
        values = new(torch.stack([rows[..., columns] - one for columns, one in parts], dim=1))
        for head, columns in enumerate(self.columns):
            shared = (other for other in range(head) if self.columns[other] == columns)
            if any(not torch.equal(changed[:, head], changed[:, other]) for other in shared):
                raise CannotReplayError("its heads share their values, which cannot be zeroed for some heads alone")
            own = values[:, head] + self.zero[head]
            rows[..., columns] = torch.where(changed[:, head, :, None], own, rows[..., columns])


BERT_LIKE = ValueProjection("value")
BART_LIKE = ValueProjection("v_proj", "num_heads")


def _by_class(rows: dict[ValueProjection, str]) -> dict[str, ValueProjection]:
    """A table with one entry for each class name."""
    return {name: row for row, names in rows.items() for name in names.split()}


# The row of each class. A class name that several families use starts with the name of the file.
VALUE_PROJECTIONS = _by_class(
    {
        BERT_LIKE: """
            BigBirdPegasusSelfAttention BigBirdSelfAttention BlipTextSelfAttention BrosSelfAttention CanineSelfAttention
            ConvBertSelfAttention Data2VecVisionSelfAttention DonutSwinSelfAttention FlavaSelfAttention
            GLPNEfficientSelfAttention GitSelfAttention IBertSelfAttention LayoutLMv3SelfAttention LiltSelfAttention
            LukeSelfAttention MaskFormerSwinSelfAttention MegatronBertSelfAttention MobileViTSelfAttention
            PvtEfficientSelfAttention PvtV2SelfAttention RemBertSelfAttention RoFormerSelfAttention Swin2SRSelfAttention
            Swinv2SelfAttention TapasSelfAttention ViltSelfAttention VisualBertSelfAttention YosoSelfAttention
        """,
        BART_LIKE: """
            ClvpSelfAttention GPTNeoSelfAttention GroupViTAttention LEDDecoderAttention MvpAttention
            PegasusXGlobalLocalAttention SpeechT5Attention TableTransformerAttention VitsAttention XGLMAttention
            modeling_dab_detr.DetrAttention
        """,
        ValueProjection("qkv", "num_heads", _last_third): """
            BlipAttention HieraMaskUnitAttention MgpstrAttention TimesformerSelfAttention VitDetAttention
        """,
        ValueProjection("qkv", head_columns=_last_third): """
            GotOcr2VisionAttention SamHQVisionAttention SamVisionAttention SegGptAttention
            UnlimitedOcrSamVisionAttention
        """,
        ValueProjection("value_proj", "n_heads"): """
            DeformableDetrMultiscaleDeformableAttention RTDetrMultiscaleDeformableAttention
            RTDetrV2MultiscaleDeformableAttention RfDetrMultiscaleDeformableAttention
        """,
        ValueProjection("value", mask=Mask.FACTOR, pads=True): """
            BigBirdBlockSparseAttention BigBirdPegasusBlockSparseAttention
        """,
        ValueProjection(
            "value", "num_heads", mask=Mask.ADDED, transposed=True, second_projection="value_global", pads=True
        ): """
            LEDEncoderSelfAttention LongformerSelfAttention
        """,
        ValueProjection("v", "n_heads", mask=Mask.BLOCKS): "LongT5LocalAttention LongT5TransientGlobalAttention",
        ValueProjection("value_proj", "num_attn_heads"): "ProphetNetAttention ProphetNetNgramSelfAttention",
        ValueProjection("value_proj"): """
            modeling_deberta_v2.DisentangledSelfAttention modeling_sew_d.DisentangledSelfAttention
        """,
        ValueProjection("v_lin", "n_heads"): "modeling_flaubert.MultiHeadAttention modeling_xlm.MultiHeadAttention",
        ValueProjection("att_proj", "num_heads", _last_third): "BarkSelfAttention",
        ValueProjection("query_key_value", "num_heads", _interleaved): "BloomAttention",
        ValueProjection("qkv_proj", head_columns=_in_four_blocks): "CodeGenAttention",
        ValueProjection("project_v", "num_heads"): "CpmAntAttention",
        ValueProjection("projection_value", "num_heads"): "CvtSelfAttention",
        ValueProjection("cross_attn_value_proj", "decoder_attention_heads"): "DabDetrDecoderLayerCrossAttention",
        ValueProjection("self_attn_value_proj", "self_attn.attention_heads"): "DabDetrDecoderLayerSelfAttention",
        ValueProjection("query_key_value", "num_heads", groups="num_kv_heads"): "FalconAttention",
        ValueProjection("linear_v", "num_heads"): "FastSpeech2ConformerAttention",
        ValueProjection("v_head", "config.n_head"): "FunnelRelMultiheadAttention",
        ValueProjection("v_proj"): "GPTJAttention",
        ValueProjection("query_key_value", head_columns=_interleaved): "GPTNeoXJapaneseAttention",
        ValueProjection("c_attn", "num_heads", _last_third): "ImageGPTAttention",
        ValueProjection("value", "n_heads"): "Kosmos2_5VisionAttention",
        ValueProjection("v"): "MPNetSelfAttention",
        ValueProjection("Wqkv", "n_heads", _last_third, mask=Mask.HIDES): "MptAttention",
        ValueProjection("value", "num_heads"): "PerceiverSelfAttention",
        ValueProjection("v", "n_head", sequence_first=True): "XLNetRelativeAttention",
        ValueProjection("in_proj", head_columns=_interleaved, bias="v_bias"): """
            modeling_deberta.DisentangledSelfAttention
        """,
        ValueProjection("v_proj", "num_heads", mask=Mask.HIDES, sequence_first=True): "modeling_fsmt.Attention",
        ValueProjection("c_attn", "n_head", _last_third): "modeling_openai.Attention",
    }
)

# Classes that compute attention inline before transformers 5. Since then their forward looks up a function.
BEFORE_5 = _by_class(
    {
        BERT_LIKE: """
            AlbertAttention AltRobertaSelfAttention BeitSelfAttention BertGenerationSelfAttention BertSelfAttention
            BridgeTowerSelfAttention CamembertSelfAttention Data2VecTextSelfAttention ElectraSelfAttention
            ErnieSelfAttention MobileBertSelfAttention RoCBertSelfAttention RobertaPreLayerNormSelfAttention
            RobertaSelfAttention SegformerEfficientSelfAttention SwinSelfAttention XLMRobertaSelfAttention
            XLMRobertaXLSelfAttention XmodSelfAttention
        """,
        ValueProjection("v", "n_heads"): """
            LongT5Attention MT5Attention SwitchTransformersAttention T5Attention UMT5Attention UdopAttention
        """,
        BART_LIKE: """
            RTDetrMultiheadAttention RTDetrV2MultiheadAttention SeamlessM4TAttention SeamlessM4Tv2Attention
            modeling_detr.DetrAttention
        """,
        ValueProjection("v_lin", "n_heads"): "modeling_distilbert.MultiHeadSelfAttention",
    }
)


# Weak, so that a class is collected after its layers. A longer table makes the stored rows invalid.
_ROWS: WeakKeyDictionary[type, tuple[int, ValueProjection | None]] = WeakKeyDictionary()


def family_of(module: nn.Module) -> ValueProjection | None:
    """Return the row of a module's class or of a class that it inherits from, or None."""
    cls, length = type(module), len(VALUE_PROJECTIONS)
    found = _ROWS.get(cls)
    if found is None or found[0] != length:
        found = _ROWS[cls] = length, _row_among(cls)
    return found[1]


def _row_among(module_class: type[nn.Module]) -> ValueProjection | None:
    """Return the row of the first class that has one, or None."""
    code = getattr(inspect.unwrap(module_class.forward), "__code__", None)
    inline = "ALL_ATTENTION_FUNCTIONS" not in getattr(code, "co_names", ())
    rows = BEFORE_5 | VALUE_PROJECTIONS if inline else VALUE_PROJECTIONS
    for cls in module_class.__mro__:
        file = cls.__module__.rsplit(".", 1)[-1]
        row = rows.get(f"{file}.{cls.__name__}", rows.get(cls.__name__))
        if row is not None:
            return row
    return None


def is_value_projection(module: Any, attention: nn.Module, row: ValueProjection | None = None) -> bool:
    """Whether `module` projects values of `attention`, by the row of its class unless another is given."""
    if row is not None:
        return any(attrgetter(part.projection)(attention) is module for part in row.parts)
    row = family_of(attention)
    names = () if row is None else filter(None, (row.projection, row.second_projection))
    return any(getattr(attention, name, None) is module for name in names)


def _hand_over_projected(func: Any, args: Any, kwargs: Any) -> Any:
    """Hand values that a parameter projects to the handler, as hooks do for submodules."""
    output, handler = func(*args, **kwargs), current_handler()
    parameter = next((x for x in args if isinstance(x, nn.Parameter)), None)
    if handler is None or not isinstance(output, Tensor) or parameter is None:
        return output
    if parameter.dim() != 3 or output.dim() != 4 or output.shape[2:] != parameter.shape[1:]:
        return output
    changed = handler.on_exit(parameter, args, output.flatten(2))
    return output if changed is None else changed.view_as(output)


def _hand_over_results(func: Any, args: Any, kwargs: Any) -> Any:
    """Hand the results of all functions of parameters to the handler."""
    output, handler = func(*args, **kwargs), current_handler()
    if handler is None or not isinstance(output, Tensor):
        return output
    for used in tree_leaves((args, kwargs)):
        # A view of the parameter is no projection.
        if isinstance(used, nn.Parameter) and used.untyped_storage() != output.untyped_storage():
            changed = handler.on_exit(used, args, output)
            output = output if changed is None else changed
    return output


def attach_to_named(layers: Sequence[nn.Module], rows: Sequence[ValueProjection], changes: Changes) -> None:
    """Let results of functions of parameters reach the handler, if the user names a parameter as a projection."""
    parts = [attrgetter(part.projection)(layer) for layer, row in zip(layers, rows, strict=False) for part in row.parts]
    if any(isinstance(part, nn.Parameter) for part in parts):
        changes.answer_functions(_hand_over_results)


def tap_projections(modules: Sequence[nn.Module], changes: Changes) -> None:
    """See values that a parameter projects. Submodules that project values are seen by the hooks of each pass."""
    rows = [(module, family_of(module)) for module in modules]
    if any(row and isinstance(getattr(module, row.projection, None), nn.Parameter) for module, row in rows):
        changes.answer_functions(_hand_over_projected)


def visible_by_argument(
    arguments: Any, batch: int, out: int, sources: int, row: ValueProjection = BERT_LIKE
) -> Tensor | None:
    """Which sources the first argument with the shape of a mask lets through, `(batch, 1, 1 or out, in)`, or None."""
    found = (_read_mask(mask, batch, out, sources, row) for mask in tensors_in(arguments))
    return next((allowed for allowed in found if allowed is not None), None)


def _read_mask(mask: Tensor, batch: int, out: int, sources: int, row: ValueProjection) -> Tensor | None:
    """Which sources `mask` lets through, or None if it does not have the shape of a mask."""
    if row.sequence_first and mask.shape == (out, sources, batch, 1):
        return _hide_padding(mask.permute(2, 3, 0, 1) == 0)
    if row.mask is Mask.BLOCKS and mask.dim() == 5 and mask.shape[0] == batch:
        return _unfold_blocks(mask)[:, :, :out, :sources]
    if mask.shape[-1:] != (sources,):
        return None
    if mask.dim() == 4 and mask.shape[0] in (1, batch) and mask.shape[2] in (1, out):
        allowed = mask != 0 if row.mask is Mask.FACTOR else mask_as_bool(mask)
    elif mask.shape[:-1] in ((batch,), (batch, 1)):
        added = row.mask in (Mask.ADDED, Mask.HIDES) and mask.is_floating_point()
        if not added and not ((mask == 0) | (mask == 1)).all():
            return None
        allowed = (mask_as_bool(mask) if added else mask.bool()).view(batch, 1, 1, sources)
    else:
        return None
    return ~allowed if row.mask is Mask.HIDES and not mask.is_floating_point() else allowed


def _unfold_blocks(mask: Tensor) -> Tensor:
    """A mask of blocks (LongT5), as `(batch, 1, out, in)`. Each block sees itself and its two neighbours."""
    batch, _, blocks, rows, _ = mask.shape
    allowed = torch.zeros(batch, 1, blocks * rows, (blocks + 2) * rows, dtype=torch.bool, device=mask.device)
    for start in range(0, blocks * rows, rows):
        allowed[:, :, start : start + rows, start : start + 3 * rows] = mask[:, :, start // rows] > 0
    return allowed[..., rows:-rows]


def _hide_padding(allowed: Tensor) -> Tensor:
    """A mask `(batch, 1, out, in)` in which padding sees itself (XLNet), changed so that nothing sees padding."""
    out, sources = allowed.shape[2:]
    itself = torch.ones(out, sources, dtype=torch.bool, device=allowed.device).tril(sources - out).triu(sources - out)
    by_others = (allowed & ~itself).any(2, keepdim=True)
    of_padding = (allowed == (by_others | itself)).all(-1).all(-1) & by_others.any(-1).any(-1)
    return torch.where(of_padding[..., None, None], by_others, allowed)
