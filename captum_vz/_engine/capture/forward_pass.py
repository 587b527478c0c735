"""TODO."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from captum._utils.common import _sort_key_list
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from captum_vz._engine.capture.hooks import layer_hooks, where_it_runs
from captum_vz._engine.capture.module_state import ModuleState
from captum_vz._engine.capture.records import LayerRecord
from captum_vz._engine.numerics.budget import keep_freed_memory
from captum_vz._engine.numerics.matmul import OneDnnLinears
from captum_vz._engine.whole_model.mixing import other_mixing_to_note

# (index of the layer, its result), in the order in which the layers ran.
LayerResults = list[tuple[int, Tensor]]


def run_and_record(
    forward: Callable[[], Any],
    layers: Sequence[nn.Module],
    compute: Callable[[int, LayerRecord], Tensor],
    device_ids: list[int] | None = None,
    replays: bool = False,
) -> LayerResults:
    """Run `forward` and compute `(batch, ...)` from each run of each of `layers`, when it returns.

    With `replays`, which layers are to be run again by, what modules inside of a layer made is kept that long, and
    layers multiply as replays do, faster than torch by default. What runs before the first of them is torch's own to
    the last bit, for it may choose between numbers that are nearly equal (the best queries of a detector).

    Raises:
        AssertionError: A layer was not run, or has dropout switched on.
    """
    for layer in layers:
        refuse_dropout(layer)
    keep_freed_memory()
    runs: LayerResults = []
    replicas: dict[torch.device, LayerResults] = {}
    owners: dict[tuple[torch.device, int], nn.Module] = {}
    lock = threading.Lock()
    gaps = other_mixing_to_note()
    fast = OneDnnLinears(on=False)

    def begin(index: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LayerRecord:
        args, kwargs = where_it_runs(layer, (args, kwargs))
        fast.on = True
        return LayerRecord(layer, args, kwargs, keeps=replays, state=ModuleState(layer, (args, kwargs)))

    def keep(index: int, recording: LayerRecord, output: Any) -> None:
        recording.output = output
        fast.on = False
        with fast.suspended(), recording.state.restored():
            if gaps is not None:
                gaps.note(index, recording)
            result = compute(index, recording)
        with lock:
            if getattr(recording.layer, "_is_replica", False):
                owner = owners.setdefault((result.device, index), recording.layer)
                assert owner is recording.layer, (
                    f"forward_func ran more than one replica of layer {index} on {result.device}, so that the order of "
                    "their shares of the batch is unknown: list each device once in DataParallel's device_ids, and run "
                    "the model once."
                )
                replicas.setdefault(result.device, []).append((index, result))
            else:
                runs.append((index, result))

    with torch.no_grad(), uncompiled(), layer_hooks(layers, begin, keep):
        gains = replays and fast.gain(weight for layer in layers for weight in layer.parameters())
        with fast if gains else nullcontext():
            forward()
    if replicas:
        runs = _join(replicas, device_ids)
    for index, layer in enumerate(layers):
        assert any(index == run for run, _ in runs), (
            f"forward_func did not run layer {index} of {len(layers)}, a {type(layer).__name__}: pass a layer of the "
            "model that forward_func calls, not of a copy, and one that these inputs reach. (Where a model runs "
            "`layer.forward(...)` and not `layer(...)`, as SqueezeBERT does, torch tells no one.)"
        )
    return runs


def uncompiled() -> AbstractContextManager[Any]:
    """Run the original modules where a model was compiled: a compiled layer would be compiled anew with our hooks."""
    if "torch._dynamo" in sys.modules and hasattr(torch.compiler, "set_stance"):
        return torch.compiler.set_stance("force_eager")
    return nullcontext()


def _join(replicas: dict[torch.device, LayerResults], device_ids: list[int] | None) -> LayerResults:
    """Put the shares of a batch, each computed by a replica on its own device, together again."""
    devices = _sort_key_list(list(replicas), device_ids)
    first = devices[0]
    return [
        (shares[0][0], torch.cat([share.to(first) for _, share in shares]))
        for shares in zip(*(replicas[device] for device in devices), strict=True)
    ]


def refuse_dropout(layer: nn.Module) -> None:
    """Dropout would make every run of a layer another one, and the distances noise."""
    for name, module in layer.named_modules():
        if not module.training:
            continue
        rates = {"p": module.p} if isinstance(module, _DropoutNd) else vars(module)
        for key, rate in rates.items():
            active = isinstance(rate, float) and rate > 0 and (key == "p" or "drop" in key)
            assert not active, (
                f"The layer {type(layer).__name__} is in train mode and has dropout "
                f"({name or 'itself'}: {key}={rate}), so that no two runs of it agree. Call model.eval() first."
            )
