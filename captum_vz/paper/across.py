"""All models side by side, and the findings that hold in all of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pandas as pd

from captum_vz.study.figures import last_layers, metric_title

if TYPE_CHECKING:
    from pandas import DataFrame


def findings(differences: DataFrame) -> DataFrame:
    """For each metric and pair of methods, in how many models one is above the other.

    A pair differs in a model by the rule of :attr:`Study.differences <captum_vz.study.Study.differences>`.

    Args:
        differences: The paired differences of all models.

    Returns:
        ``metric``, ``above`` and ``below`` (methods), ``models`` (that have both), ``holds_in`` (where `above` is above
        `below`), ``ties`` and ``turns_in`` (where it is below). `above` is the method that is above in more models;
        pairs without any difference are left out.
    """
    rows = []
    names = ["metric", "one", "other"]
    turned = differences["one"] > differences["other"]  # models may have the methods in another order
    differences = differences.copy()
    differences.loc[turned, ["one", "other"]] = differences.loc[turned, ["other", "one"]].to_numpy()
    differences.loc[turned, "mean"] *= -1
    for (metric, one, other), pair in differences.groupby(names, sort=False) if len(differences) else ():
        differing = pair[~pair["tied"].astype(bool)]
        up, down = int((differing["mean"] > 0).sum()), int((differing["mean"] < 0).sum())
        if up + down:
            above, below = (one, other) if up >= down else (other, one)
            counts = {"models": len(pair), "holds_in": max(up, down), "ties": len(pair) - up - down}
            rows.append({"metric": metric, "above": above, "below": below, **counts, "turns_in": min(up, down)})
    return pd.DataFrame(rows, columns=["metric", "above", "below", "models", "holds_in", "ties", "turns_in"])


def models_side_by_side(summary: DataFrame) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """For each metric a title, heads and rows: the mean of each method in each model, in the last layer.

    Heads have the number of sentences, because the truths are known for fewer than the other metrics.

    Args:
        summary: The summaries of all models.
    """
    whole = summary[summary["group"] == "all"]
    models = list(whole["model"].unique())
    for metric, of_metric in whole.groupby("metric", sort=False):
        columns = {
            model: last_layers(of_metric[of_metric["model"] == model]).set_index("method")["mean"] for model in models
        }
        rows = []
        for method in of_metric["method"].unique():
            means = [columns[model].get(method, float("nan")) for model in models]
            rows.append([str(method), *(f"{mean:.2f}" if mean == mean else "-" for mean in means)])
        counts = of_metric.groupby("model")["examples"].max()
        heads = [f"{model} ({int(counts.get(model, 0)):,} sentences)" for model in models]
        yield f"{metric_title(str(metric))}:", ["method", *heads], rows


def told_findings(found: DataFrame, models: int) -> Iterator[str]:
    """What holds in all models, in Markdown: for each metric the methods that each method is above, and the turns.

    Args:
        found: As :func:`findings` gives it.
        models: How many models there are.
    """
    yield f"## Findings that hold in all {models} models"
    yield (
        "A method is listed before those that it is above in every model, each time by the rule of the paired "
        "comparisons. `findings.csv` has all pairs."
    )
    lines = [] if len(found) else ["No pair of methods differs in any model."]
    for metric, of_metric in found.groupby("metric", sort=False):
        compared = of_metric[of_metric["models"] == models]
        whole = compared[compared["holds_in"] == models]
        turned = compared[compared["turns_in"] > 0]
        counts = f"{len(whole)} pairs hold in all models, {len(turned)} turn over between models."
        lines.append(f"- {metric_title(str(metric))}: {counts}")
        for above, pairs in whole.groupby("above", sort=False):
            lines.append(f"    - {above} > {', '.join(pairs['below'])}")
    yield "\n".join(lines)
