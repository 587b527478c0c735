"""Captum's own methods on tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import signature
from traceback import walk_tb
from typing import Any, Literal

import torch
from captum import attr
from torch import Tensor, nn

from captum_vz._engine import not_finite
from captum_vz._private import input_embeddings
from captum_vz.attr._call import Described, check_forward_func, check_gradients, logged, unwrapped, warn
from captum_vz.attr._call.arguments import ExplainedErrors, unmasked_padding
from captum_vz.attr._call.output import Indices, parse_indices, pick, tensor_of
from captum_vz.errors import ArgumentError, RefusedError
from captum_vz.functional import token_scores

# The baselines of these methods are a distribution that all examples share, not one baseline for each example.
_ONE_EXAMPLE_AT_A_TIME = (attr.GradientShap, attr.LayerGradientShap, attr.DeepLiftShap, attr.LayerDeepLiftShap)


class TokenAttribution(Described, attr.Attribution):
    r"""How much each token contributes to the model's output at `target`, by one of Captum's own methods.

    .. math:: s_j = \textstyle\sum_k a_{jk}, \qquad
        a = \text{method}\big(x \mapsto o_{\text{target}}(x) - o_{\text{foil}}(x)\big), \qquad x_j = E[\text{id}_j]

    A Captum attribution class is applied to the word embeddings :math:`x` of token ids. Examples are integrated
    gradients, saliency, input times gradient, DeepLift, GradientShap, feature ablation, and their layer forms. The
    embeddings are passed as `inputs_embeds`, so the model adds positions and token types itself. The output
    for the embeddings must equal the output for the ids.

    These methods explain an *output*. `target` is a class, or `(token, class)` for logits of each token. DeepLift has
    rules for the activation *modules* of torch.nn only. For other operations (the GELU of transformers, attention),
    DeepLift equals input times gradient.

    Args:
        forward_func: A model, or a function that takes the same keywords: `inputs_embeds`, the other entries of
            `inputs` and, for the check, `input_ids`. The output is logits, or an object with logits as `logits`.
        method: A Captum attribution class, or a function that builds one, such as
            `functools.partial(IntegratedGradients, multiply_by_inputs=False)`.
        tokenizer: The tokenizer, which has the ids of the special tokens.
        layer: For layer methods, the module whose output `(batch, tokens, d)` is explained, such as the word embedding.
        embeddings: The module that embeds token ids. None: `forward_func.get_input_embeddings()`.
        objective: A function of the model's output to explain instead of logits. It returns `(batch,)`, or `(batch,
            classes)` to be indexed by `target`. A method may run many copies of the batch at once.
        reduce: "sum" (signed), "l1" or "l2", see :func:`~captum_vz.token_scores`.

    >>> from captum.attr import IntegratedGradients
    >>> from captum_vz import TokenAttribution
    >>> from captum_vz.testbed import load_model
    >>> model, tokenizer = load_model()
    >>> inputs = tokenizer("the pictures of some hat [MASK] scaring marcus.", return_tensors="pt")
    >>> right, wrong = tokenizer.convert_tokens_to_ids(["are", "is"])
    >>> method = TokenAttribution(model, IntegratedGradients, tokenizer)
    >>> scores = method.attribute(inputs, target=(6, right), foil=(6, wrong), baselines="mask")
    >>> scores.shape == inputs["input_ids"].shape, inputs.tokens()[scores.argmax()]
    (True, 'pictures')
    """

    def __init__(
        self,
        forward_func: Callable[..., Any],
        method: Callable[..., attr.Attribution],
        tokenizer: Any,
        layer: nn.Module | None = None,
        *,
        embeddings: nn.Module | None = None,
        objective: Callable[[Any], Tensor] | None = None,
        reduce: Literal["sum", "l1", "l2"] = "sum",
    ) -> None:
        """See the class for the arguments."""
        super().__init__(forward_func)
        self.method = method
        self.tokenizer = tokenizer
        self.layer = layer
        self.embeddings = embeddings
        self.objective = objective
        self.reduce = reduce

    @logged
    def attribute(
        self,
        inputs: Tensor | Mapping[str, Any],
        target: Any = None,
        *,
        foil: Any = None,
        baselines: Literal["pad", "mask", "zero", "mean"] | float | Tensor = "pad",
        **options: Any,
    ) -> Tensor:
        """How much each token contributes to the output at `target`.

        Gradients are computed also inside `torch.no_grad`. The model is unchanged after the call.

        Args:
            inputs: Token ids `(batch, tokens)`, or a mapping that holds them as `input_ids`, such as a tokenizer's
                output.
            target: An index into the output of `forward_func`, in any of Captum's forms. It is a class of logits
                `(batch, classes)`, or `(token, class)` of logits `(batch, tokens, classes)`. A list or tensor has one
                index for each example. None: the output is one number for each example.
            foil: The index of the number that is subtracted, in the same forms ("why target rather than foil?").
            baselines: The replacement of an absent token, for methods with baselines: "pad" or "mask" (the embedding of
                this token), "zero" (a zero vector), "mean" (the mean of all word vectors), or token ids `(1 or batch,
                tokens)`. With a name, special tokens (CLS, SEP, BOS, EOS, padding) keep their embeddings. Methods that
                compare with the baseline then give special tokens the score 0. A number, as in Captum: each entry of
                the vectors of all tokens, special ones too; 0 for zero vectors.
            options: Further arguments for the method's own `attribute`, such as `n_steps`. Integrated gradients run all
                steps of all examples at once. For large batches pass `internal_batch_size`. Occlusion replaces one
                token at a time, unless `sliding_window_shapes=(tokens, d)` is passed.

        Returns:
            `(batch, tokens)`, the shape of the ids, in at least float32. 0 at padding. Rows are not normalised. With
            `reduce="sum"`, rows of integrated gradients and DeepLift sum to the output minus the baseline's output.

        Raises:
            RefusedError: Wrong arguments. Inference mode. A model in train mode. A model whose output differs between
                embeddings and ids. An output of another shape than described.
        """
        check_gradients(self.get_name(), self.forward_func)
        if not callable(self.method):
            raise ArgumentError(f"method is a {type(self.method).__name__} object: pass its class.")
        if options.get("return_convergence_delta"):
            raise ArgumentError("Leave return_convergence_delta out: compare the sum of a row with the output.")
        self._check_layer()
        check_forward_func(self.forward_func, ())
        named = dict(inputs) if isinstance(inputs, Mapping) else {"input_ids": inputs}
        ids = named.pop("input_ids", None)
        if not (isinstance(ids, Tensor) and ids.ndim == 2 and not ids.is_floating_point() and ids.numel()):
            shown = f"{ids.dtype} {tuple(ids.shape)}" if isinstance(ids, Tensor) else f"of type {type(ids).__name__}"
            raise ArgumentError(f"The token ids in inputs are {shown}: pass integers (batch, tokens).")
        if self.objective is not None and foil is not None:
            raise ArgumentError("The objective defines the number, so foil has no meaning: subtract it there.")
        indices, other = parse_indices(target), parse_indices(foil, "foil")
        run = EmbeddingObjective(self.forward_func, self.objective, named, len(ids))
        words = self._words()
        with torch.enable_grad(), ExplainedErrors(ids):
            embedded = words(ids).detach()
            run.check(ids, embedded, indices, other)
            reference = self._baselines(baselines, ids, embedded, words).detach()
            scores = self._scores(run, embedded, reference, indices, _one_each(other, ids), options)
        attended = named.get("attention_mask")
        if isinstance(attended, Tensor) and attended.shape == ids.shape:
            scores = scores.masked_fill(attended.to(scores.device) == 0, 0)
        elif attended is None and (found := unmasked_padding(ids, getattr(self.forward_func, "config", None))):
            warn(f"{self.get_name()}: {found[0]}.")
        return scores

    def _scores(
        self,
        run: EmbeddingObjective,
        embedded: Tensor,
        reference: Tensor,
        target: Indices,
        foil: Tensor | None,
        options: dict[str, Any],
    ) -> Tensor:
        # Embeddings are given to the model, so the word embedding does not run. `run.words` has its output.
        layer = run.words if self.layer is not None and self.layer is self._words() else self.layer
        method = self.method(run) if layer is None else self.method(run, layer)
        if isinstance(method, attr.FeaturePermutation) and len(embedded) == 1:
            raise ArgumentError(f"{type(method).__name__} exchanges tokens between examples: pass several examples.")
        if isinstance(method, _ONE_EXAMPLE_AT_A_TIME) and len(embedded) > 1:
            rows = []
            for b in range(len(embedded)):
                one = EmbeddingObjective(run.model, run.objective, run.example(b), 1)
                alone = None if foil is None else foil[b : b + 1]
                chosen = target[b] if isinstance(target, list) else target
                rows.append(self._scores(one, embedded[b : b + 1], reference[b : b + 1], chosen, alone, options))
            return torch.cat(rows)
        takes = signature(method.attribute).parameters
        tokens = torch.arange(embedded.shape[1], device=embedded.device)[None, :, None]
        masks = {name: tokens for name in ("feature_mask", "layer_mask") if name in takes}
        given: dict[str, Any] = {"baselines": reference} if "baselines" in takes else {}
        if layer is run.words and "layer_baselines" in takes:
            given["layer_baselines"] = reference
        windows = "sliding_window_shapes" in takes
        if windows:
            given["sliding_window_shapes"] = (1, embedded.shape[2])
        try:
            found = method.attribute(
                embedded.clone().requires_grad_(),
                target=target,
                additional_forward_args=(*run.batched.values(), foil),
                **given | masks | options,
            )
        except (AssertionError, AttributeError, TypeError) as error:
            if not _raised_by_captum(error):
                raise
            said = str(error).splitlines()[0][:200]
            raise RefusedError(
                f"{type(method).__name__} of Captum does not take this model, or its baselines ({said}). Pass another "
                "class, such as IntegratedGradients."
            ) from error
        shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        if not (isinstance(found, Tensor) and found.ndim == 3 and found.shape[:2] == embedded.shape[:2]):
            raise ArgumentError(
                f"{type(method).__name__} gave {shape}. Pass a method that returns one tensor in the shape of the "
                f"embeddings, ({len(embedded)}, {embedded.shape[1]}, d)."
            )
        if windows and not torch.equal(found, found[..., :1].expand_as(found)):
            raise ArgumentError(f"sliding_window_shapes takes parts of tokens: pass (tokens, {found.shape[2]}).")
        # If a token is one feature, each entry of its vector is the score of the whole token.
        return token_scores((found[..., :1] if masks or windows else found).detach(), self.reduce)

    def _check_layer(self) -> None:
        """Refuse a method of layers without a layer, and a layer that the method does not take."""
        if self.layer is not None and not isinstance(self.layer, nn.Module):
            raise ArgumentError(f"layer is of type {type(self.layer).__name__}: pass one module of the model, or None.")
        method = unwrapped(self.method)
        if isinstance(method, type) and ("layer" in signature(method).parameters) != (self.layer is not None):
            shown = self.layer and type(self.layer).__name__
            raise ArgumentError(f"method is {method.__name__} and layer is {shown}: methods of layers take a layer.")

    def _words(self) -> nn.Module:
        words = input_embeddings(self.forward_func) if self.embeddings is None else self.embeddings
        if not isinstance(words, nn.Module):
            raise ArgumentError(
                f"forward_func is a {type(self.forward_func).__name__} without get_input_embeddings(): pass embeddings."
            )
        return words

    def _baselines(self, baselines: Any, ids: Tensor, embedded: Tensor, words: nn.Module) -> Tensor:
        if isinstance(baselines, Tensor):
            if baselines.is_floating_point() or baselines.shape not in (ids.shape, (1, ids.shape[1])):
                raise ArgumentError(
                    f"baselines is {tuple(baselines.shape)} of {baselines.dtype}: pass token ids {tuple(ids.shape)}."
                )
            return words(baselines.to(ids.device).expand_as(ids))
        if isinstance(baselines, (int, float)) and not isinstance(baselines, bool):
            return torch.full_like(embedded, baselines)
        if baselines not in ("pad", "mask", "zero", "mean"):
            raise ArgumentError(
                f"baselines is {baselines!r}: pass 'pad', 'mask', 'zero', 'mean', a number or token ids."
            )
        special = [getattr(self.tokenizer, f"{name}_token_id", None) for name in ("cls", "sep", "bos", "eos", "pad")]
        kept = torch.isin(ids, ids.new_tensor([number for number in special if number is not None]))
        if baselines == "zero":
            return embedded.masked_fill(~kept[..., None], 0)
        if baselines == "mean":
            return embedded.where(kept[..., None], mean_word_vector(words, ids.device))
        number = getattr(self.tokenizer, f"{baselines}_token_id", None)
        if number is None:
            raise ArgumentError(f"The tokenizer has no {baselines} token: pass baselines='zero', or token ids.")
        return words(ids.where(kept, number))


def mean_word_vector(words: Any, device: torch.device) -> Tensor:
    """The mean of all word vectors, as the model's first layer is given them, `(d,)`."""
    every = torch.arange(words.num_embeddings, device=device).split(8192)  # few at a time: vocabularies are large
    with torch.no_grad():
        sums = [words(some).double().sum(0) for some in every]
        return torch.stack(sums).sum(0).div(words.num_embeddings).to(words(every[0][:1]))


def _raised_by_captum(error: BaseException) -> bool:
    """Whether an error comes from a line of Captum, and not from the model or from this package."""
    *_, (frame, _) = walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__", "")).startswith("captum.")


def _one_each(indices: Indices, ids: Tensor) -> Tensor | None:
    """The indices of each example, `(batch, axis)`. Captum repeats them with the batch."""
    if indices is None:
        return None
    each = indices if isinstance(indices, list) else [indices] * len(ids)
    return torch.tensor(each, device=ids.device)


class EmbeddingObjective(nn.Module):
    """The explained number as a function of embeddings and of the inputs that have a batch dimension."""

    def __init__(self, model: Any, objective: Any, named: dict[str, Any], batch: int) -> None:
        super().__init__()
        self.model = model
        self.words = nn.Identity()  # takes the place of the word embedding, which does not run on embeddings
        self.objective = objective
        # Captum repeats inputs that have a batch dimension when it runs copies of the batch.
        self.batched = {k: v for k, v in named.items() if isinstance(v, Tensor) and v.ndim and len(v) == batch}
        self.fixed = {k: v for k, v in named.items() if k not in self.batched}

    def forward(self, embedded: Tensor, *further: Any) -> Tensor:
        """The explained number of each example. Further inputs are those of the batch, and the foil last."""
        *batched, foil = further
        named = dict(zip(self.batched, batched, strict=True))
        return self.read(self.model(inputs_embeds=self.words(embedded), **named, **self.fixed), foil)

    def example(self, b: int) -> dict[str, Any]:
        """Arguments for one example of the batch."""
        return {k: v[b : b + 1] for k, v in self.batched.items()} | self.fixed

    def read(self, output: Any, foil: Tensor | None) -> Tensor:
        """The output `(batch, ...)` that `target` indexes, minus the entry at `foil (batch, axis)`."""
        if self.objective is not None:
            return self.objective(output)
        found = tensor_of(output)
        if found is None:
            raise ArgumentError(f"forward_func gave a {type(output).__name__} without logits: pass an objective.")
        if foil is None:
            return found
        subtracted = found[(torch.arange(len(found), device=found.device), *foil.unbind(1))]
        return found - subtracted.reshape(-1, *[1] * (found.ndim - 1))

    @torch.no_grad()
    def check(self, ids: Tensor, embedded: Tensor, target: Indices, foil: Indices) -> None:
        """Refuse indices out of range, and a model whose output differs between embeddings and ids."""
        from_ids = self.read(self.model(input_ids=ids, **self.batched, **self.fixed), None)
        picked = pick(from_ids, target)
        if picked.numel() != len(ids):
            raise ArgumentError(
                f"The output is {tuple(from_ids.shape)}, and target {target!r} picks {tuple(picked.shape)} for "
                f"{len(ids)} examples. Pass a class, or (token, class), which picks one number for each example."
            )
        if foil is not None and pick(from_ids, foil, "foil").shape != picked.shape:
            raise ArgumentError(f"foil is {foil!r}: pass one number for each example, as target {target!r} does.")
        # Other tokens may be padding, so only the output at the target is compared.
        from_ids = pick(from_ids, _without_last(target))
        from_embeddings = pick(self(embedded, *self.batched.values(), None), _without_last(target))
        if not from_ids.isfinite().all():
            raise RefusedError(f"forward_func gives {not_finite(from_ids.dtype)}")
        tolerance = torch.finfo(from_ids.dtype).eps ** 0.5 * from_ids.abs().max().clamp_min(1)
        if not ((from_ids - from_embeddings).abs() <= tolerance).all():
            raise RefusedError(
                "forward_func gives another output for inputs_embeds than for input_ids. Some models count positions "
                "from the ids: pass position_ids. Some have dropout left on: call model.eval()."
            )


def _without_last(indices: Indices) -> Indices:
    if isinstance(indices, list):
        return [one[:-1] for one in indices]
    return indices and indices[:-1]
