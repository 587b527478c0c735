"""What one run of a layer of unknown code shows: random numbers, and other uses of its values.

A value may be used once more: subtracted from the output, added to it, convolved, made into a gate. Some heads may be
computed where no tap sees them. The layer runs with a graph of gradients, in which each attention that is read returns
a constant. A path from the value projection to the output is then another use of it. What gradients do not follow (a
threshold, numpy) shows in a run in which the values are zeroed once the attention has read them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from captum_vz._engine.capture.interventions import SiteHandler
from captum_vz._engine.capture.layer_runner import LAYER_ERRORS, LayerRunner
from captum_vz._engine.capture.module_state import random_states
from captum_vz._engine.numerics.perturbation import binary_digits, fixed_normal
from captum_vz._engine.numerics.tensors import inference_mode
from captum_vz._engine.numerics.tolerance import CannotReplayError, is_reproduced
from captum_vz._engine.replay.trust import is_library_code
from captum_vz._engine.taps.handler import AttentionCall, AttentionHandler
from captum_vz._private import SET_GRADIENTS, storage_id, tree_leaves, tree_map
from captum_vz.errors import RefusedError, UnsupportedLayerError

if TYPE_CHECKING:
    from captum_vz._engine.structure.site import AttentionSite

# Names of a graph's nodes that multiply by a matrix, and of nodes that may belong to an attention.
PRODUCT = re.compile("mm|mv|matmul|linear|convolution", re.IGNORECASE)
ATTENTION = re.compile("(Safe)?Softmax|ScaledDotProduct")


def check_unknown_code(site: AttentionSite, values_once: bool = True) -> None:
    """Check that a layer draws no random numbers, and mixes its tokens only in the attention that is read.

    Library code does neither.

    Args:
        site: The attention that is read.
        values_once: Whether to check as well that nothing else uses its values.
    """
    if is_library_code(site.layer.layer):
        return
    runner, run, before, problem = site.runner(), _Constants(), random_states(), None
    # Copies are saved, because a layer may write over what is saved. Weights that need no gradients are leaves.
    hooks = saved_tensors_hooks(lambda x: x if x.is_leaf else x.clone(), lambda x: x)
    for around in (_KeepGradients, nullcontext):  # a layer may write into its parameters under torch.no_grad
        try:
            with inference_mode(False), torch.enable_grad(), hooks, around():
                run.calls.clear()
                output = runner.run(run, tree_map(_start_of_graph, runner.arguments))
                problem = None if output is None else _other_use(site, run.calls, output, values_once)
            break
        except torch.OutOfMemoryError:
            raise
        except (CannotReplayError, RefusedError, *LAYER_ERRORS) as error:
            if around is nullcontext and isinstance(error, RefusedError):
                raise
    if any(values.is_inference() for values, _ in run.calls):
        problem = "runs in torch.inference_mode, so that nothing shows what it computes"
    # Another thread may draw numbers too, but hardly in both runs.
    if before not in (site.layer.state.random, random_states()):
        raise RefusedError(
            f"The layer {site.layer.name} draws random numbers also in eval mode, so no two runs of it agree. Switch "
            "off what is random in it (stochastic depth, dropout by hand), or pass another layer."
        )
    if problem is not None:
        raise UnsupportedLayerError(
            f"The layer {site.layer.name} {problem} beside the attention that can be read. The "
            "attention shows only some weights, or only some uses of a value. Compute all heads by one call of "
            "torch.nn.functional.scaled_dot_product_attention on (batch, head, token, feature), and use the values "
            "nowhere else, and torch.no_grad in the place of torch.inference_mode. Or pass another layer."
        )


class _Constants(AttentionHandler):
    """Answers each attention with its context, as a start of the graph. `calls` are values and contexts."""

    def __init__(self) -> None:
        self.calls: list[tuple[Tensor, Tensor]] = []

    def on_attention(self, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        with torch.no_grad():
            context, weights = call.compute(call.values)
        self.calls.append((call.values, context.detach()))
        self.calls[-1][1].requires_grad_()
        return self.calls[-1][1].clone(), weights  # some modules write into the context


class _KeepGradients(TorchFunctionMode):
    """Lets a layer's own `torch.no_grad()` switch no gradients off."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return None if func is SET_GRADIENTS else func(*args, **(kwargs or {}))


class _ZeroLater(SiteHandler):
    """Zeroes the memory of the values after their attention has read it, unless it is `kept`."""

    def __init__(self, site: AttentionSite, runner: LayerRunner) -> None:
        super().__init__(site.attention)
        kept = (*site.layer.layer.parameters(), *site.layer.layer.buffers(), *tree_leaves(runner.arguments))
        self.kept = {storage_id(x) for x in kept if isinstance(x, Tensor)}

    def change_call(self, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        answer = call.compute(call.values)
        if self._site_calls == self.attention.calls and storage_id(call.values) not in self.kept:
            call.values.detach().zero_()
        return answer


def _uses_memory(site: AttentionSite) -> bool:
    """Whether the output depends on the memory of the values once the attention has read it."""
    runner = site.runner()
    recorded = site.layer.first_output if site.streams is None else site.output
    zeroed = runner.run(_ZeroLater(site, runner))
    if zeroed is None or is_reproduced(zeroed, recorded):
        return False
    # A layer that returns something else in each run is refused for another reason.
    again, clean = runner.run(_ZeroLater(site, runner)), runner.run(SiteHandler(site.attention))
    return again is not None and is_reproduced(again, zeroed) and clean is not None and is_reproduced(clean, recorded)


def _start_of_graph(value: Any) -> Any:
    """A copy of an argument, which the layer may write into."""
    copied = value.detach().clone() if isinstance(value, Tensor) else value
    return copied.requires_grad_().clone() if isinstance(value, Tensor) and value.is_floating_point() else copied


def _other_use(
    site: AttentionSite, calls: list[tuple[Tensor, Tensor]], output: Tensor, values_once: bool
) -> str | None:
    """What leads to the output beside the attention that is read, in words. None: nothing that counts."""
    attention, reached = site.attention, set(_ancestors(output.grad_fn))
    if attention.inline is not None:  # zeroed where they are projected, and used by the module's own code
        return None
    own = calls[attention.calls_before :][: attention.calls]
    answers = {get_gradient_edge(context).node for _, context in own}
    if values_once and not all(answers.isdisjoint(_ancestors(values.grad_fn)) for values, _ in own):
        return "uses a context as values"
    products = {
        node: values
        for values, _ in own
        for node in _ancestors(values.grad_fn, up_to=PRODUCT)
        if PRODUCT.search(node.name())
    }
    for node, values in products.items():
        edge = GradientEdge(node, 0)
        rows = values.transpose(1, 2).flatten(2)
        if values_once and site.windows is None and _mixes(rows, edge) and _sums(rows, edge):
            return "mixes its projected values"
        if node not in reached:
            continue
        if values_once and (_depends(output, edge) & _depends(values, edge)).any():
            return "uses its values"
        if _mixes(output, edge, attention.tokens_first):
            return "mixes its tokens by other features of its value projection"
    contexts = {get_gradient_edge(context).node for _, context in calls}
    for node in reached:
        if ATTENTION.match(node.name()) and contexts.isdisjoint(_ancestors(node)):
            shape = _depends(output, GradientEdge(*node.next_functions[0])).shape
            if shape[-2:] == attention.shape[2:] or "Scaled" in node.name():
                return "computes another attention"
    return "uses its values" if values_once and products and _uses_memory(site) else None


def _mixes(x: Tensor, edge: GradientEdge, tokens_first: bool = False) -> bool:
    """Whether an entry of what a node returned reaches several tokens of `x`: two tokens differ in some digit."""
    digits = binary_digits(x, tokens_first)
    return any((_depends(x, edge, one) & _depends(x, edge, ~one)).any() for one in digits)


def _sums(x: Tensor, edge: GradientEdge) -> bool:
    """Whether tokens of `x` depend on more entries than they have, as sums do, and copies of a token do not."""
    halves = [half for one in binary_digits(x) for half in (one, ~one)]
    return any(_depends(x, edge, half).sum() > half.sum() * x.shape[-1] for half in halves)


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


def _depends(x: Tensor, edge: GradientEdge, chosen: Tensor | None = None) -> Tensor:
    """On which entries of what a node returned the entries of `x` at chosen positions depend, bool."""
    shares = fixed_normal(x) if chosen is None else fixed_normal(x) * chosen[..., None]
    try:
        found = torch.autograd.grad(x, edge, shares, retain_graph=True, allow_unused=True)[0]
    except NotImplementedError:  # a function on the way has no derivative, so they may depend on all
        return torch.ones((), dtype=torch.bool, device=x.device)
    return torch.zeros((), dtype=torch.bool, device=x.device) if found is None else found.nan_to_num(0) != 0
