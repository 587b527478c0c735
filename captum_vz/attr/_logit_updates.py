"""The terms that the layers of a decoder add to a logit, for ALTI-Logit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from captum_vz._engine import (
    HALF,
    AttentionBlock,
    AttentionSite,
    CannotReplayError,
    Norm,
    first_module_holding,
    first_tensor,
    in_float32,
    matrix,
    once_a_pass,
    projected_vectors,
    read_norm,
)
from captum_vz.attr._call import as_layers
from captum_vz.attr._call.output import parse_indices
from captum_vz.attr._call.target import Wanted, WantedTokens, gather_rows
from captum_vz.attr.layer_alti import LayerALTI, alti_of_attention
from captum_vz.errors import ArgumentError, UnsupportedLayerError


@dataclass(frozen=True)
class Readout:
    """The logit of vocabulary entry w at hidden state x is `norm.scale(x) * direction_w @ x + constant_w`."""

    norm: Norm
    matrix: Tensor  # the unembedding, `(d, entry)`
    bias: Tensor | None  # of the unembedding, `(entry,)`

    @classmethod
    def of(
        cls,
        forward_func: Callable[..., Any],
        layers: Sequence[nn.Module],
        final_norm: nn.Module | None,
        unembedding: nn.Module | None,
    ) -> Readout:
        """Read the norm and the unembedding. A module that is None is searched for in `forward_func`.

        ArgumentError: a module was not found, or is no norm or no linear module.
        """
        name = type(forward_func).__name__
        if unembedding is None and hasattr(forward_func, "get_output_embeddings"):
            unembedding = forward_func.get_output_embeddings()
        if not isinstance(unembedding, nn.Module):
            raise ArgumentError(
                f"forward_func is a {name} without get_output_embeddings(): pass the linear module of logits as "
                "`unembedding`."
            )
        rows = matrix(unembedding)
        if rows is None:
            weight = type(getattr(unembedding, "weight", None)).__name__
            raise ArgumentError(
                f"unembedding is a {type(unembedding).__name__} whose weight is a {weight}. Pass a linear module with "
                "plain numbers, a dequantised copy."
            )
        norm = final_norm if final_norm is not None else _last_norm(forward_func, layers)
        if not isinstance(norm, nn.Module):
            raise ArgumentError(
                f"forward_func is a {name} without a norm outside of the layers: pass the one after them as "
                "`final_norm`."
            )
        if any(parameter.dtype in HALF for parameter in norm.parameters()):
            norm = in_float32(norm)
        bias = getattr(unembedding, "bias", None)
        probe = rows[:, :4].T.to(next(norm.parameters(), rows))
        try:
            with torch.no_grad():
                return cls(read_norm(norm, probe, norm(probe)), rows.detach(), None if bias is None else bias.detach())
        except (CannotReplayError, RuntimeError) as error:
            raise ArgumentError(
                f"final_norm is a {type(norm).__name__}, which could not be read as a LayerNorm or an RMSNorm of "
                f"{rows.shape[0]} numbers: pass the norm after the last layer. In float64, transformers' RMSNorms "
                "round to float32: load the model in float32."
            ) from error

    def along(self, entries: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return the directions `(..., d)` and constants `(...)` of entries, in the dtype of `like`, on its device."""
        entries = entries.to(self.matrix.device)  # the model may be spread over several devices
        rows, gamma, beta = self.matrix.T[entries].to(like), self.norm.gamma.to(like), self.norm.beta.to(like)
        direction = gamma * rows
        if self.norm.centred:
            direction = direction - direction.mean(-1, keepdim=True)
        constant = rows @ beta
        return direction, constant if self.bias is None else constant + self.bias[entries].to(like)


def _last_norm(forward_func: Any, layers: Sequence[nn.Module]) -> nn.Module | None:
    """Return the last module outside the layers that has an epsilon, as norms do, or None.

    The caller compares logits to verify that this is the final norm.
    """
    if not isinstance(forward_func, nn.Module):
        return None
    inside = {id(module) for layer in layers for module in layer.modules()}
    found = [
        module
        for module in forward_func.modules()
        if id(module) not in inside
        and not any(True for _ in module.children())
        and any("eps" in name and isinstance(value, (float, type(None))) for name, value in vars(module).copy().items())
    ]
    return found[-1] if found else None


class LogitTerms(NamedTuple):
    """The terms that sum to a logit, each `(batch,)`, or `(batch, token)` with several tokens."""

    embedding: Tensor  #: of the first layer's input: the token's embedding, with its position if the model adds one
    attention: list[Tensor]  #: for each layer, of its sources, `(batch, in)` or `(batch, token, in)`
    projection_bias: Tensor  #: of the biases of the attentions' output projections
    feed_forward: Tensor  #: of the feed-forward modules
    constant: Tensor  #: the biases of the final norm and of the unembedding

    def total(self) -> Tensor:
        """The logit, or the difference of two logits."""
        attention = torch.stack([one.sum(-1) for one in self.attention]).sum(0)
        return self.embedding + attention + self.projection_bias + self.feed_forward + self.constant


@dataclass(frozen=True)
class LogitTarget:
    """The positions and vocabulary entries of the logits that are explained."""

    name: str  # "target" or "foil"
    rows: WantedTokens  # the output tokens at which the logits are read
    entries: int | list[int] | list[list[int]]  # for all examples, for each, or a list for each with one for each token

    @classmethod
    def parse(cls, target: Any, name: str = "target") -> LogitTarget:
        """Read `(token, entry)` in Captum's forms. In a list of such tuples, tokens and entries may be lists."""
        indices = parse_indices(target, name)
        each = indices if isinstance(indices, list) else [indices or ()]
        of_all = not isinstance(indices, list)
        if any(len(one) != 2 or not _belong_together(*one, of_all) for one in each):
            raise ArgumentError(
                f"{name} is {target!r}: pass (token, entry), or (slice(None), entry) for all tokens. For several "
                "examples pass a list with one (token, entry), or one ([tokens], [entries]), for each."
            )
        rows, entries = [one[0] for one in each], [one[1] for one in each]
        if of_all:
            return cls(name, WantedTokens(rows[0], name=name), entries[0])
        return cls(name, WantedTokens(rows, name=name), entries)

    def at(self, rows: Tensor, there: Tensor, count: int) -> Tensor:
        """The entries at rows `(batch, row)`. Rows that are not `there` are padding, whose entries are not checked."""
        each = torch.as_tensor(self.entries, device=rows.device)
        each = (each[:, None] if each.dim() == 1 else each).expand_as(rows)
        outside = each[((each < -count) | (each >= count)) & there]
        if len(outside):
            raise ArgumentError(
                f"{self.name} names entry {int(outside[0])}, which is out of range. Pass one of the {count} entries of "
                f"the vocabulary, {-count} to {count - 1}."
            )
        return each % count


def _belong_together(token: Any, entry: Any, of_all: bool) -> bool:
    """Whether there is one entry for each token, or, in an index for all examples, a slice and one entry."""
    if isinstance(entry, list):
        return isinstance(token, list) and len(token) == len(entry) and not of_all
    return isinstance(entry, int) and (isinstance(token, int) or (isinstance(token, slice) and of_all))


@dataclass(frozen=True)
class LayerTerms:
    """Vectors of one layer's run, projected on the directions of the explained entries, at the wanted rows.

    All are `(batch, row)`, and `sources` is `(batch, row, in)`. Values of padding are 0.
    """

    given: Tensor  # the residual stream before the layer
    sources: Tensor  # the vector of each source
    projected: Tensor  # the attention's output: the sum of all sources and the bias
    output: Tensor  # the residual stream after the layer
    scale: Tensor  # the inverse of the final norm's deviation, for the output of this layer
    constant: Tensor  # the biases that the final norm and the unembedding add to the logit
    there: Tensor  # whether each row is a token and not padding

    def to(self, device: torch.device) -> LayerTerms:
        """A copy on another device. The layers of a model may be on several devices."""
        return LayerTerms(**{name: value.to(device) for name, value in vars(self).items()})


class LogitUpdates(LayerALTI):
    """ALTI's maps and the terms that each layer adds to the logits, in one forward pass."""

    def __init__(
        self,
        forward_func: Callable[..., Any],
        layer: Any,
        p: Literal[1, 2],
        readout: Readout,
        targets: list[LogitTarget],
    ) -> None:
        super().__init__(self._keep, layer, p=p)
        self.explained = forward_func
        self.readout = readout
        self.targets = targets
        self.wanted = targets[0].rows
        self.output: Any = None
        self.terms: list[LayerTerms] = []
        self.omitted: list[nn.Module] = []  # modules of the stack before the first given layer

    def _keep(self, *args: Any, **kwargs: Any) -> Any:
        with first_module_holding(as_layers(self.layer), self._look):
            self.output = self.explained(*args, **kwargs)
        return self.output

    def _look(self, model: nn.Module) -> None:
        self.omitted = _before(model, as_layers(self.layer))

    def layer_scores(self, site: AttentionSite, wanted: Wanted) -> Tensor:
        if len(site.layer.attentions) != 1:
            raise UnsupportedLayerError(
                f"The layer {site.layer.name} has a second attention, to an encoder: ALTILogit explains models that "
                "are only a decoder. ALTIPlus explains encoder-decoders."
            )
        block = AttentionBlock(site)
        if block.norm_after() is not None:
            raise UnsupportedLayerError(
                f"The layer {site.layer.name} norms the sum of its residual and its attention's output (post-norm), so "
                "its terms do not sum to the logits. Pass the layers of a decoder with norms before its attention."
            )
        terms = self._terms_of(block)
        self.terms.append(terms.to(self.terms[0].there.device) if self.terms else terms)
        return alti_of_attention(block, wanted, self.p)

    def _terms_of(self, parts: AttentionBlock) -> LayerTerms:
        rows, wide, there, direction, constant = once_a_pass(self._explained, parts.rows, parts.output.dtype)
        at_rows = [x.gather(1, wide) for x in (parts.residual(), parts.projected, parts.output)]
        given, projected, output = (torch.stack(at_rows) * direction).sum(-1).unbind()
        sources, scale = projected_vectors(parts, direction, rows), self.readout.norm.scale(at_rows[-1])
        return LayerTerms(given, sources, projected, output, scale[..., 0], constant, there)

    def _explained(self, real: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """The wanted rows, also for each feature, which are no padding, and direction and constant of their entries.

        Layers whose tokens `real (batch, token)` are the same share them. Direction and constant of padding are 0.
        """
        rows = self.wanted.positions(real.shape[0], real.shape[1], real.device)
        assert rows is not None  # a logit's target names tokens
        there, like = real.gather(1, rows), torch.empty(0, dtype=dtype, device=real.device)
        each = [self.readout.along(one.at(rows, there, self.readout.matrix.shape[1]), like) for one in self.targets]
        both = zip(*each, strict=True)
        direction, constant = (one[0] - one[1] if len(one) == 2 else one[0] for one in both)
        wide = rows[..., None].expand_as(direction)
        return rows, wide, there, direction * there[..., None], constant * there

    def check(self) -> None:
        """Refuse layers whose terms do not sum to the model's own logits, because the stack is incomplete."""
        if self.omitted:
            raise ArgumentError(
                f"The stack begins with {len(self.omitted)} layers of type {type(self.omitted[0]).__name__} that are "
                "missing in `layer`. Pass all layers, as captum_vz.find_layers(model) returns them."
            )
        logits = self.output if isinstance(self.output, Tensor) else getattr(self.output, "logits", None)
        logits = first_tensor(self.output) if logits is None else logits
        last, tokens = self.terms[-1], self.terms[-1].sources.shape[2]
        found = tuple(logits.shape) if isinstance(logits, Tensor) else type(self.output).__name__
        if not (isinstance(logits, Tensor) and logits.ndim == 3 and logits.shape[1] == tokens):
            raise ArgumentError(f"forward_func gave {found}. Return logits (batch, {tokens}, entries) of all tokens.")
        batch = len(logits)
        rows = self.wanted.positions(batch, tokens, logits.device)
        assert rows is not None  # a logit's target names tokens
        at_rows = gather_rows(logits, rows)
        there = last.there.to(logits.device)
        own = [at_rows.gather(2, target.at(rows, there, logits.shape[2])[..., None])[..., 0] for target in self.targets]
        expected = (own[0] - own[1] if len(own) == 2 else own[0]) * there
        explained = (last.output * last.scale + last.constant).to(logits.device)
        size = at_rows.abs().amax() * torch.finfo(logits.dtype).eps ** 0.5
        if not ((explained - expected).abs() <= size).all():
            raise UnsupportedLayerError(
                "The last layer's output, normed and unembedded, does not give the model's own logits (they differ by "
                f"{(explained - expected).abs().max().item():.1e}), as in models that scale or cap their logits. Pass "
                "all layers, the norm after the layers as `final_norm`, and the linear module as `unembedding`."
            )
        output, scale, given = (torch.stack([getattr(x, y) for x in self.terms]) for y in ("output", "scale", "given"))
        apart = ((output[:-1] - given[1:]) * scale[:-1]).abs().flatten(1).amax(1).to(size.device)
        for number, fits in enumerate((apart <= size).tolist()):
            if not fits:
                raise ArgumentError(
                    f"The input of layer run {number + 1} is not the output of run {number}. Pass all layers."
                )


def _before(model: nn.Module, layers: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules before the first of `layers`, in the list of modules that holds it."""
    first = layers[0]
    for stack in model.modules():
        if isinstance(stack, (nn.ModuleList, nn.Sequential)) and any(one is first for one in stack):
            before = [one for one in takewhile(lambda one: one is not first, stack) if one not in layers]
            # A Sequential may hold the embedding before its layers.
            return before if isinstance(stack, nn.ModuleList) else [one for one in before if type(one) is type(first)]
    return []
