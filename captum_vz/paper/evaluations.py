"""The three evaluations of Mohebbi et al. 2023, of any model, with all methods."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pandas as pd
import torch
from accelerate import PartialState
from torch import Tensor

from captum_vz.errors import ArgumentError
from captum_vz.metrics import BOUNDARIES, description_length, linear_probe, probing_correlation, summarize
from captum_vz.paper.controls import MOST_CONTROLS, Controls, controlled
from captum_vz.paper.further import Further, further_tables
from captum_vz.paper.report import Reproduction
from captum_vz.study import BadExampleError, Encoded, Example, Scorer, Source, Study, run_study, safe_name

if TYPE_CHECKING:
    from pandas import DataFrame

#: The smallest number of examples for the paper's blocks, because the first block needs two.
FEWEST: Final = round(2 / BOUNDARIES[0])
#: The seeds of each layer's probes.
SEEDS: Final = (0, 1, 2, 3, 4)
#: The parts of the examples for the linear probe. Each label needs as many examples.
FOLDS: Final = 5
#: The columns of :func:`compressions`.
PROBING_COLUMNS: Final = [
    *("layer", "compression", "low", "high", "bits", "examples", "seeds", "lowest", "highest"),
    *("control", "control_lowest", "control_highest", "accuracy", "accuracy_low", "accuracy_high"),
]


def reproduce(
    models: Mapping[str, Source],
    examples: Sequence[Example],
    output: str | Path,
    methods: Any = None,
    *,
    batch_size: int = 32,
    confidence: float = 0.95,
    resamples: int = 1999,
    quiet: bool = False,
    about: str = "",
    controls: int | None = 0,
    engine: str | None = None,
    title: str = "",
) -> Reproduction:
    """Cue alignment, probing and faithfulness of all methods with models: the evaluations of the paper.

    - Cue alignment: how much of the target's row lies on the cue, and how well it ranks the cue, in each layer and
      rolled out (:func:`~captum_vz.metrics.cue_dot_product`, :func:`~captum_vz.metrics.cue_average_precision`).
    - Probing: how far each layer's state at the target compresses the labels
      (:func:`~captum_vz.metrics.description_length`), and its correlation with cue alignment over the layers
      (:func:`~captum_vz.metrics.probing_correlation`).
    - Faithfulness: the rank correlation of the scores with the effect of blanking out each token
      (:func:`~captum_vz.metrics.blank_out`; UNK in its place, the probability of the right one of the two forms).

    `Mohebbi et al. 2023 <https://aclanthology.org/2023.eacl-main.245>`_, sections 5 to 7. Each model has a folder with
    its study and figures by layer, see :func:`~captum_vz.study.run_study`. A killed study continues at the next start.
    The output folder also holds the tables (``summary.csv``, ``probing.csv``, ``correlation.csv``, ``omitted.csv``,
    ``skipped.csv``), the report (``report.md``), and figures as PNG and PDF files; ``page`` has all evaluations.

    Args:
        models: As `run_study` takes them, with a head for masked words or for the next word. For a model that does not
            predict words, faithfulness and the methods that explain an output are omitted.
        examples: With a cue, the two forms of the target and, for probing, a label.
        output: The folder.
        methods: See :func:`~captum_vz.study.run_study`. Methods that refuse a model or fail are omitted from its
            study, and listed in the report with the reason.
        batch_size: See :func:`~captum_vz.study.run_study`, like the three arguments after it.
        confidence: The confidence level of the intervals.
        resamples: The number of bootstrap resamples of the examples.
        quiet: Whether there is no progress bar.
        about: How the examples were selected, and how many were dropped. The report begins with it; see
            :func:`~captum_vz.study.select_blimp`.
        controls: The number of sentences of the package's grammar for the sanity checks
            (:func:`~captum_vz.study.sanity_checks`) and the truths by patching
            (:func:`~captum_vz.study.value_patching`). None: as many as examples, 40 at most. 0: none.
        engine: See :func:`~captum_vz.study.run_study`, like the argument after it. It runs the methods of the
            studies. Probing, sanity checks and the further tables are computed by one process.
        title: The name of the data, for the titles of figures.

    Returns:
        Tables, and a report that prints.

    Raises:
        ValueError: What `run_study` raises; ELECTRA's discriminator, which predicts no words; or a model that can use
            no example.

    >>> import tempfile
    >>> from captum_vz.paper import reproduce
    >>> from captum_vz.study import Example
    >>> from captum_vz.testbed import agreement_sentences, load_model
    >>> examples = [Example.from_record(record) for record in agreement_sentences(4)]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     found = reproduce({"agreement": load_model}, examples, folder, ["value-zeroing"], quiet=True)
    >>> print(found)
    ## agreement: 4 sentences, 0 skipped
    ...
    | value-zeroing | 0...
    """
    if not models or not examples:
        raise ValueError(f"models is {list(models)}, and there are {len(examples)} examples: pass at least 1 of each.")
    _check_groups(examples)
    folder = Path(output)
    # Some systems do not distinguish the case of file names.
    parts = [safe_name(name).casefold() for name in models]
    if len(set(parts)) < len(parts):
        raise ValueError(f"models is {list(models)}: pass names that differ in more than case, for their folders.")
    studies, probings, correlations, omitted, checked, further = [], [], [], [], [], []
    count = min(len(examples), MOST_CONTROLS) if controls is None else controls
    if count < 0:
        raise ArgumentError(f"controls is {controls}: pass a number of sentences, 0 or more.")
    options: dict[str, Any] = {"batch_size": batch_size, "confidence": confidence, "resamples": resamples}
    for name, source in models.items():
        model, tokenizer = source() if callable(source) else source
        _refuse_discriminator(name, model)
        part = folder / safe_name(name)
        scorer = Scorer(model, tokenizer, methods, "cue_dot", batch_size=batch_size)
        first, encoded = _first_usable(name, scorer, examples)
        refused = {row["method"]: row["skipped"] for row in scorer.scores([first]) if row["skipped"]}
        usable = {what: method for what, method in scorer.methods.items() if what not in refused}
        if not usable:
            raise ValueError(f"no method can explain {name!r}: {next(iter(refused.values()))}")
        metrics = ["cue_dot", "cue_ap"]
        if _predicts_words(scorer, encoded):
            metrics.append("blank_out")
        else:
            refused["blank-out"] = f"{type(model).__name__} predicts no words."
        study = run_study(
            {name: (model, tokenizer)},
            examples,
            part,
            usable,
            metrics,
            batch_size=batch_size,
            confidence=confidence,
            resamples=resamples,
            engine=engine,
            quiet=quiet,
        )
        study.check_used()
        studies.append(study)
        held = study.examples  # it may hold more than this call passes
        labels = _labels(held, study)
        kinds = Counter(labels.values())
        if len(labels) < FEWEST or len(kinds) < 2:
            refused["probing"] = (
                f"{len(labels)} sentences have a label, of {len(kinds)} kinds. Pass at least {FEWEST}, of 2 kinds."
            )
        elif (rarest := kinds.most_common()[-1])[1] < FOLDS:
            refused["probing"] = f"{rarest[1]} sentences have the label {rarest[0]!r}. Pass at least {FOLDS} of each."
        else:
            bits = _probed(model, tokenizer, labels, study, batch_size)
            compression = compressions(bits, len(kinds), confidence, resamples)
            probings.append(compression.assign(model=name))
            correlations.append(_correlations(study, compression, confidence, resamples).assign(model=name))
        if count and "blank_out" in metrics:
            control = partial(controlled, name, (model, tokenizer), usable, part / "controls", count)
            checked.append(control(engine=engine, quiet=quiet, **options))
        predicts = "blank_out" in metrics
        further.append(further_tables(name, (model, tokenizer), study, held, usable, predicts=predicts, **options))
        omitted += [{"model": name, "what": what, "reason": reason} for what, reason in refused.items()]
    differences = pd.concat([study.differences for study in studies], ignore_index=True)
    repeat = dict.fromkeys(line for study in studies for line in study.repeat)
    # The controls have other sentences. What else they need is said already.
    repeat |= dict.fromkeys(
        f"Sentences of the controls{line.removeprefix('Sentences')}"
        for _, _, study in checked
        for line in study.repeat
        if line.startswith("Sentences")
    )
    order = list(dict.fromkeys(line.split()[0] for line in repeat))  # the lines of all models of one kind together
    found = Reproduction(
        summary=pd.concat([study.summary for study in studies], ignore_index=True),
        probing=_joined(probings, ["model", *PROBING_COLUMNS]),
        correlation=_joined(
            correlations, ["model", "method", "statistic", "low", "high", "p", "examples", "undefined", "layers"]
        ),
        omitted=pd.DataFrame(omitted, columns=["model", "what", "reason"]),
        differences=differences,
        skipped=pd.concat([study.skipped for study in studies], ignore_index=True),
        about=about,
        controls=Controls.joined(checked, differences),
        further=Further.joined(further),
        repeat=tuple(sorted(repeat, key=lambda line: order.index(line.split()[0]))),
        settings=tuple(study.settings for study in studies),
        title=title,
    )
    state = PartialState()
    if state.is_main_process:
        found.write(folder)
    state.wait_for_everyone()
    return found


def _check_groups(examples: Sequence[Example]) -> None:
    """Refuse groups and labels whose names the report has for means of all of them."""
    for what in ("group", "label"):
        names = {getattr(example, what) for example in examples} - {None}
        taken = sorted(names & {"all", "macro"})
        if taken and len(names) > 1:
            raise ValueError(f"a {what} is called {taken[0]!r}, which names a mean in the report: pass another name.")


def _refuse_discriminator(name: str, model: Any) -> None:
    """Refuse ELECTRA's discriminator: of the two published checkpoints, the better known one predicts no words."""
    if "ElectraForPreTraining" in (type(model).__name__, *(model.config.architectures or ())):
        raise ValueError(
            f"{name!r} is a discriminator of ELECTRA, which detects replaced words and predicts none: pass "
            "the generator it was trained with, such as 'google/electra-base-generator'."
        )


def _first_usable(name: str, scorer: Scorer, examples: Sequence[Example]) -> tuple[Example, Encoded]:
    reason = ""
    for example in examples:
        try:
            return example, scorer.encode(example, needs_cue=True)
        except BadExampleError as error:
            reason = str(error)
    raise ValueError(f"{name!r} can use none of the {len(examples)} examples: {reason}.")


@torch.no_grad()
def _predicts_words(scorer: Scorer, example: Encoded) -> bool:
    """Whether a model gives each token a score for each word of its vocabulary."""
    ids = torch.tensor([example.ids], device=scorer.model.device)
    logits = getattr(scorer.model(input_ids=ids, attention_mask=torch.ones_like(ids)), "logits", None)
    return isinstance(logits, Tensor) and logits.ndim == 3 and logits.shape[-1] >= len(scorer.tokenizer)


def _labels(examples: Sequence[Example], study: Study) -> dict[Example, str]:
    """The labels of the examples of a study that have a label and were not skipped."""
    used = set(study.rows(["example"])["example"])
    return {example: example.label for example in examples if example.id in used and example.label is not None}


def _probed(model: Any, tokenizer: Any, labels: Mapping[Example, str], study: Study, batch_size: int) -> DataFrame:
    """The bits of each label in each layer, which the study keeps."""
    # Other examples may have run out of memory at the last start.
    made_of = [SEEDS, [example.to_dict() for example in labels]]

    def made(model: Any, tokenizer: Any) -> DataFrame:
        states = Scorer(model, tokenizer, batch_size=batch_size).target_states(labels)
        return probe(states, list(labels.values()))

    return study.keep("probing", (model, tokenizer), made_of, made)


def probe(states: Tensor, labels: Sequence[str]) -> DataFrame:
    """The bits of each label given each layer's states, from several seeds, with a control and a linear probe.

    Args:
        states: `(layers, examples, d)`.
        labels: One for each example, of at least two kinds.

    Returns:
        Rows with ``layer``, ``place`` (of the example), ``probe``, ``seed`` and ``value``. The probe "labels" has bits,
        see :func:`~captum_vz.metrics.description_length`; "control" the bits of labels that are shuffled by the seed;
        "linear" whether a linear probe reads the label, see :func:`~captum_vz.metrics.linear_probe`.
    """
    names = sorted(set(labels))
    numbers = torch.tensor([names.index(label) for label in labels])
    found = []
    for layer, state in enumerate(states):
        values: list[tuple[str, int, Tensor]] = []
        for seed in SEEDS:
            order = torch.randperm(len(numbers), generator=torch.Generator().manual_seed(seed))
            values.append(("labels", seed, description_length(state, numbers, len(names), seed=seed).bits))
            values.append(("control", seed, description_length(state, numbers[order], len(names), seed=seed).bits))
        values.append(("linear", 0, linear_probe(state, numbers, folds=FOLDS)))
        found += [
            pd.DataFrame({"layer": layer, "place": range(len(one)), "probe": kind, "seed": seed, "value": one.numpy()})
            for kind, seed, one in values
        ]
    return pd.concat(found, ignore_index=True)


def compressions(values: DataFrame, classes: int, confidence: float = 0.95, resamples: int = 1999) -> DataFrame:
    """The compression of each layer with its interval and its range over seeds, the control, and the linear probe.

    Args:
        values: As :func:`probe` gives it.
        classes: The number K of labels.
        confidence: The confidence level of the intervals.
        resamples: The number of bootstrap resamples of the examples.
    """
    rows = []
    uniform = float(torch.tensor(float(classes)).log2())
    for layer, of_layer in values.groupby("layer"):
        by_probe = dict(list(of_layer.groupby("probe")))
        bits = by_probe["labels"].groupby("place", sort=True)["value"].mean()
        found = summarize(torch.tensor(bits.to_numpy()), confidence, resamples)
        seeds = uniform / by_probe["labels"].groupby("seed")["value"].mean()
        control = uniform / by_probe["control"].groupby("seed")["value"].mean()
        accuracy = summarize(torch.tensor(by_probe["linear"]["value"].to_numpy()), confidence, resamples)
        # Fewer bits mean more compression, so the ends of the interval swap.
        rows.append(
            {
                "layer": layer,
                "compression": uniform / found.mean,
                "low": uniform / found.high,
                "high": uniform / found.low,
                "bits": found.mean * found.examples,
                "examples": found.examples,
                "seeds": len(seeds),
                "lowest": seeds.min(),
                "highest": seeds.max(),
                "control": uniform / by_probe["control"]["value"].mean(),
                "control_lowest": control.min(),
                "control_highest": control.max(),
                "accuracy": accuracy.mean,
                "accuracy_low": accuracy.low,
                "accuracy_high": accuracy.high,
            }
        )
    return pd.DataFrame(rows, columns=PROBING_COLUMNS)


def _correlations(study: Study, compression: DataFrame, confidence: float, resamples: int) -> DataFrame:
    """For each method with layers, the correlation of cue alignment with the layers' compression."""
    rows = study.rows(["example", "method", "layer", "cue_dot"]).dropna(subset="layer")
    known = compression.set_index("layer")["compression"]
    found = []
    for method, of_method in rows.groupby("method", sort=False):
        alignment = of_method.pivot(index="example", columns="layer", values="cue_dot")
        if len(alignment.columns) > 1:
            values = torch.tensor(alignment.to_numpy(dtype="float64"))
            layers = known.loc[list(alignment.columns)].tolist()
            correlation = probing_correlation(values, layers, confidence, resamples)
            found.append({"method": method} | correlation._asdict() | {"layers": len(layers)})
    return pd.DataFrame(found)


def _joined(tables: list[DataFrame], columns: list[str]) -> DataFrame:
    return pd.concat(tables, ignore_index=True)[columns] if tables else pd.DataFrame(columns=columns)
