"""ALTI-Logit (Ferrando et al., ACL 2023)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from captum_vz.attr._call import ForwardPassAttribution, logged, warn
from captum_vz.attr._call.arguments import Arguments, Inputs, by_input
from captum_vz.attr._call.target import PADDED_TARGET, WantedTokens
from captum_vz.attr._logit_updates import LayerTerms, LogitTarget, LogitTerms, LogitUpdates, Readout
from captum_vz.attr.layer_alti import check_order
from captum_vz.errors import ArgumentError
from captum_vz.functional import logit_contributions


class ALTILogit(ForwardPassAttribution):
    r"""How much each input token adds to the logit of a vocabulary entry at each output *token*, through attention.

    .. math:: \Delta^l_{tk} = U_w \cdot g\big(N^l_{tk}\big), \qquad
        r_{tj} = \textstyle\sum_l \sum_k \Delta^l_{tk}\, R_{l-1,kj}

    where :math:`N^l_{tk}` is the vector that the attention of layer l adds to the residual stream at token t for source
    k (:class:`~captum_vz.LayerAttentionNorm`). g is the final norm with its deviation in the clean pass. :math:`U_w` is
    the entry's row of the unembedding. :math:`R` is the rollout of ALTI's maps (:class:`~captum_vz.ALTI`), with
    :math:`R_{-1} = I`. `Ferrando et al. 2023 <https://aclanthology.org/2023.acl-long.301>`_, section 3. The model must
    be a decoder only, with a norm before each attention (pre-norm: GPT-2, LLaMA). Other models are refused.

    `target` is `(token, entry)`: a position of the logits and a vocabulary entry. The logits at a position predict the
    *next* token. With `foil`, the difference of two logits is explained ("why target rather than foil?"). The final
    norm and the unembedding must reproduce the model's own logits. Scores are signed. A row sums to the part of the
    logit that attention adds. :meth:`terms` returns all terms of the logit.

    Args:
        forward_func, layer, device_ids: See :class:`~captum_vz.attr.LayerMaps`. The output is logits `(batch, tokens,
            entries)`, or an object that has such a tensor as `logits`. All layers of the model are needed.
        p: The order of the norm in ALTI's maps, 1 (the paper's choice) or 2.
        final_norm: The norm after the last layer. None: the last norm of `forward_func` outside of the layers.
        unembedding: The linear module that returns the logits. None: `forward_func.get_output_embeddings()`.

    >>> import torch
    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> from captum_vz import ALTILogit
    >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=8)).eval()
    >>> ids = torch.tensor([[5, 6, 7, 8]])
    >>> method = ALTILogit(model)
    >>> scores = method.attribute(ids, target=(-1, 9), foil=(-1, 10))  # (batch, in)
    >>> scores.shape == ids.shape
    True
    >>> logits = model(ids).logits[:, -1]
    >>> terms = method.terms(ids, target=(-1, 9), foil=(-1, 10))
    >>> torch.allclose(terms.total(), logits[:, 9] - logits[:, 10], atol=1e-5)
    True
    """

    def __init__(
        self,
        forward_func: Callable[..., Any],
        layer: Any = None,
        device_ids: list[int] | None = None,
        *,
        p: Literal[1, 2] = 1,
        final_norm: nn.Module | None = None,
        unembedding: nn.Module | None = None,
    ) -> None:
        super().__init__(forward_func, layer, device_ids)
        check_order(p)
        self.p: Literal[1, 2] = p
        self.final_norm = final_norm
        self.unembedding = unembedding

    @logged
    def attribute(
        self,
        inputs: Inputs,
        target: Any = None,
        additional_forward_args: Any = None,
        feature_mask: Tensor | None = None,
        attribute_to_layer_input: bool = False,
        perturbations_per_eval: int | None = None,
        show_progress: bool = False,
        *,
        foil: Any = None,
    ) -> Any:
        """How much each token adds to the logit at `target`.

        Args:
            inputs: See :meth:`LayerMaps.attribute`.
            target: An index of the logits `(batch, tokens, entries)`: `(token, entry)`, or a list with one such tuple
                for each example. `(slice(None), entry)` returns one row for each token. In a list, `tokens` and
                `entries` may be lists or 1-D tensors of the same length.
            additional_forward_args: Further arguments for `forward_func`.
            feature_mask: Must be None. Scores are additive: sum the scores of the tokens of a feature.
            attribute_to_layer_input: Must be False.
            perturbations_per_eval: Not used.
            show_progress: Whether to show a progress bar, with one step for each layer.
            foil: The index of the logit that is subtracted, in the same form, at the same tokens.

        Returns:
            Signed scores `(batch, in)`, or `(batch, token, in)` with several tokens, in at least float32. A tuple if
            `inputs` is a tuple, see :meth:`ValueZeroingEffect.attribute`. Rows and columns of padding are 0.

        Raises:
            RefusedError: As in :meth:`LayerMaps.attribute`. Entries that the vocabulary lacks. Layers that are not
                pre-norm, or not all layers of the model. Logits that norm and unembedding do not reproduce.
        """
        self._check_layer_input(attribute_to_layer_input)
        if feature_mask is not None:
            raise ArgumentError(f"{type(self).__name__} takes no feature_mask. Sum the columns of each feature.")
        arguments = Arguments(inputs, additional_forward_args, None, perturbations_per_eval, show_progress)
        wanted, maps, steps, scale = self._explain(target, foil, arguments)
        scores = logit_contributions([step.sources for step in steps], maps) * scale[..., None]
        return by_input([wanted.select(scores.to(maps[0].dtype))], inputs)[0]

    def terms(
        self, inputs: Inputs, target: Any = None, additional_forward_args: Any = None, *, foil: Any = None
    ) -> LogitTerms:
        """All terms of the logit at `target`.

        Args:
            inputs: See :meth:`attribute`, which describes all arguments.
            target: The index of the logit that is explained.
            additional_forward_args: Further arguments for `forward_func`.
            foil: The index of the logit that is subtracted.

        Returns:
            The exact terms, which sum to the model's own logit. Terms of padding are 0.

        Raises:
            RefusedError: As in :meth:`attribute`.
        """
        wanted, _, steps, scale = self._explain(target, foil, Arguments(inputs, additional_forward_args))

        def select(value: Tensor) -> Tensor:
            return wanted.select(value[..., None])[..., 0]

        bias = torch.stack([step.projected - step.sources.sum(-1) for step in steps]).sum(0)
        rest = torch.stack([step.output - step.given - step.projected for step in steps]).sum(0)
        return LogitTerms(
            select(steps[0].given * scale),
            [wanted.select(step.sources * scale[..., None]) for step in steps],
            select(bias * scale),
            select(rest * scale),
            select(steps[-1].constant),
        )

    def _explain(
        self, target: Any, foil: Any, arguments: Arguments
    ) -> tuple[WantedTokens, list[Tensor], list[LayerTerms], Tensor]:
        """The wanted rows, ALTI's maps, the layers' terms and the inverse of the final norm's deviation."""
        layers = self._layers()
        targets = [LogitTarget.parse(target)] + ([] if foil is None else [LogitTarget.parse(foil, "foil")])
        wanted = targets[0].rows
        if any(one.rows.rows != wanted.rows for one in targets):
            raise ArgumentError(f"target is {target!r} and foil is {foil!r}: pass the same tokens in both.")
        readout = Readout.of(self.forward_func, layers, self.final_norm, self.unembedding)
        call = LogitUpdates(self.forward_func, self.layer, self.p, readout, targets)
        runs = call._run(WantedTokens(), arguments).maps
        call.check()
        if not call.terms[-1].there.all():
            warn(f"{self.get_name()}: {PADDED_TARGET}.")
        scale = call.terms[-1].scale
        return wanted, [one.to(scale.device) for _, one in runs], call.terms, scale
