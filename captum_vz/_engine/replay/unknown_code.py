"""What runs of a layer of unknown code show: whether all its mixing is read.

Unknown code may use a value once more, outside the attention: subtracted from the output, added to it, convolved, made
into a gate. Some heads may be computed where no tap sees them. The layer runs with a graph of gradients, in which each
attention that is read returns a constant. The graph shows what the values are made of, and other heads. In one more run
with these constants, the values are zeroed where they are projected. If the output changes, something else uses them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from captum_vz._engine.capture.interventions import SiteHandler
from captum_vz._engine.capture.layer_runner import LAYER_ERRORS
from captum_vz._engine.numerics import Weights, inference_mode, is_out_of_memory
from captum_vz._engine.numerics.tolerance import CannotReplayError, fixed_normal, is_reproduced
from captum_vz._engine.structure.modules import is_library_code, once_a_kind
from captum_vz._engine.taps.handler import AttentionCall, AttentionHandler, current_handler
from captum_vz._private import SET_GRADIENTS, softmax_axis, tree_map, without_function_modes
from captum_vz.errors import RefusedError, UnsupportedLayerError

if TYPE_CHECKING:
    from captum_vz._engine.structure import AttentionSite


# Names of a graph's nodes that multiply by a matrix, and of nodes that may belong to an attention.
PRODUCT = re.compile("mm|mv|matmul|linear|convolution", re.IGNORECASE)
ATTENTION = re.compile("(Safe)?Softmax|ScaledDotProduct")
# Parts of messages.
UNTESTED = "so the package cannot check where it uses its values"
INDEPENDENT = "Make forward independent of torch.is_grad_enabled()"
ONE_CALL = "so some heads cannot be read. Compute all by one call of scaled_dot_product_attention on four axes"


def check_unknown_code(site: AttentionSite, values_once: bool = True) -> None:
    """Check that a layer mixes its tokens only in the attention that is read. Library code does.

    With `values_once`, nothing else may use the values of the attention.
    """
    if is_library_code(site.layer):
        return
    problem = once_a_kind(site.layer, (site.attention.calls_before, values_once), _problem, site, values_once)
    if problem is not None:
        raise UnsupportedLayerError(f"The layer {site.layer.name} {problem}, or pass another layer.")


def _problem(site: AttentionSite, values_once: bool) -> str | None:
    """Why the attention does not show all, and what to do. None: it does, or no two runs of the layer agree."""
    if site.attention.inline is not None:  # zeroed where they are projected, and used by the module's own code
        return None
    runner, problem, clean = site.runner(), None, site.layer.first_output
    clean = clean if site.streams is None else site.streams.tokens(clean)
    try:
        with inference_mode(False), torch.enable_grad():
            graph = _Graph(site)
            if is_reproduced(graph.output.detach(), clean):
                problem = _other_use(site, graph, values_once)
            else:
                problem = f"returns other numbers under torch.enable_grad, {UNTESTED}. {INDEPENDENT}"
    except (CannotReplayError, RefusedError, *LAYER_ERRORS) as error:
        if is_out_of_memory(error):
            raise
        problem = f"fails under torch.enable_grad, {UNTESTED}: {str(error).rstrip('.')}. {INDEPENDENT}"
    try:
        steady = problem is None or all(is_reproduced(runner.run(SiteHandler(site.attention)), clean) for _ in range(2))
    except CannotReplayError:
        return None
    return problem if steady else None


class _Graph(AttentionHandler, TorchFunctionMode):
    """A run of a layer with gradients, in which each attention returns a start of the graph.

    Gradients stay on in a layer's own `torch.no_grad()`. `zeroed` says which entries are zeroed of what some functions
    return, by the number of the function.
    """

    def __init__(self, site: AttentionSite, answers: Any = (), zeroed: Mapping[int, Tensor] = {}) -> None:
        super().__init__()
        self.site, self.zeroed = site, zeroed
        # Context and weights of each call of attention. They are computed unless they are given.
        self.answers: list[tuple[Tensor, Weights | None]] = [*answers]
        self.values: list[Tensor] = []
        self.edges: list[GradientEdge | None] = []  # of each result of torch's functions. None: it needs no gradient.
        # What stands for tensors that were made in inference mode, which no graph can hold, by their ids.
        self.clones: dict[int, tuple[Tensor, Tensor]] = {}
        runner = site.runner()
        # Copies are saved, because a layer may write over what is saved. Weights that need no gradients are leaves.
        with saved_tensors_hooks(lambda x: x if x.is_leaf else x.clone(), lambda x: x):
            self.output = runner.run(self, tree_map(_start_of_graph, runner.arguments), around=lambda: self)

    def on_attention(self, call: AttentionCall) -> tuple[Tensor, Weights | None]:
        self.values.append(call.values.clone())  # some modules write into both
        if len(self.values) > len(self.answers):
            with without_function_modes(), torch.no_grad():  # not counted: runs with answers do not compute them
                computed, weights_then = call.compute(call.values)
                self.answers.append((computed.detach().requires_grad_(), weights_then))
        context, weights = self.answers[len(self.values) - 1]
        return context.clone(), weights

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if current_handler() is not self:  # after an error, torch's own code may leave a mode behind
            return func(*args, **(kwargs or {}))
        if func is SET_GRADIENTS:
            return None
        args, kwargs = tree_map(self._in_graph, (args, kwargs or {}))
        result = func(*args, **kwargs)
        if isinstance(result, Tensor):
            if (zeroed := self.zeroed.get(len(self.edges))) is not None:
                result = result.masked_fill(zeroed, 0)
            self.edges.append(None if result.grad_fn is None else get_gradient_edge(result))
        return result

    def _in_graph(self, value: Any) -> Any:
        inference = isinstance(value, Tensor) and value.is_inference()
        return self.clones.setdefault(id(value), (value, value.clone()))[1] if inference else value

    def entries_of(self, values: list[Tensor]) -> dict[int, Tensor]:
        """The entries that values are made of, in what functions return that project them, by the function's number."""
        found: dict[int, Tensor] = {}
        for one in values:
            for node in _ancestors(one.grad_fn, up_to=PRODUCT):
                for number, edge in enumerate(self.edges if PRODUCT.search(node.name()) else ()):
                    if edge is not None and node in _ancestors(edge.node):  # the first one made the node
                        found[number] = _depends(one, edge) | found.get(number, False)
                        break
        return found


def _start_of_graph(value: Any) -> Any:
    """A copy of an argument, which the layer may write into."""
    copied = value.detach().clone() if isinstance(value, Tensor) else value
    return copied.requires_grad_().clone() if isinstance(value, Tensor) and value.is_floating_point() else copied


def _other_use(site: AttentionSite, graph: _Graph, values_once: bool) -> str | None:
    """What leads to the output outside the attention that is read, and what to do. None: nothing that counts."""
    attention = site.attention
    own = slice(attention.calls_before, attention.calls_before + attention.calls)
    values, contexts = graph.values[own], [get_gradient_edge(context).node for context, _ in graph.answers]
    own_contexts, all_contexts = set(contexts[own]), set(contexts)
    if values_once:
        if not all(own_contexts.isdisjoint(_ancestors(one.grad_fn)) for one in values):
            return "uses a context as values, so no value belongs to one token. Pass a layer with one attention"
        if made_of := graph.entries_of(values):
            before, after = (one.output.detach() for one in (graph, _Graph(site, graph.answers, made_of)))
            if not is_reproduced(after, before):
                return "uses its values outside the attention that is read. Use them in this attention alone"
    for node in _ancestors(graph.output.grad_fn):
        if ATTENTION.match(node.name()) and all_contexts.isdisjoint(_ancestors(node)):
            shape = _depends(graph.output, GradientEdge(*node.next_functions[0])).shape
            axis = softmax_axis(node)  # linear attention has one over the tokens of its keys
            over_tokens = axis not in (-1, len(shape) - 1) and shape[axis] == attention.shape.sources
            if over_tokens or shape[-2:] == attention.shape[2:] or "Scaled" in node.name():
                return f"computes another attention, {ONE_CALL}"
    return None


def _ancestors(node: Any, up_to: re.Pattern[str] | None = None) -> Iterator[Any]:
    """A node of a graph, and all that lead to it."""
    left, seen = [node], {None}
    while left:
        node = left.pop()
        if node not in seen:
            seen.add(node)
            yield node
            if up_to is None or not up_to.search(node.name()):
                left.extend(before for before, _ in node.next_functions)


def _depends(x: Tensor, edge: GradientEdge) -> Tensor:
    """On which entries of what a node returned the entries of `x` depend, bool."""
    try:
        found = torch.autograd.grad(x, edge, fixed_normal(x), retain_graph=True, allow_unused=True)[0]
    except NotImplementedError:  # a function on the way has no derivative, so they may depend on all
        return torch.ones((), dtype=torch.bool, device=x.device)
    return torch.zeros((), dtype=torch.bool, device=x.device) if found is None else found.nan_to_num(0) != 0
