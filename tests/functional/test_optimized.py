"""The refusals of `captum_vz.functional` hold under ``python -O``, which removes `assert` statements."""

import subprocess
import sys

REFUSED_CALLS = [
    "cosine_distance(ones(4, 7), ones(4, 1))",
    "get_distance('l2')",
    "token_scores(ones(2, 3))",
    "token_scores((ones(2, 3, 4),))",
    "token_scores(ones(2, 3, 4), 'mean')",
    "add_residual(ones(1, 3, 3), 0.7)",
    "add_residual(ones(2, 3, 4), 0.5)",
    "rollout([])",
    "rollout([ones(1, 3, 3), ones(2, 3, 3)])",
    "receptive_fields([])",
    "receptive_fields([ones(1, 3, 3), ones(2, 3, 3)])",
    "encoder_decoder_rollout(None, [])",
    "encoder_decoder_rollout(ones(1, 1, 1), [ones(1, 1, 3)])",
    "attention_flow([])",
    "attention_flow([ones(1, 3, 3), ones(1, 2, 2)])",
    "attention_flow([-ones(1, 3, 3)])",
    "attention_flow([ones(1, 3, 3)], rows=[3])",
    "pool_groups(ones(1, 2, 2), torch.tensor([[0, 1]]), 'median')",
    "pool_groups(ones(1, 2, 3), torch.tensor([[0, 1, 2]]))",
    "pool_groups(ones(2, 2, 2), torch.zeros(3, 2, dtype=torch.long))",
    "pool_groups(ones(1, 2, 2), torch.zeros(1, 2))",
    "pool_groups(torch.tensor([[0.1, 0.9]]), torch.tensor([[0, 0]]))",
    "head_vectors(ones(1, 2, 3, 4), ones(12, 5))",
    "alti_contributions(ones(1, 1, 2), ones(1, 2), p=3)",
    "alti_contributions(ones(1, 3, 2), ones(3, 2))",
    "logit_contributions([], [])",
    "logit_contributions([ones(1, 1, 2)], [])",
]
PROGRAM = """
import sys
import torch
from torch import ones
from captum_vz.errors import ArgumentError
from captum_vz.functional import *
from captum_vz.functional.scores import get_distance

assert False, "this program must run without assert statements"
for call in sys.argv[1:]:
    try:
        result = eval(call)
    except ArgumentError:
        continue
    print(call, "returned", result)
"""


def test_refusals_without_assert_statements() -> None:
    command = [sys.executable, "-O", "-c", PROGRAM, *REFUSED_CALLS]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
