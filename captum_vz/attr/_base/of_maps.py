"""What the rollouts share: attributes that are read from `maps`, and the refusal of other mixing."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from captum_vz._private import forward_pre_hooks
from captum_vz.attr._base.map_run import MapRun
from captum_vz.attr._call.arguments import as_layers
from captum_vz.errors import UnsupportedLayerError

OtherMixingRule: TypeAlias = Literal["refuse", "ignore"]


def of_maps(name: str) -> Any:
    """A property that reads and writes the attribute `name` of `maps`."""

    def get(method: Any) -> Any:
        return getattr(method.maps, name)

    def put(method: Any, value: Any) -> None:
        setattr(method.maps, name, value)

    return property(get, put, doc=f"`{name}` of `maps`.")


def refuse_other_mixing(name: str, layer: Any, run: MapRun) -> None:
    """Refuse layers if something other than attention mixes tokens in them or between them, or may do so.

    Args:
        name: The name of the method, in words.
        layer: The layers.
        run: Their maps. If `run.mixing` is None, other mixing was not searched.

    Raises:
        UnsupportedLayerError: There is other mixing, or it is unknown whether there is.
    """
    if run.mixing is None:
        return
    layers = as_layers(layer)
    names = [f"{index} ({type(one).__name__})" for index, one in enumerate(layers)]
    advice = "other_mixing='ignore' to treat it as acting on each token alone"
    # Maps of different shapes, as in an encoder and its decoder, are not multiplied.
    shape = {index: one.shape for index, one in run.maps}
    pairs = [pair for pair in run.mixing.pairs if shape[pair[0]] == shape[pair[1]]]
    if pairs:
        between = _some([f"{names[before]} and {names[after]}" for before, after in pairs])
        hooks = [hook for _, after in pairs for hook in forward_pre_hooks(layers[after]).values()]
        found = _some([getattr(hook, "__qualname__", type(hook).__name__) for hook in hooks])
        cause = f"the forward_pre_hook {found}" if hooks else "a recurrent or convolutional module"
        raise UnsupportedLayerError(
            f"{name} joins layers that follow each other, but something else runs between the layers {between}: the "
            f"input of the second is not the output of the first. No map shows the effect of {cause}, or of an omitted "
            f"layer. Pass all layers, or {advice}."
        )
    mixing = "mix their tokens in another way as well (a recurrent or convolutional module), which no map shows"
    unknown = "do not run on changed inputs, so whether they mix their tokens in another way as well is unknown"
    hooked = "have a forward hook that changes their output and may mix their tokens"
    for indices, what in ((run.mixing.mixers, mixing), (run.mixing.untested, unknown), (run.mixing.hooked, hooked)):
        if indices:
            raise UnsupportedLayerError(
                f"{name} joins maps of attention, but the layers {_some([names[index] for index in indices])} {what}. "
                f"Pass {advice}."
            )


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (" and others" if len(names) > 3 else "")
