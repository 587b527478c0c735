"""Print how long the maps of a generated text take. Compare with one forward pass, and with one for each token.

python -m tests.benchmarks.generation                          # gpt2, 512 prompt and 32 new tokens, on this CPU
python -m tests.benchmarks.generation --prompt 128 --new 16 --zeroed 143

"for each token" is the definition that inseq 0.7.1 uses: for each token of the finished text, the whole model runs once
more with the value of this token zeroed in all layers. Each layer hands its clean output on. inseq itself is not
installed. `--zeroed` tokens are zeroed, and the time is multiplied up to all tokens. Ratios are those of CPU seconds.
"""

from __future__ import annotations

import argparse
import multiprocessing
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from captum_vz import ValueZeroing, ValueZeroingRollout
from captum_vz.functional import cosine_distance
from captum_vz.generation import attribute_generation
from tests.benchmarks.measure import medians, peak_bytes

WORDS = 30000  # of the tokenizer


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.generation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--zeroed", type=int, default=16, help="tokens that the definition zeroes (default: 16)")
    parser.add_argument("--rollout", action="store_true", help="time the rollout, too, which needs whole maps")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    size = options.prompt, options.new, options.zeroed, options.threads
    total = options.prompt + options.new - 1
    runs = contenders(*size)
    if not options.rollout:
        del runs["rollout"]
    results: dict[str, Any] = {}
    work: dict[str, list[float]] = {name: [] for name in runs}
    seconds = medians(
        {name: partial(_timed, run, work[name], results, name) for name, run in runs.items()}, options.rounds, "cpu"
    )
    busy = {name: statistics.median(spent[1:]) for name, spent in work.items()}  # without the first, which warms up
    for times in (seconds, busy):
        times["definition"] *= total / options.zeroed
    print(
        f"torch {torch.__version__}, {platform.processor() or platform.machine()}, {options.threads} threads; gpt2, "
        f"{options.prompt} prompt and {options.new} new tokens; median of {options.rounds} rounds; the definition's "
        f"time is that of {options.zeroed} tokens, times {total / options.zeroed:.1f}; largest difference of the "
        f"scores {difference(results['rows'], results['definition'], options.prompt, options.zeroed):.0e}"
    )
    print(f"{'':12}{'seconds':>10}{'CPU seconds':>13}{'/ forward':>11}{'definition /':>14}{'peak MB':>9}")
    for name in runs:
        # In a process of its own, because memory that an earlier run freed may be used again.
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            peak = pool.apply(memory, (name, *size))
        print(
            f"{name:12}{seconds[name]:10.2f}{busy[name]:13.2f}{busy[name] / busy['forward']:11.1f}"
            f"{busy['definition'] / busy[name]:14.1f}{'unknown' if peak is None else f'{peak / 1e6:.0f}':>9}",
            flush=True,
        )


def contenders(prompt: int, new: int, zeroed: int, threads: int) -> dict[str, Callable[[], Any]]:
    """What is compared: a forward pass, rows of Value Zeroing, its rollout, and the definition for `zeroed` tokens."""
    torch.set_num_threads(threads)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = GPT2LMHeadModel(GPT2Config(use_cache=False)).eval().requires_grad_(False)
        ids = torch.randint(1, WORDS, (1, prompt + new))
    words = Tokenizer(models.WordLevel({"[UNK]": 0, **{f"w{i}": i for i in range(1, WORDS)}}, unk_token="[UNK]"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]")
    text = ids[:, :-1]  # the last new token is no input of any prediction

    def attribute(method: Any) -> Any:
        return attribute_generation((model, tokenizer), ids, method, prompt_length=prompt)

    return {
        "forward": lambda: model(text),
        "rows": lambda: attribute(ValueZeroing),
        "rollout": lambda: attribute(ValueZeroingRollout),
        "definition": lambda: definition(model, text, torch.linspace(0, text.shape[1] - 1, zeroed).long().tolist()),
    }


def definition(model: GPT2LMHeadModel, ids: Tensor, tokens: list[int]) -> Tensor:
    """The distances `(layers, out, tokens)` of one forward pass for each of `tokens`, zeroed in all layers at once."""
    clean: list[Tensor] = []
    distances: list[Tensor] = []
    blocks: list[Any] = list(model.transformer.h)

    def keep(module: Any, args: Any, output: Any) -> None:
        clean.append(_first(output))

    handles = [block.register_forward_hook(keep) for block in blocks]
    model(ids)
    for handle in handles:
        handle.remove()
    for token in tokens:

        def zero(module: Any, args: Any, output: Tensor, token: int = token) -> Tensor:
            output = output.clone()
            output[:, token, -model.config.n_embd :] = 0
            return output

        def hand_on(index: int) -> Callable[[Any, Any, Any], Any]:
            def hook(module: Any, args: Any, output: Any) -> Any:
                distances.append(cosine_distance(_first(output), clean[index])[0])
                return clean[index] if isinstance(output, Tensor) else (clean[index], *output[1:])

            return hook

        handles = [block.attn.c_attn.register_forward_hook(zero) for block in blocks]
        handles += [block.register_forward_hook(hand_on(index)) for index, block in enumerate(blocks)]
        model(ids)
        for handle in handles:
            handle.remove()
    return torch.stack(distances).unflatten(0, (len(tokens), len(blocks))).permute(1, 2, 0)


def difference(ours: Any, theirs: Tensor, prompt: int, zeroed: int) -> float:
    """The largest difference of both ways, in shares of a row, for the tokens that the definition zeroes."""
    scores = torch.cat([ours.scores, ours.prefix], dim=1).permute(2, 0, 1)  # (layers, new, all tokens)
    chosen = scores[..., torch.linspace(0, scores.shape[-1] - 2, zeroed).long()]
    theirs = theirs[:, prompt - 1 :]
    # Rows of the definition are divided by the sum over all tokens, of which some are not zeroed here.
    scale = (chosen * theirs).sum(-1, keepdim=True) / theirs.square().sum(-1, keepdim=True)
    return float((chosen - scale * theirs).abs().max())


def memory(name: str, prompt: int, new: int, zeroed: int, threads: int) -> int | None:
    """Peak bytes of one contender, beyond the memory in use after a short forward pass."""
    runs = contenders(prompt, new, min(zeroed, 2), threads)
    with torch.no_grad():
        contenders(8, 2, 1, threads)["forward"]()
    return peak_bytes(runs[name], "cpu")


def _timed(run: Callable[[], Any], spent: list[float], results: dict[str, Any], name: str) -> None:
    """Run, keep the result, and note the seconds of all threads. They hold for a busy machine, too."""
    start = time.process_time()
    results[name] = run()
    spent.append(time.process_time() - start)


def _first(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


if __name__ == "__main__":
    main()
