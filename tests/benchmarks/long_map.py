"""python -m tests.benchmarks.long_map TOKENS: whole maps of a small GPT-2 with a progress bar, once interrupted before.

Two layers of width 256. Prints the CPU time, the memory beyond a forward pass, and what the interruption leaves.
"""

from __future__ import annotations

import _thread
import sys
import threading
import time

import torch
from transformers import GPT2Config, GPT2Model

from captum_vz import ValueZeroing, find_layers
from tests.benchmarks.long_row import peak


def main(tokens: int) -> None:
    """Interrupt the maps after eight seconds, and then compute them."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = GPT2Model(GPT2Config(n_layer=2, n_embd=256, n_head=4, n_positions=tokens, vocab_size=999)).eval()
    method, ids = ValueZeroing(model, find_layers(model)), torch.randint(999, (1, tokens))
    with torch.no_grad():
        model(ids)
    before, start = peak(), time.time()
    timer = threading.Timer(8, _thread.interrupt_main)
    timer.start()
    try:
        method.attribute(ids, show_progress=True)
        timer.cancel()
    except KeyboardInterrupt:
        hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
        print(f"\ninterrupted after {time.time() - start:.1f} s, {hooks} hooks are left")
    start = time.process_time()
    method.attribute(ids, show_progress=True)
    print(f"\n{tokens} tokens: {time.process_time() - start:.0f} s, {(peak() - before) / 1024:.0f} MB")


if __name__ == "__main__":
    main(int(sys.argv[1]))
