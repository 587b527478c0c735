"""The second hint of each exercise: which step to take, and with which function. No hint holds a number."""

from __future__ import annotations

from typing import Final

HINTS: Final = {
    "attention": "Compute `q @ k.T`, divide by the square root of d, take the softmax over the last axis, multiply "
    "by v.",
    "average_precision": "Go through `scores.unique().flip(0)`. For each threshold, compute the precision and the "
    "recall of all tokens with at least this score. Add up the precision times the growth of the recall.",
    "blank_out": "Make a batch of texts, in which text j has token j replaced: `ids.masked_fill(torch.eye(n).bool(), "
    "replacement)`. Subtract the predictions of these texts from the prediction of `ids`.",
    "copied_from": "Write down one example: what does the decoder write first, and where does this token stand in "
    "the source? Do so for each written token.",
    "cross_map": "For each source token j, compare the decoder layer's outputs with and without the value of j: `1 - "
    "torch.cosine_similarity(without, clean, dim=-1)`. This is column j. Divide each row by its sum.",
    "deletion": "Give each token its place: `values.argsort(dim=1, descending=True).argsort(dim=1)`. For each k, "
    "delete the tokens whose place is below k, and take the mean prediction.",
    "effect": "Compute the number once with all values, and once without the values of token j. The effect of j is "
    "the first minus the second.",
    "found_rate": "Compare `scores.argmax(1)` with the places, keep the examples that count, and take the mean.",
    "frame_centers": "A frame of the first convolution has its center at (kernel - 1) / 2. Each further convolution "
    "adds (kernel - 1) / 2 times the product of the strides before it. Frames are the product of all strides "
    "apart.",
    "generation_slice": "Stack the maps along the last axis. The first generated token is predicted at the last "
    "token of the prompt. Which row is that? Which columns are tokens of the prompt?",
    "hidden_share": "`scores[step, :, layer]` is the row. Add up its entries where the mask hides.",
    "joint_row": "Pass `feature_mask`: tokens with the same number are zeroed together.",
    "kendall": "For each pair of places, take the sign of the difference in both rows. Add up the products of the "
    "signs, and divide by the root of (untied pairs of one row) times (untied pairs of the other).",
    "neighbor_share": "The neighbors of token i stand at `[:, i, i - 1]` and `[:, i, i + 1]`. Add both up for each "
    "word, and take the mean over the words.",
    "pair_share": "The tokens draw on each other at `[:, one, other]` and `[:, other, one]`. Take the mean of both.",
    "patch_token": "Divide row and column by the side of a patch, without remainder. Count the patches row by row. "
    "Which token stands before the first patch?",
    "path_share": "In the map of layer l, take the entry [position after the layer, position before it]. Multiply "
    "the entries of all layers.",
    "place_shares": "Divide each row by its sum. Take the shares at the places: `shares.gather(1, places)`. One mean "
    "is that of the largest, the other that of the sum.",
    "rollout": "Give each map its residual first, if the exercise asks for one: `(map + identity) / 2`. Multiply the "
    "maps with `@`, the map of the last layer on the left.",
    "source_read": "Take the row's largest entry: `map[row].argmax()`.",
    "value_zeroing_map": "For each source j, compare the layer's outputs with and without the value of j: `1 - "
    "torch.cosine_similarity(without, clean, dim=-1)`. This is column j. Divide each row by its sum.",
    "value_zeroing_row": "The distance of two outputs is `1 - torch.cosine_similarity(moved, clean, dim=-1)`, one "
    "number for each source. Divide the distances by their sum.",
    "verified": "Begin with `torch.nn.TransformerEncoder(layer, n).eval()`, with no dropout, and change one thing at "
    "a time.",
}
