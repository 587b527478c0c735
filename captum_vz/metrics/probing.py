"""Probing: how easily can a label be read off a representation, and does cue alignment follow it over layers?"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import isnan, log, log2
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from captum_vz.errors import ArgumentError, needs_extra
from captum_vz.metrics.agreement import describe
from captum_vz.metrics.intervals import check_bootstrap

with needs_extra("captum_vz.metrics", "study"):
    from scipy import stats
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedKFold, cross_val_predict
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

#: The shares of the examples at the end of each block. Each block is coded by a probe trained on the blocks before it.
BOUNDARIES = (0.008, 0.016, 0.032, 0.0625, 0.125, 0.25, 0.5, 1.0)

# Training of the probe, as in the paper.
_EPOCHS, _PATIENCE, _BATCH, _RATE = 15, 5, 128, 1e-3


class DescriptionLength(NamedTuple):
    """The number of bits to send the labels to a receiver who has the representations.

    `summarize(bits)` gives the mean with an interval.
    """

    bits: Tensor  #: the bits of each label, `(examples,)` in float64, in the order of the arguments
    classes: int  #: the number K of classes
    boundaries: tuple[int, ...]  #: the number of coded examples at the end of each block

    @property
    def total(self) -> float:
        """The description length (MDL), in bits."""
        return self.bits.sum().item()

    @property
    def compression(self) -> float:
        """The length of labels sent without representations, n log2 K bits, divided by the description length."""
        return len(self.bits) * log2(self.classes) / self.total


def description_length(
    states: Tensor, labels: Tensor, classes: int | None = None, *, seed: int = 0
) -> DescriptionLength:
    r"""The description length of labels given representations, by online coding with a small probe.

    .. math:: \mathrm{MDL} = n_1 \log_2 K - \sum_{k=1}^{S-1} \sum_{b = n_k + 1}^{n_{k+1}} \log_2 p_k(y_b \mid h_b),
        \qquad \text{compression} = n \log_2 K \,/\, \mathrm{MDL}

    where :math:`p_k` is a probe trained on the first :math:`n_k` examples, see :data:`BOUNDARIES` (`Voita & Titov 2020
    <https://aclanthology.org/2020.emnlp-main.14>`_). The first block is sent by a uniform code.

    `Mohebbi et al. 2023 <https://aclanthology.org/2023.eacl-main.245>`_ use the same probe and training. There are four
    differences. The probe returns logits. Code lengths are in bits. The rate falls linearly over all epochs. The best
    epoch is chosen on a tenth of the examples *already sent*, because a receiver does not have the next block yet.

    Args:
        states: Representations `(examples, d)`, of one layer. It runs on the CPU, in float32.
        labels: Integers `(examples,)` from 0.
        classes: The number K of classes. None: the highest label plus one.
        seed: Determines the order of the examples and the random numbers of training, on which the result depends.

    >>> labels = torch.arange(600) % 2
    >>> states = torch.randn(600, 8, generator=torch.Generator().manual_seed(0)) + 4 * labels[:, None]
    >>> description_length(states, labels).compression > 2
    True
    """
    classes = _check(states, labels, classes)
    ends = [round(share * len(states)) for share in BOUNDARIES]
    if ends[0] < 2 or len(set(ends)) < len(ends):
        raise ArgumentError(
            f"{len(states)} examples make blocks that end at {ends}: the first needs 2. Pass more examples."
        )
    order = torch.randperm(len(states), generator=torch.Generator().manual_seed(seed))
    h, y = states.detach().cpu().float()[order], labels.detach().cpu().long()[order]
    cost = torch.full((len(y),), log2(classes), dtype=torch.float64)
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(seed)
        for coded, end in pairwise(ends):
            probe = _train(h[:coded], y[:coded], classes)
            cost[coded:end] = _nats(probe, h[coded:end], y[coded:end]) / log(2)
    return DescriptionLength(torch.empty_like(cost).scatter_(0, order, cost), classes, tuple(ends))


def linear_probe(states: Tensor, labels: Tensor, *, folds: int = 5, seed: int = 0) -> Tensor:
    """Whether a linear classifier reads each label, trained on the other folds of the examples.

    Logistic regression on standardized states, with scikit-learn's penalty (l2, C = 1), by stratified cross-validation.
    A linear probe shows what is there to be read without a hidden layer. Its accuracy says less about how easily it is
    read than :func:`description_length`, and both need the control of shuffled labels (`Hewitt & Liang 2019
    <https://aclanthology.org/D19-1275>`_).

    Args:
        states: Representations `(examples, d)`, of one layer.
        labels: Integers `(examples,)` from 0.
        folds: The number of parts.
        seed: Determines the parts.

    Returns:
        `(examples,)` in float64: 1 or 0. The mean is the accuracy, `summarize(...)` its interval.

    >>> labels = torch.arange(100) % 2
    >>> states = torch.randn(100, 8, generator=torch.Generator().manual_seed(0)) + 4 * labels[:, None]
    >>> linear_probe(states, labels).mean() > 0.9
    tensor(True)
    """
    _check(states, labels, None)
    rarest = int(labels.bincount()[labels.unique()].min())
    if not 2 <= folds <= rarest:
        raise ArgumentError(
            f"folds is {folds!r}, and the rarest label has {rarest} examples: pass 2 to {rarest} folds."
        )
    classifier = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
    parts = StratifiedKFold(folds, shuffle=True, random_state=seed)
    h, y = states.detach().cpu().double().numpy(), labels.detach().cpu().numpy()
    return torch.from_numpy(cross_val_predict(classifier, h, y, cv=parts) == y).double()


class Correlation(NamedTuple):
    """A rank correlation and its interval."""

    statistic: float  #: Spearman's correlation; NaN if one side is constant
    low: float  #: the lower end of its bootstrap confidence interval over examples; NaN for fewer than two
    high: float  #: the upper end
    examples: int  #: the number of examples
    undefined: int  #: the number of further examples, which have a NaN in some layer
    p: float  #: the share of the orders of the layers whose correlation is at least as high; NaN like `statistic`


def probing_correlation(
    alignment: Tensor,
    compression: Sequence[float] | Tensor,
    confidence: float = 0.95,
    resamples: int = 9999,
    seed: int = 0,
) -> Correlation:
    r"""The rank correlation over layers of cue alignment with the compression of the labels.

    .. math:: \rho = \operatorname{Spearman}_l\big(\tfrac1n \textstyle\sum_b a_{bl},\; c_l\big)

    over layers l, with a percentile bootstrap interval over examples b, resampled in all layers together. The p-value
    is one-sided: all n! orders of the n layers are equally likely. It is exact for up to 8 layers, and from 99,999
    random orders beyond. Of 4 layers, p is never below 1/24, so that it cannot tell many methods apart. After `Mohebbi
    et al. 2023 <https://aclanthology.org/2023.eacl-main.245>`_, section 6.

    Args:
        alignment: Cue alignment of each example in each layer, `(examples, layers)`, as :func:`cue_dot_product` returns
            it.
        compression: The compression given each layer's representations, `(layers,)`, see :func:`description_length`.
        confidence: See :func:`summarize`, like the arguments after it.
        resamples: See there.
        seed: See there.

    >>> import torch
    >>> alignment = torch.tensor([[0.1, 0.2, 0.5], [0.2, 0.3, 0.6]])
    >>> probing_correlation(alignment, [1.1, 1.9, 6.0]).statistic
    1.0
    """
    layers = torch.as_tensor(compression, dtype=torch.float64)
    fits = isinstance(alignment, Tensor) and alignment.ndim == 2 and layers.shape == alignment.shape[1:]
    if not fits or len(layers) < 2:
        raise ArgumentError(
            f"alignment is {describe(alignment)} and compression {tuple(layers.shape)}: pass (examples, layers) and "
            "(layers,), of two layers or more."
        )
    if not layers.isfinite().all():
        raise ArgumentError(f"compression is {layers.tolist()}: pass finite numbers.")
    check_bootstrap(confidence, resamples)
    known = ~alignment.isnan().any(-1)
    values = alignment[known].detach().double().cpu().numpy()
    right = stats.rankdata(layers.numpy())

    def statistic(rows: np.ndarray, axis: int = -1) -> np.ndarray:
        """Spearman of the means of these examples, `(..., examples)` to `(...)`; NaN where one side is constant."""
        left = stats.rankdata(values[rows].mean(axis - 1), axis=-1)
        left, fixed = left - left.mean(-1, keepdims=True), right - right.mean()
        spread = np.sqrt((left**2).sum(-1) * (fixed**2).sum())
        return np.divide((left * fixed).sum(-1), spread, out=np.full_like(spread, np.nan), where=spread > 0)

    def of_orders(ranks: np.ndarray, axis: int = -1) -> Any:
        """The covariance of rows of ranks with the compression, which orders them as the correlation does."""
        return (ranks * (right - right.mean())).sum(axis)

    count, undefined = len(values), len(alignment) - len(values)
    whole = float(statistic(np.arange(count))) if count else float("nan")
    if isnan(whole):
        return Correlation(whole, whole, whole, count, undefined, whole)
    orders = stats.permutation_test(
        (stats.rankdata(values.mean(0)),),
        of_orders,
        permutation_type="pairings",
        vectorized=True,
        n_resamples=99_999,
        alternative="greater",
        rng=np.random.default_rng(seed),
    )
    low = high = float("nan")
    if count > 1:
        drawn = stats.bootstrap(
            (np.arange(count),),
            statistic,
            vectorized=True,
            batch=max(1, 2**20 // values.size),
            confidence_level=confidence,
            n_resamples=resamples,
            method="percentile",
            rng=np.random.default_rng(seed),
        )
        low, high = map(float, drawn.confidence_interval)
    return Correlation(whole, low, high, count, undefined, float(orders.pvalue))


def _train(h: Tensor, y: Tensor, classes: int) -> nn.Module:
    """A probe trained on these examples, from the epoch that was best on a held-out tenth of them."""
    held = max(1, len(h) // 10)
    order = torch.randperm(len(h))
    valid, train = order[:held], order[held:]
    probe = nn.Sequential(
        nn.Dropout(0.2),
        nn.Linear(h.shape[1], 128),
        nn.ReLU(),
        nn.LayerNorm(128),
        nn.Dropout(0.3),
        nn.Linear(128, classes),
    )
    optimizer = torch.optim.AdamW(probe.parameters(), lr=_RATE)
    steps = _EPOCHS * -(-len(train) // _BATCH)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1.0, end_factor=0.0, total_iters=steps)
    lowest, best, waited = float("inf"), probe.state_dict(), 0
    for _ in range(_EPOCHS):
        probe.train()
        for batch in train[torch.randperm(len(train))].split(_BATCH):
            optimizer.zero_grad()
            cross_entropy(probe(h[batch]), y[batch]).backward()
            optimizer.step()
            schedule.step()
        loss = _nats(probe, h[valid], y[valid]).mean().item()
        waited = 0 if loss < lowest else waited + 1
        if loss < lowest:
            lowest, best = loss, {name: value.clone() for name, value in probe.state_dict().items()}
        if waited == _PATIENCE:
            break
    probe.load_state_dict(best)
    return probe


@torch.no_grad()
def _nats(probe: nn.Module, h: Tensor, y: Tensor) -> Tensor:
    """The code length of each label in nats, `(examples,)` in float64."""
    return cross_entropy(probe.eval()(h).double(), y, reduction="none")


def _check(states: Tensor, labels: Tensor, classes: int | None) -> int:
    if not isinstance(states, Tensor) or states.ndim != 2 or not states.is_floating_point():
        raise ArgumentError(f"states is {describe(states)}: pass representations (examples, d).")
    if not isinstance(labels, Tensor) or labels.shape != states.shape[:1] or labels.is_floating_point():
        raise ArgumentError(f"labels is {describe(labels)}: pass {len(states)} integers, one for each row of states.")
    if not states.isfinite().all():
        raise ArgumentError("states holds values that are not finite (NaN or infinity): pass finite representations.")
    highest = int(labels.max())
    classes = highest + 1 if classes is None else classes
    if int(labels.min()) < 0 or highest >= classes or classes < 2:
        raise ArgumentError(
            f"labels run from {int(labels.min())} to {highest}, of {classes} classes: pass integers from 0."
        )
    return classes
