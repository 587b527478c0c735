"""The evaluations of each model: cue alignment, probing, faithfulness and controls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pandas as pd
import torch
from accelerate import PartialState
from torch import Tensor

from captum_vz.errors import ArgumentError
from captum_vz.metrics import BOUNDARIES, description_length, linear_probe, probing_correlation, summarize
from captum_vz.study import (
    BadExampleError,
    Example,
    Scorer,
    Study,
    lacks,
    metric_named,
    run_study,
    safe_name,
    write_whole,
)
from captum_vz.study.folder import digest
from captum_vz.subjects import model_sources
from captum_vz.testbed import agreement_sentences
from paper.report import CHECKS, TRUTHS, Reproduction

if TYPE_CHECKING:
    from pandas import DataFrame

FEWEST: Final = round(2 / BOUNDARIES[0])  #: the fewest examples for the paper's blocks: the first block needs two
SEEDS: Final = (0, 1, 2, 3, 4)  #: the seeds of each layer's probes
FOLDS: Final = 5  #: the parts of the examples for the linear probe; each label needs as many
MOST_CONTROLS: Final = 40  #: the number of sentences of the controls, if nothing else is asked for


def reproduce(
    models: Any,
    examples: Sequence[Example],
    folder: str | Path,
    methods: Any = None,
    *,
    batch_size: int = 32,
    resamples: int = 1999,
    quiet: bool = False,
    about: str = "",
    controls: int | None = 0,
    engine: str | None = None,
    title: str = "",
) -> Reproduction:
    """Cue alignment, probing and faithfulness of all methods with models: the evaluations of the paper.

    - Cue alignment: how much of the target's row lies on the cue, and how well it ranks the cue, in each layer.
    - Probing: how far each layer's state at the target compresses the labels, and its correlation with cue alignment.
    - Faithfulness: the rank correlation of the scores with the effect of blanking out each token on the two forms.

    `Mohebbi et al. 2023 <https://aclanthology.org/2023.eacl-main.245>`_, sections 5 to 7. The folder holds the tables
    as CSV files, the report (``report.md``), figures, and for each model a folder with its study. A killed study
    continues at the next start.

    Arguments are those of :func:`~captum_vz.study.run_study`, and a model that can use no example is refused like what
    that refuses. The examples have a cue, the two forms of the target and, for probing, a label. For a model that does
    not predict words, faithfulness and the methods that explain an output are omitted, and so are methods that refuse a
    model: the report lists them with the reason. It begins with `about`, how the examples were selected. `title` is the
    name of the data in figures. So many sentences of the package's grammar as `controls` are for the sanity checks and
    the truths by patching. None: as many as examples, 40 at most.

    >>> import tempfile
    >>> examples = [Example.from_record(record) for record in agreement_sentences(4)]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     found = reproduce("agreement", examples, folder, ["value-zeroing"], quiet=True)
    >>> print(found)
    ## agreement: 4 sentences, 0 skipped
    ...
    | value-zeroing | 0...
    """
    models = model_sources(models)
    if not models or not examples:
        raise ArgumentError(
            f"models is {list(models)}, and there are {len(examples)} examples: pass at least 1 of each."
        )
    count = min(len(examples), MOST_CONTROLS) if controls is None else controls
    how = {"batch_size": batch_size, "resamples": resamples, "engine": engine, "quiet": quiet}
    parts = []
    for name, source in models.items():
        loaded = source() if callable(source) else source
        part = Part(name, loaded, Path(folder) / safe_name(name), how)
        part.evaluate(examples, methods, count)
        parts.append(part)
    tables = {key: [part.tables[key] for part in parts if key in part.tables] for part in parts for key in part.tables}
    joined = {key: pd.concat(some, ignore_index=True) for key, some in tables.items() if any(map(len, some))}
    repeat = dict.fromkeys(line for part in parts for line in part.study.repeat)
    for part in parts:  # the controls have other sentences; what else they need is said already
        lines = part.truth.repeat if part.truth else []
        repeat |= {f"Sentences of the controls{one[9:]}": None for one in lines if one.startswith("Sentences")}
    order = list(dict.fromkeys(line.split()[0] for line in repeat))  # the lines of all models of one kind together
    found = Reproduction(
        joined,
        about,
        title,
        {part.name: part.study.lines() for part in parts},
        [line for part in parts if part.truth for line in part.truth.lines(list(TRUTHS))],
        tuple(sorted(repeat, key=lambda line: order.index(line.split()[0]))),
        {part.name: part.study.settings for part in parts},
        {part.name: part.truth.settings for part in parts if part.truth},
    )
    state = PartialState()
    if state.is_main_process:
        found.write(Path(folder))
    state.wait_for_everyone()
    return found


class Part:
    """The evaluations of one model: its tables by their names, its study, and the study of its truths."""

    def __init__(self, name: str, source: tuple[Any, Any], folder: Path, how: dict[str, Any]) -> None:
        self.name, self.source, self.folder, self.how = name, source, folder, how
        self.truth: Study | None = None

    def evaluate(self, examples: Sequence[Example], methods: Any, controls: int) -> None:
        """Make the study and all tables, with so many sentences for the controls."""
        name, (model, tokenizer) = self.name, self.source
        if "ElectraForPreTraining" in (type(model).__name__, *(model.config.architectures or ())):
            raise ValueError(
                f"{name!r} is a discriminator of ELECTRA, which detects replaced words and predicts none: pass "
                "the generator it was trained with, such as 'google/electra-base-generator'."
            )
        scorer = Scorer(model, tokenizer, methods, "cue_dot", batch_size=self.how["batch_size"])
        first = _first_usable(name, scorer, examples)
        refused = {row["method"]: row["skipped"] for row in scorer.scores([first]) if row["skipped"]}
        usable = {what: method for what, method in scorer.methods.items() if what not in refused}
        if not usable:
            raise ValueError(f"no method can explain {name!r}: {next(iter(refused.values()))}")
        metrics = ["cue_dot", "cue_ap", "blank_out"]
        if (reason := lacks(metric_named("blank_out"), model, tokenizer)) is not None:
            refused["blank-out"] = reason
            metrics.pop()
        self.study = study = run_study({name: self.source}, examples, self.folder, usable, metrics, **self.how)
        study.check_used()
        tables = {"summary": study.summary, "differences": study.differences, "skipped": study.skipped}
        used = set(study.rows(["example"])["example"])  # the study may hold more than this call passes
        labels = {one: one.label for one in study.examples if one.id in used and one.label is not None}
        if reason := _too_few(labels):
            refused["probing"] = reason
        else:
            tables |= self._probing(labels)
        if controls and "blank_out" in metrics:
            tables |= self._controls(controls, usable)
        tables["omitted"] = pd.DataFrame(refused.items(), columns=["what", "reason"])
        named = {key: table.assign(model=name) for key, table in tables.items()}
        self.tables = {key: table[["model", *table.columns.drop("model")]] for key, table in named.items()}

    def _controls(self, count: int, methods: Mapping[str, Any]) -> dict[str, DataFrame]:
        """The truths by patching, and the sanity checks."""
        examples = [Example.from_record(record) for record in agreement_sentences(count, seed=1)]
        folder, metrics = self.folder / "controls", [*TRUTHS, *CHECKS]
        self.truth = truth = run_study({self.name: self.source}, examples, folder, methods, metrics, **self.how)
        tables = {"truth": truth.summary, "truth_differences": truth.differences, "truth_skipped": truth.skipped}
        last = truth.summary.query("group == 'all'").groupby(["method", "metric"], sort=False).tail(1)
        found = {name: table[~table["metric"].isin(CHECKS)] for name, table in tables.items()}
        return found | {"sanity": last[last["metric"].isin(CHECKS)].drop(columns=["layer", "group", "model"])}

    def _probing(self, labels: Mapping[Example, str]) -> dict[str, DataFrame]:
        """The compression of the labels in each layer, and its correlation with cue alignment."""

        def made() -> DataFrame:
            states = Scorer(*self.source, batch_size=self.how["batch_size"]).target_states(labels)
            return probe(states, list(labels.values()))

        # Other examples may have run out of memory at the last start.
        bits = self._kept("probing", [SEEDS, [example.to_dict() for example in labels]], made)
        probing = compressions(bits, len(set(labels.values())), self.how["resamples"])
        return {"probing": probing, "correlation": _correlations(self.study, probing, self.how["resamples"])}

    def _kept(self, name: str, made_of: list[Any], make: Callable[[], DataFrame]) -> DataFrame:
        """A table in the folder, which is not made again of the same study and things. The first process makes it."""
        of = digest(self.study.settings["provenance"]["results"], made_of)
        path = self.folder / f"{name}-{of[:12]}.csv"
        with PartialState().main_process_first():
            if not path.is_file():
                older, table = list(self.folder.glob(f"{name}-*.csv")), make()
                write_whole(path, table.to_csv(index=False).encode())
                for one in older:
                    one.unlink(missing_ok=True)
        return pd.read_csv(path, dtype={"example": str, "method": str}, keep_default_na=False, na_values=[""])


def _first_usable(name: str, scorer: Scorer, examples: Sequence[Example]) -> Example:
    reason = ""
    for example in examples:
        try:
            scorer.encode(example, needs_cue=True)
            return example
        except BadExampleError as error:
            reason = str(error)
    raise ValueError(f"{name!r} can use none of the {len(examples)} examples: {reason}.")


def _too_few(labels: Mapping[Example, str]) -> str:
    """Why there are too few labels for probes; empty if there are enough."""
    kinds = Counter(labels.values())
    if len(labels) < FEWEST or len(kinds) < 2:
        return f"{len(labels)} sentences have a label, of {len(kinds)} kinds. Pass at least {FEWEST}, of 2 kinds."
    label, count = kinds.most_common()[-1]
    return f"{count} sentences have the label {label!r}. Pass at least {FOLDS} of each." if count < FOLDS else ""


def probe(states: Tensor, labels: Sequence[str]) -> DataFrame:
    """The bits of each label given each layer's states, from several seeds, with a control and a linear probe.

    `states` is `(layers, examples, d)`. The rows have ``layer``, ``place`` (of the example), ``probe``, ``seed`` and
    ``value``: for the probe "labels" bits, see :func:`~captum_vz.metrics.description_length`, for "control" those of
    labels that are shuffled by the seed, for "linear" whether :func:`~captum_vz.metrics.linear_probe` reads the label.
    """
    names = sorted(set(labels))
    numbers = torch.tensor([names.index(label) for label in labels])
    found = []
    for layer, state in enumerate(states):
        values: list[tuple[str, int, Tensor]] = [("linear", 0, linear_probe(state, numbers, folds=FOLDS))]
        for seed in SEEDS:
            order = torch.randperm(len(numbers), generator=torch.Generator().manual_seed(seed))
            for kind, some in (("labels", numbers), ("control", numbers[order])):
                values.append((kind, seed, description_length(state, some, len(names), seed=seed).bits))
        found += [
            pd.DataFrame({"layer": layer, "place": range(len(one)), "probe": kind, "seed": seed, "value": one.numpy()})
            for kind, seed, one in values
        ]
    return pd.concat(found, ignore_index=True)


def compressions(values: DataFrame, classes: int, resamples: int) -> DataFrame:
    """The compression of each layer with its interval and its range over seeds, the control, and the linear probe."""
    rows = []
    uniform = float(torch.tensor(float(classes)).log2())
    for layer, of_layer in values.groupby("layer"):
        labels, control, linear = (of_layer[of_layer["probe"] == one] for one in ("labels", "control", "linear"))
        bits, read = (torch.tensor(one.groupby("place")["value"].mean().to_numpy()) for one in (labels, linear))
        found, accuracy = (summarize(one, resamples=resamples) for one in (bits, read))
        seeds, controls = (uniform / one.groupby("seed")["value"].mean() for one in (labels, control))
        ranges = {"lowest": seeds.min(), "highest": seeds.max(), "control": uniform / control["value"].mean()}
        ranges |= {"control_lowest": controls.min(), "control_highest": controls.max()}
        probes = {"accuracy": accuracy.mean, "accuracy_low": accuracy.low, "accuracy_high": accuracy.high}
        # Fewer bits mean more compression, so the ends of the interval swap.
        compression = {"compression": uniform / found.mean, "low": uniform / found.high, "high": uniform / found.low}
        counts = {"bits": found.mean * found.examples, "examples": found.examples, "seeds": len(seeds)}
        rows.append({"layer": layer} | compression | counts | ranges | probes)
    return pd.DataFrame(rows)


def _correlations(study: Study, compression: DataFrame, resamples: int) -> DataFrame:
    """For each method with layers, the correlation of cue alignment with the layers' compression."""
    rows = study.rows(["example", "method", "layer", "cue_dot"]).dropna(subset="layer")
    known = compression.set_index("layer")["compression"]
    found = []
    for method, of_method in rows.groupby("method", sort=False):
        alignment = of_method.pivot(index="example", columns="layer", values="cue_dot")
        if len(alignment.columns) > 1:
            layers = known.loc[list(alignment.columns)].tolist()
            values = torch.tensor(alignment.to_numpy(dtype="float64"))
            correlation = probing_correlation(values, layers, resamples=resamples)
            found.append({"method": method} | correlation._asdict() | {"layers": len(layers)})
    return pd.DataFrame(found)
