"""What pictures refuse, and what they say."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure

from captum_vz.errors import ArgumentError
from captum_vz.visualization import (
    draw_audio,
    draw_comparison,
    draw_image,
    draw_maps,
    draw_route,
    draw_row,
    image_grid,
    save_html,
    terminal_text,
)

TWO = ["a", "b"]
ONE = torch.tensor([[0.75, 0.25], [0.5, 0.5]])
IMAGE, SOUND = torch.rand(3, 8, 8), torch.sin(torch.arange(32000) / 20)
ARRAYS: list[Any] = [ONE.numpy()]
maps = partial(draw_maps, [ONE], TWO)
audio = partial(draw_audio, SOUND, sampling_rate=16000)
over = partial(draw_image, image=IMAGE)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: draw_maps([], TWO), "at least one map, got none"),
        (lambda: draw_maps([torch.eye(3)], TWO), r"for the 2 tokens, got \(3, 3\)"),
        (lambda: draw_maps([ONE.expand(4, 2, 2)], TWO), r"a batch \(4, 2, 2\): .* such as scores\[0\], or heads="),
        (lambda: draw_maps(ARRAYS, TWO), "got ndarray"),
        (lambda: draw_maps([ONE / 0], TWO), "got NaN or infinity"),
        (lambda: maps(2), "token 2 is out of range: there are 2 tokens, so pass a position from -2 to 1"),
        (lambda: draw_maps([ONE] * 2, TWO, ax=Figure().subplots()), "ax holds 1 axes, but there are 2 panels"),
        (lambda: maps(scale="log"), "scale is 'log': pass one of 'shared', 'panel', 'root'"),
        (lambda: maps(vmax=float("nan")), "vmax is nan"),
        (lambda: maps(vmax=1, scale="panel"), "pass a positive number with 'shared' or 'root'"),
        (lambda: maps(words=[0, 1, 2]), "words has 3 entries for 2 tokens"),
        (lambda: maps(dim="stop"), "dim is 'stop': pass 'special', or positions"),
        (lambda: maps(drop=[0, 1]), "drop leaves out all tokens"),
        (lambda: maps(0, drop=[0]), r"token 0 \(a\) is marked and left out"),
        (lambda: maps(minus=([torch.eye(1)], ["a"])), "'b' has no partner"),
        (lambda: maps(minus=([ONE] * 2, TWO)), "minus has the maps"),
        (lambda: maps(minus=(ONE,)), r"pass \(maps, tokens\)"),
        (lambda: draw_row([], TWO), "at least one layer, got none"),
        (lambda: draw_row([ONE], TWO), "pass token, the output token"),
        (lambda: draw_row([ONE[0]], TWO, scale="panel"), "pass one of 'shared', 'row', 'root'"),
        (lambda: draw_comparison({}, TWO), "at least one method, got none"),
        (lambda: draw_comparison({"m": ONE[0]}, TWO, truth=torch.rand(3)), r"got \(3,\)"),
        (lambda: draw_route([], TWO, 0), "at least one layer, got none"),
        (lambda: draw_route([-ONE], TWO, 0), "pass maps of shares, whose rows sum to 1"),
        (lambda: draw_route([ONE * 2], TWO, 0), "a sum of up to 2"),
        (lambda: draw_route([ONE], TWO, 0, threshold=0), "threshold is 0"),
        (lambda: draw_audio(torch.rand(2, 9), ONE[0], 16000), r"waveform: Expected scores .*, got a batch \(2, 9\)"),
        (lambda: audio(scores=torch.tensor([float("nan")])), "scores: .* got NaN"),
        (lambda: audio(scores=ONE[0], spans=[(0, 1)]), "2 scores and 1 spans"),
        (lambda: audio(scores=ONE[0, :1], spans=[(1, 9)]), "not inside the sound"),
        (lambda: audio(scores=ONE[0, :1], names=TWO), "1 scores and 2 names"),
        (lambda: image_grid(torch.rand(3, 3), IMAGE), r"row: Expected .* got a batch \(3, 3\)"),
        (lambda: image_grid(torch.rand(4), torch.rand(4, 4)), r"image is \(4, 4\)"),
        (lambda: image_grid(torch.rand(30), torch.rand(3, 7, 100)), r"make no grid .*: pass grid=\(rows, columns\)"),
        (lambda: image_grid(torch.rand(4), IMAGE, grid=(3, 3)), "too few for a grid of 3 by 3"),
        (lambda: over([]), "at least one layer, got none"),
        (lambda: over([torch.eye(17)]), "pass token"),
        (lambda: over([torch.rand(17)], scale="log"), "scale is 'log'"),
        (lambda: save_html([], "page.html"), "at least one record, got none"),
        (lambda: terminal_text(TWO, torch.tensor([1.0, -1]), signed=False), "bars begin at 0: pass signed=True"),
    ],
)
def test_wrong_arguments_of_pictures(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        call()
