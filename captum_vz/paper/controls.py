"""Controls of the methods by random layers and patching, and what holds in all models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pandas as pd

from captum_vz.paper.sections import failed_lines, markdown_table
from captum_vz.study import Example, Method, Study, run_study, sanity_checks, with_interval
from captum_vz.study.figures import draw_sanity, draw_summary, last_layers, metric_title
from captum_vz.testbed import agreement_sentences

if TYPE_CHECKING:
    from collections.abc import Callable

    from matplotlib.figure import Figure
    from pandas import DataFrame

#: The truths that methods are compared with.
TRUTHS: Final = ("value_patching", "value_patching_top", "activation_patching", "activation_patching_top")
#: The size of a mean correlation below which a method passes, with the whole interval.
NEAR_ZERO: Final = 0.2
#: The name of the data of the controls in figures.
GRAMMAR: Final = "the grammar"
#: The number of sentences, if nothing else is asked for.
MOST_CONTROLS: Final = 40


@dataclass(frozen=True)
class Controls:
    """What the controls of all models have found.

    Attributes:
        sanity: As :func:`~captum_vz.study.sanity_checks` gives it, with a column ``model``.
        truth: As :attr:`Study.summary <captum_vz.study.Study.summary>` has it, with the metrics :data:`TRUTHS`.
        truth_differences: The pairs of methods in these metrics.
        truth_skipped: Which sentences have no truth for a method, and why.
        findings: The pairs of methods in all metrics, see :func:`findings`.
        settings: The settings of the studies of the truths, by their models.
    """

    sanity: DataFrame = field(default_factory=pd.DataFrame)
    truth: DataFrame = field(default_factory=pd.DataFrame)
    truth_differences: DataFrame = field(default_factory=pd.DataFrame)
    truth_skipped: DataFrame = field(default_factory=pd.DataFrame)
    findings: DataFrame = field(default_factory=pd.DataFrame)
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @classmethod
    def joined(cls, found: Sequence[tuple[str, DataFrame, Study]], differences: DataFrame) -> Controls:
        """The controls of all models.

        Args:
            found: For each model its name, its sanity checks and its study of the truths.
            differences: The pairs of methods in the metrics of the evaluations.
        """
        if not found:
            return cls(findings=findings(differences))
        studies = [study for _, _, study in found]
        truth_differences = pd.concat([study.differences for study in studies], ignore_index=True)
        return cls(
            pd.concat([checks.assign(model=name) for name, checks, _ in found], ignore_index=True),
            pd.concat([study.summary for study in studies], ignore_index=True),
            truth_differences,
            pd.concat([study.skipped for study in studies], ignore_index=True),
            findings(pd.concat([differences, truth_differences], ignore_index=True)),
            {name: study.settings for name, _, study in found},
        )

    def tables(self) -> dict[str, DataFrame]:
        """The tables by the names of their files; empty ones left out."""
        names = ("sanity", "truth", "truth_differences", "truth_skipped", "findings")
        return {name: table for name in names if len(table := getattr(self, name))}

    def figures(self) -> dict[str, Callable[[], Figure]]:
        """Functions that draw: ``sanity-MODEL`` for each model, and ``truth``."""
        drawn: dict[str, Callable[[], Figure]] = {}
        for model, checks in self.sanity.groupby("model", sort=False) if len(self.sanity) else ():
            drawn[f"sanity-{model}"] = partial(draw_sanity, checks, str(model), GRAMMAR, NEAR_ZERO)
        if len(self.truth):
            drawn["truth"] = partial(draw_summary, self.truth, TRUTHS[0], GRAMMAR)
        return drawn

    def settings_of(self, figure: str) -> list[Mapping[str, Any]]:
        """The settings of the studies whose numbers a figure shows; empty if it shows none of the controls."""
        if figure in ("truth", "page"):
            return list(self.settings.values())
        return [one for model, one in self.settings.items() if figure == f"sanity-{model}"]

    def sections(self, summary: DataFrame) -> list[str]:
        """The report's sections on the controls, and on all models side by side.

        Args:
            summary: The summary of the evaluations.
        """
        return [*self._sanity(), *self._truth(), *self._models(summary)]

    def _sanity(self) -> Iterator[str]:
        if self.sanity.empty:
            return
        yield "## Sanity checks"
        yield (
            "Spearman's correlation of the scores of the last layer with those for copies with random layers, "
            f"{int(self.sanity['examples'].max())} sentences of the grammar: the last layer alone, and all layers at "
            f"once. Near 0 passes: *yes* if the whole interval of the mean is between -{NEAR_ZERO} and {NEAR_ZERO} "
            "when all layers are random, *no* if none of it is, else *open*. Figures show all copies, last layer first."
        )
        yield markdown_table(["method", *_heads(self.sanity["model"].unique())], _sanity_rows(self.sanity))

    def _truth(self) -> Iterator[str]:
        if self.truth.empty:
            return
        whole = self.truth[self.truth["group"] == "all"]
        yield "## A controlled truth: patching from the sentence whose cue has the other number"
        yield (
            "Value patching: a token's truth is the share of the difference of the two forms' logits that is lost if "
            "its value in a layer comes from the other sentence, in all layers up to this one for methods that join "
            "layers. Activation patching: if its state before the layer does, before the first layer for methods that "
            "join layers, where the cue has all of it. Falls below 0 count as 0. *overlap*: the sum of the smaller of "
            "truth and score, which favours rows on few tokens. *largest*: how often the largest score is on the token "
            "with the largest truth. Last layer of methods with layers; `truth.csv` has all layers."
        )
        models = list(whole["model"].unique())
        names = {"value_patching": "values, overlap", "value_patching_top": "values, largest"}
        names |= {"activation_patching": "states, overlap", "activation_patching_top": "states, largest"}
        for model in models:
            yield f"{model}:"
            yield markdown_table(["method", *names.values()], _last_means(whole[whole["model"] == model], list(names)))
            differences = self.truth_differences[self.truth_differences["model"] == model]
            ties = differences.groupby("metric", sort=False)["tied"].agg(["sum", "size"])
            told = "; ".join(f"{names[str(metric)]} {row['sum']} of {row['size']}" for metric, row in ties.iterrows())
            if told:
                few = f"{int(differences['examples'].max()):,} sentences"
                yield f"Pairs that are not shown to differ ({few}): {told}. `truth_differences.csv` has all of them."
        usable = whole.groupby("model", sort=False)["examples"].max()
        yield (
            "Sentences with a truth: "
            + ", ".join(f"{model} {int(count)}" for model, count in usable.items())
            + ". All are of the package's grammar, where each cue has its other number. Other data may differ."
        )
        # Of one method, the reason is the same for all truths.
        skipped = self.truth_skipped.assign(metric=None) if len(self.truth_skipped) else self.truth_skipped
        yield from failed_lines(skipped) if len(skipped) else []

    def _models(self, summary: DataFrame) -> Iterator[str]:
        if summary["model"].nunique() < 2:
            return
        yield "## All models side by side"
        both = pd.concat([summary, self.truth], ignore_index=True) if len(self.truth) else summary
        for title, heads, rows in models_side_by_side(both):
            yield title
            yield markdown_table(heads, rows)
        yield from told_findings(self.findings, summary["model"].nunique())


def control_examples(count: int) -> list[Example]:
    """Sentences of the grammar with the other number of their cue."""
    return [Example.from_record(record) for record in agreement_sentences(count, seed=1)]


def controlled(
    name: str,
    source: tuple[Any, Any],
    methods: Mapping[str, Method],
    folder: Path,
    count: int,
    *,
    batch_size: int,
    confidence: float,
    resamples: int,
    engine: str | None,
    quiet: bool,
) -> tuple[str, DataFrame, Study]:
    """The controls of one model: its name, its sanity checks, and its study of the truths, which continues if killed.

    Args:
        name: The name of the model.
        source: The model and its tokenizer.
        methods: The methods that can explain it.
        folder: Where the study is.
        count: The number of sentences.
        batch_size: See :func:`~captum_vz.study.run_study`, like the four arguments after it.
        confidence: See there.
        resamples: See there.
        engine: See there.
        quiet: See there.
    """
    examples = control_examples(count)
    options: dict[str, Any] = {"batch_size": batch_size, "confidence": confidence, "resamples": resamples}
    study = run_study({name: source}, examples, folder, methods, TRUTHS, engine=engine, quiet=quiet, **options)
    made_of = [study.settings["methods"], list(methods), [one.to_dict() for one in examples], confidence, resamples]

    def check(model: Any, tokenizer: Any) -> DataFrame:
        return sanity_checks(model, tokenizer, examples, methods, **options)

    return name, study.keep("sanity", source, made_of, check), study


def _heads(models: Sequence[str]) -> list[str]:
    return [f"{model}, {what}" for model in models for what in ("last layer", "all layers", "passes")]


def _sanity_rows(sanity: DataFrame) -> list[list[str]]:
    rows = []
    for method, of_method in sanity.groupby("method", sort=False):
        cells = [str(method)]
        for model in sanity["model"].unique():
            copies = of_method[of_method["model"] == model].sort_values("random")
            if copies.empty or copies["mean"].isna().iloc[-1]:
                cells += ["-", "-", "-"]
                continue
            first, last = copies.iloc[0], copies.iloc[-1]
            cells += [f"{first['mean']:.2f}", with_interval(last["mean"], last["low"], last["high"])]
            cells.append(passes(last["low"], last["high"]))
        rows.append(cells)
    return rows


def passes(low: float, high: float) -> str:
    """Whether a correlation is near 0, by its interval. An interval on both sides of :data:`NEAR_ZERO` leaves it open.

    >>> passes(-0.1, 0.1), passes(0.1, 0.3), passes(0.3, 0.5), passes(float("nan"), float("nan"))
    ('yes', 'open', 'no', 'open')
    """
    if max(-low, high) < NEAR_ZERO:
        return "yes"
    return "no" if max(low, -high) > NEAR_ZERO else "open"


def _last_means(summary: DataFrame, metrics: Sequence[str]) -> list[list[str]]:
    columns = {metric: last_layers(summary[summary["metric"] == metric]).set_index("method") for metric in metrics}
    rows = []
    for method in summary["method"].unique():
        cells = [str(method)]
        for metric in metrics:
            known = columns[metric].index == method
            cells += [with_interval(*row) for row in columns[metric].loc[known, ["mean", "low", "high"]].to_numpy()]
            cells += [] if known.any() else ["-"]
        rows.append(cells)
    return rows


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
