"""Freeze maps before a change of the engine, and compare them bit for bit after it.

python -m tests.sweep.golden maps.pt  # writes the file, or compares with it and names what differs

The maps are those of the families, and of every tenth model type of transformers. An error is kept as its class.
"""

from __future__ import annotations

import contextlib
import io
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from captum_vz import ALTI, LayerAttention, LayerAttentionNorm, ValueZeroing, ValueZeroingEffect
from tests.reference import FAMILIES
from tests.sweep.model_type import stacks_of
from tests.sweep.models import small_models, working_inputs

EACH = 10  # one of so many model types


def frozen() -> Iterator[tuple[str, Any]]:
    """The name of each map, and the map or the class of the error in its place."""
    for family in FAMILIES:
        case = FAMILIES[family].build(torch.float32)
        for method in (ValueZeroing, LayerAttention, LayerAttentionNorm, ALTI):
            yield f"{family} {method.__name__}", result(method(case.model, case.layers).attribute, case.inputs)
        row, effect = ValueZeroing(case.model, case.layers), ValueZeroingEffect(case.model, case.layers)
        yield f"{family} row", result(row.attribute, case.inputs, token=1)
        yield f"{family} effect", result(effect.attribute, case.inputs, target=(1, 0))
    for model_type in list(MODEL_MAPPING_NAMES)[::EACH]:
        yield model_type, result(maps_of_type, model_type)


def maps_of_type(model_type: str) -> Any:
    """The maps of each stack of layers in a small model of this type, and a row of each."""
    for model in small_models(model_type):
        inputs, problem = working_inputs(model)
        if problem is None:
            methods = [ValueZeroing(model, layers) for layers in stacks_of(model).values()]
            return [(result(one.attribute, inputs), result(one.attribute, inputs, token=1)) for one in methods]
    return None


def result(call: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    """What a call returns, or the class of its error."""
    torch.manual_seed(0)
    try:
        return call(*args, **keywords)
    except Exception as error:  # a model may raise anything
        return type(error).__name__


def are_equal(one: Any, other: Any) -> bool:
    """Whether two results are equal bit for bit."""
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(are_equal, one, other))
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one.nan_to_num(7), other.nan_to_num(7))
    return bool(type(one) is type(other) and one == other)


def main(path: Path) -> int:
    """Write the maps to a file, or compare them with those of a file."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        found = dict(frozen())
    print(len(found), "results,", sum(not isinstance(one, str) for one in found.values()), "of them maps")
    if not path.exists():
        torch.save(found, path)
        return 0
    before = torch.load(path)
    others = [name for name in {**before, **found} if not are_equal(before.get(name), found.get(name))]
    print(*(f"differs: {name}" for name in others), sep="\n")
    return bool(others)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
