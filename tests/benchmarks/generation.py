"""Print how long the maps of a generated text take. Compare with one forward pass, and with one for each token.

python -m tests.benchmarks.generation                          # gpt2, 512 prompt and 32 new tokens, on this CPU
python -m tests.benchmarks.generation --prompt 128 --new 16 --zeroed 143

"for each token" is the definition that inseq 0.7.1 uses: for each token of the finished text, the whole model runs once
more with the value of this token zeroed in all layers. Each layer hands its clean output on. inseq itself is not
installed. `--zeroed` tokens are zeroed, and the time is multiplied up to all tokens.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from captum_vz import ValueZeroing
from captum_vz.functional import cosine_distance
from captum_vz.generation import attribute_generation
from tests.benchmarks.measure import medians

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
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    busy = medians(
        contenders(options.prompt, options.new, options.zeroed), options.rounds, "cpu", time.process_time
    )  # the seconds of all threads, which hold for a busy machine, too
    busy["definition"] *= (options.prompt + options.new - 1) / options.zeroed
    print(f"{'':12}{'CPU seconds':>13}{'/ forward':>11}{'definition /':>14}")
    for name, seconds in busy.items():
        print(f"{name:12}{seconds:13.2f}{seconds / busy['forward']:11.1f}{busy['definition'] / seconds:14.1f}")


def contenders(prompt: int, new: int, zeroed: int) -> dict[str, Callable[[], Any]]:
    """What is compared: a forward pass, rows of Value Zeroing, and the definition for `zeroed` tokens."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = GPT2LMHeadModel(GPT2Config(use_cache=False)).eval().requires_grad_(False)
        ids = torch.randint(1, WORDS, (1, prompt + new))
    words = Tokenizer(models.WordLevel({"[UNK]": 0, **{f"w{i}": i for i in range(1, WORDS)}}, unk_token="[UNK]"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]")
    text = ids[:, :-1]  # the last new token is no input of any prediction

    return {
        "forward": lambda: model(text),
        "rows": lambda: attribute_generation((model, tokenizer), ids, ValueZeroing, prompt_length=prompt),
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


def _first(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


if __name__ == "__main__":
    main()
