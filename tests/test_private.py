"""Each private name of other packages does what is expected of it, and stands in one module."""

from __future__ import annotations

import ast
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, BertConfig, BertModel, LlamaConfig, LlamaModel

from captum_vz import _private
from tests.reference.case import BEFORE_5

PACKAGE = Path(_private.__file__).parent
OTHERS = ("captum", "torch", "transformers", "accelerate")


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text("utf-8"))))


def private_imports(path: Path) -> list[str]:
    """The private names that a file imports from other packages."""
    imports = [node for node in nodes_of(path) if isinstance(node, ast.ImportFrom)]
    names = [f"{node.module}.{alias.name}" for node in imports for alias in node.names]
    return [name for name in names if name.startswith(OTHERS) and not name.startswith("captum_vz") and "._" in name]


def private_attributes(path: Path) -> set[str]:
    """The attributes of any object that a file reads or names, as far as they begin with an underscore."""
    nodes = nodes_of(path)
    read = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    named = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return {name for name in read | named if name.startswith("_") and not name.startswith("__")}


def foreign_names(path: Path, own: set[str]) -> set[str]:
    """The private attributes that a file reads, also by `getattr`, and that this package does not define itself."""
    nodes = nodes_of(path)
    read = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    calls = [node for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    named = [call.args[1] for call in calls if call.func.id.endswith("attr") and len(call.args) > 1]  # type: ignore[attr-defined]
    read |= {node.value for node in named if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return {name for name in read - own if name.startswith("_") and not name.endswith("__")}


def own_names() -> set[str]:
    """All names that the package defines: functions, classes, variables, and attributes of `self`."""
    nodes = [node for path in PACKAGE.rglob("*.py") for node in nodes_of(path)]
    own = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    own |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    stored = [node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]
    return own | {node.attr for node in stored if isinstance(node.value, ast.Name) and node.value.id == "self"}


def test_no_other_file_reads_private_names() -> None:
    """Python's own are documented."""
    of_python = {"_asdict", "_exit", "_fields", "_getframe", "_replace"}
    own = own_names()
    found = {
        path.relative_to(PACKAGE).as_posix(): names
        for path in PACKAGE.rglob("*.py")
        if path.name != "_private.py" and (names := foreign_names(path, own) - of_python)
    }
    assert not found


def test_private_names_stand_in_one_module() -> None:
    found = {path.name: names for path in PACKAGE.rglob("*.py") if (names := private_imports(path))}
    assert set(found) == {"_private.py"}
    others = {path: private_attributes(path) for path in PACKAGE.rglob("*.py") if path.name != "_private.py"}
    known = private_attributes(PACKAGE / "_private.py")
    assert {"_parameters", "_attn_implementation_internal", "_C"} <= known
    assert not {path.name: both for path, names in others.items() if (both := names & known)}


def test_every_private_name_is_used() -> None:
    text = "".join(path.read_text() for path in PACKAGE.rglob("*.py") if path.name != "_private.py")
    body = ast.parse((PACKAGE / "_private.py").read_text()).body
    named = {node.name for node in body if isinstance(node, ast.FunctionDef)}
    assigned = [node for node in body if isinstance(node, (ast.Assign, ast.AnnAssign))]
    stored = [one for node in assigned for one in ast.walk(node) if isinstance(one, ast.Name)]
    named |= {one.id for one in stored if isinstance(one.ctx, ast.Store)} - {"__all__"}
    assert not [name for name in {*_private.__all__, *named} if name not in text]


def test_nodes_of_a_graph() -> None:
    x = torch.tensor([2.0], requires_grad=True)
    first, second = x.pow(3), x.exp()
    assert _private.saved_by(first.grad_fn, "exponent") == 3
    assert _private.saved_by(second.grad_fn, "exponent") is None
    leaf = second.grad_fn.next_functions[0][0]  # type: ignore[union-attr]  # it has one
    numbers = [_private.node_number(node) for node in (first.grad_fn, second.grad_fn, leaf)]
    assert numbers == sorted(set(numbers))


def test_builtin_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", None)
    x = torch.randn(1, 1, 3, 4)
    weights = (x @ x.transpose(2, 3) / 2).softmax(-1)
    torch.testing.assert_close(_private.BUILTIN_ATTENTION(x, x, x), weights @ x)


def test_hooks() -> None:
    module, called = nn.Linear(2, 2), []
    hooks = [lambda *given: called.append("pre"), lambda *given: called.append("post")]
    module.register_forward_pre_hook(hooks[0])
    module.register_forward_hook(hooks[1])
    assert [*_private.forward_pre_hooks(module).values(), *_private.forward_hooks(module).values()] == hooks
    handle = module.register_forward_hook(lambda *given: None, with_kwargs=True)
    assert _private.forward_hooks_with_kwargs(module) == [_private.forward_hooks(module)[handle.id]]
    handle.remove()
    copied = _private.without_hooks(module)
    x = torch.ones(1, 2)
    assert torch.equal(copied(x), module(x)) and called == ["pre", "post"]
    assert copied.weight is module.weight and _private.forward_hooks(module)
    assert not _private.forward_hooks(copied) and not _private.forward_pre_hooks(copied)


def test_hooks_of_accelerate() -> None:
    hooks = pytest.importorskip("accelerate.hooks")  # comes with the extra "study"
    module, hook = nn.Linear(2, 2), hooks.ModelHook()
    assert _private.accelerate_hook(module) is None
    hooks.add_hook_to_module(module, hook)
    assert _private.accelerate_hook(module) is hook


def test_names_of_attention_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    size = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    model = LlamaModel(LlamaConfig(**size)).eval()
    own, called = _private.sdpa_of_transformers(), []

    def see(*args: Any, **kwargs: Any) -> Any:
        called.append("sdpa")
        return own(*args, **kwargs)

    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", see)
    for name, calls in [("eager", 0), ("sdpa", 1)]:
        setattr(model.config, _private.ATTENTION_NAME, name)
        model(torch.tensor([[1, 2, 3]]))
        assert model.config._attn_implementation == name and len(called) == calls


def test_axis_of_a_softmax() -> None:
    x = torch.ones(2, 3, 4, requires_grad=True)
    for axis in (0, 1, 2, -1, -2):
        assert _private.softmax_axis(x.softmax(axis).grad_fn) == axis
        assert _private.softmax_axis(torch.ops.aten._safe_softmax(x, axis).grad_fn) == axis
    assert _private.softmax_axis(x.exp().grad_fn) == -1


@pytest.mark.skipif(BEFORE_5, reason="transformers before 5 collects hidden states without hooks")
def test_module_of_hooks_that_collect_states() -> None:
    """Hidden states that were asked for leave hooks on the layers, whose functions are of this module."""
    size = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    model = BertModel(BertConfig(**size)).eval()
    model(torch.tensor([[1, 2, 3]]), output_hidden_states=True)
    hooks = [hook for module in model.modules() for hook in _private.forward_hooks(module).values()]
    assert hooks
    assert {hook.__module__ for hook in hooks} == {_private.OUTPUT_CAPTURING}


def test_operators_of_attention() -> None:
    class Operators(_private.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    x, seen = torch.randn(1, 2, 3, 4), []
    with Operators():
        x.softmax(-1)
        x.double()
        x.transpose(1, 2) @ x.transpose(1, 2).mT
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            torch.nn.functional.scaled_dot_product_attention(x, x, x, torch.ones(3, 3).bool())
    assert set(seen) >= _private.SOFTMAX | _private.COPIES


def test_stance_of_the_compiler() -> None:
    compiled = torch.compile(lambda x: x + 1, backend="eager")
    stance = _private.eager_stance()  # torch.compile has loaded the compiler
    assert stance is not None
    owner, name, value = stance
    assert type(getattr(owner, name)) is type(value)
    runs = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, value)
        compiled = torch.compile(lambda x: x + 1, backend=lambda graph, inputs: runs.append(graph) or graph.forward)
        assert compiled(torch.ones(1)) == 2 and not runs
    assert compiled(torch.ones(1)) == 2 and runs


def test_function_modes_see_gradients_switched() -> None:
    class Keeps(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return None if func is _private.SET_GRADIENTS else func(*args, **(kwargs or {}))

    x = torch.ones(2, requires_grad=True)
    with Keeps(), torch.no_grad():
        assert (2 * x).requires_grad
    with torch.no_grad():
        assert not (2 * x).requires_grad
    assert torch.is_grad_enabled()


def test_batched_is_vmap() -> None:
    x = torch.arange(6.0).view(3, 2)
    for function in (lambda row: row.square().sum(), lambda row: torch.ones(2)):  # the second is not batched
        assert torch.equal(_private.batched(function, x), torch.func.vmap(function)(x))


@pytest.mark.parametrize("outer", [0, 1])
def test_batched_leaves_the_transform(outer: int) -> None:
    """Wherever a signal interrupts it: Python looks for signals when a function begins and after a call of C code."""
    x = torch.arange(6.0).view(3, 2)
    depth = torch._C._functorch.get_dynamic_layer_stack_depth

    def interrupt(moment: int, vectors: Tensor) -> bool:
        seen = 0

        def profile(frame: Any, event: str, _: Any) -> None:
            nonlocal seen
            seen += event in ("call", "c_return")
            if seen == moment:
                raise KeyboardInterrupt

        try:
            sys.setprofile(profile)
            _private.batched(lambda row: row.square(), vectors)
        except KeyboardInterrupt:
            return True
        finally:
            sys.setprofile(None)
        return False

    def moments(vectors: Tensor) -> Tensor:
        moment = 1
        while interrupt(moment, vectors):
            assert depth() == outer, moment
            moment += 1
        assert moment > 7
        return vectors

    torch.func.vmap(moments)(x[None]) if outer else moments(x)
    assert depth() == 0
