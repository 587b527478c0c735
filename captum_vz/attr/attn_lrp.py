"""AttnLRP, layer-wise relevance propagation for transformers (Achtibat et al., ICML 2024)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from captum.attr import LayerGradientXActivation
from torch import Tensor, nn

from captum_vz._engine import ExplainedTensors, relevance_gradients
from captum_vz._private import tree_leaves, uncompiled
from captum_vz.attr._call import Described, as_list, check_forward_func, check_gradients, logged, warn
from captum_vz.attr._call.arguments import Inputs, bind_forward, check_inputs, token_input, unmasked_padding
from captum_vz.attr._call.output import Question
from captum_vz.errors import ArgumentError
from captum_vz.functional import widen


class AttnLRP(Described, LayerGradientXActivation):
    r"""The relevance of each entry of a layer, or of the input embeddings, for the model's output at `target`.

    .. math:: R = x \odot \tilde\nabla_x \big( o_{\text{target}}(x) - o_{\text{foil}}(x) \big)

    Relevance is gradient times input. These operations have another gradient (`Achtibat et al., ICML 2024
    <https://arxiv.org/abs/2402.05602>`_):

    ================================= ========================== ==============================================
    operation                         gradient                   relevance
    ================================= ========================== ==============================================
    linear layer, sum                 its own                    in proportion to each term
    softmax                           its own                    the first terms of a Taylor series
    product of two activations        half of its own            equal shares for both factors
    nonlinear function of one number  (f(x) - f(0)) / x          passes on
    norm, quotient                    that of a constant scale   passes on to the numerator
    ================================= ========================== ==============================================

    The rules hold for any architecture, because they change the nodes of the graph of gradients. The model runs once,
    forward and backward. The forward pass is as it is. Parameters need no gradients and get none. Gradients are
    computed also inside `torch.no_grad`. A method of another kind for the same question is
    :class:`~captum_vz.ValueZeroingEffect`.

    Relevance is *conserved* by an operation if its inputs have as much relevance as its output. Biases take relevance,
    and so does a function with :math:`f(0) \ne 0`, such as a sigmoid. The rule of the softmax conserves no relevance.
    With `cp_lrp=True`, the relevance of the embeddings sums to the output if there are no biases.

    The explained number is differentiated as it is, so `target` may be any function of the output. The log-probability
    of a word is `target=lambda output: output.logits[:, -1].log_softmax(-1)[:, word]`.

    Args:
        forward_func: A model, or a function that runs it, in one thread.
        layer: The module whose output is explained, or a list of modules. If a module runs several times, its last run
            is explained. None: the output of the word embedding, or the inputs themselves if they are no token ids
            (embeddings, images, sound).
        device_ids: Not used.
        multiply_by_inputs: Whether gradients are multiplied by the entries of the layer. False returns the gradients.
        cp_lrp: Whether attention weights, as all outputs of a softmax, are constants (CP-LRP, `Ali et al. 2022
            <https://proceedings.mlr.press/v162/ali22a.html>`_). Relevance then flows through values alone.
            The gate of a feed-forward network keeps its half, which the authors' package gives to the other factor.

    >>> from captum_vz import AttnLRP
    >>> from captum_vz.functional import token_scores
    >>> from captum_vz.testbed import load_model
    >>> model, tokenizer = load_model()
    >>> inputs = tokenizer("the pictures of some hat [MASK] scaring marcus.", return_tensors="pt")
    >>> right, wrong = tokenizer.convert_tokens_to_ids(["are", "is"])
    >>> relevance = AttnLRP(model).attribute(inputs, target=(6, right), foil=(6, wrong))  # (batch, tokens, d)
    >>> scores = token_scores(relevance)
    >>> scores.shape == inputs["input_ids"].shape, inputs.tokens()[scores.argmax()]
    (True, 'pictures')
    """

    def __init__(
        self,
        forward_func: Callable[..., Any],
        layer: Any = None,
        device_ids: list[int] | None = None,
        multiply_by_inputs: bool = True,
        *,
        cp_lrp: bool = False,
    ) -> None:
        """See the class for the arguments."""
        super().__init__(forward_func, layer, device_ids, multiply_by_inputs)
        self.multiply_by_inputs = multiply_by_inputs
        self.cp_lrp = cp_lrp

    @classmethod
    def get_name(cls) -> str:
        """The name of the method."""
        return "AttnLRP"

    @logged
    def attribute(
        self,
        inputs: Inputs,
        target: Any = None,
        additional_forward_args: Any = None,
        attribute_to_layer_input: bool = False,
        *,
        foil: Any = None,
    ) -> Any:
        """The relevance of each entry for the output at `target`.

        Args:
            inputs: The inputs of `forward_func`. A tensor or a tuple of tensors is passed by position, a mapping (a
                tokenizer's output) by keyword. Dimension 0 is the batch, whose examples must not affect each other.
            target: An index into the output of `forward_func`, in any of Captum's forms: a class, or `(token, entry)`.
                A list or tensor has one index for each example. Or a function that takes the output and returns one
                number for each example. None: the output is one number for each example.
            additional_forward_args: Further arguments for `forward_func`, after `inputs`: a tuple, or one object.
            attribute_to_layer_input: Whether the input of `layer` is explained, and not its output.
            foil: The index of the number that is subtracted, in the same forms ("why target rather than foil?").

        Returns:
            A tensor of the shape of the layer's output, in at least float32, signed and not normalised. `token_scores`
            sums the entries of each token. A tuple if the layer has several outputs. A list if `layer` is a list.

        Raises:
            RefusedError: Wrong arguments. Inference mode. A model in train mode. A layer that does not run, or that the
                output does not depend on. An output that is not finite, or not one number for each example at `target`.
            UnsupportedLayerError: An operation that has no rule, or that a compiled function hides.
        """
        check_gradients(self.get_name(), self.forward_func)
        check_inputs(inputs)
        layers = [] if self.layer is None else as_list(self.layer)
        if not all(isinstance(one, nn.Module) for one in layers) or (self.layer is not None and not layers):
            raise ArgumentError(
                f"layer is of type {type(self.layer).__name__}: pass a module, a list of modules, or None."
            )
        if attribute_to_layer_input and not layers:
            raise ArgumentError("attribute_to_layer_input=True explains the input of a layer, but layer is None.")
        check_forward_func(self.forward_func, layers)
        question = Question.parse(target, foil)
        explained = ExplainedTensors([uncompiled(one) for one in layers], attribute_to_layer_input)
        given = inputs if layers else _begin_at(explained, inputs)
        forward = bind_forward(self.forward_func, given, additional_forward_args)
        leaves = tree_leaves(dict(inputs) if isinstance(inputs, Mapping) else inputs)
        examples = next(len(x) for x in leaves if isinstance(x, Tensor) and x.dim())
        gradients = iter(
            relevance_gradients(
                explained, forward, lambda output: question.read(output, examples).sum(), self.cp_lrp, self.get_name()
            )
        )
        ids = explained.ids
        if ids is not None and not (isinstance(inputs, Mapping) and inputs.get("attention_mask") is not None):
            for found in unmasked_padding(ids, getattr(self.forward_func, "config", None)):
                warn(f"{self.get_name()}: {found}.")
        each = [tuple(self._relevance(x, next(gradients)) for x in tensors) for tensors in explained.tensors.values()]
        answers = [one[0] if len(one) == 1 else one for one in each]
        return answers if isinstance(self.layer, (list, tuple, nn.ModuleList)) else answers[0]

    def _relevance(self, x: Tensor, gradient: Tensor) -> Tensor:
        return widen(gradient) * widen(x.detach()) if self.multiplies_by_inputs else widen(gradient)


def _begin_at(explained: ExplainedTensors, inputs: Inputs) -> Inputs:
    """Explain the embeddings of token ids, or other inputs themselves. Returns the inputs of the pass."""
    named = {str(name): x for name, x in inputs.items()} if isinstance(inputs, Mapping) else {}
    text = token_input(inputs)
    if text is None:
        text = next((x for x in named.values() if isinstance(x, Tensor) and x.is_floating_point()), None)
    if not isinstance(text, Tensor):
        raise ArgumentError("layer is None, but inputs hold neither token ids nor vectors: pass the layer to explain.")
    if not text.is_floating_point():
        explained.ids = text
        return inputs
    leaf = text.detach().clone().requires_grad_()
    explained.tensors[0] = (leaf,)
    if named:
        return {name: leaf if x is text else x for name, x in named.items()}
    return (leaf, *inputs[1:]) if isinstance(inputs, tuple) else leaf
