"""The three evaluations of Mohebbi et al. 2023, of any model, with all methods."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from captum_vz import find_layers
from captum_vz._files import safe_name, write_whole
from captum_vz.errors import ArgumentError
from captum_vz.metrics import BOUNDARIES, probing_correlation
from captum_vz.metrics.extra import study_extra
from captum_vz.study.examples.encoding import BadExampleError, Encoded, encode, pad
from captum_vz.study.examples.example import Example
from captum_vz.study.examples.text import max_tokens, predicts_next
from captum_vz.study.folder.storage import (
    Source,
    Stamp,
    check_weights,
    digest,
    fingerprint,
    on_device,
    read_stamp,
    read_table,
    to_parquet,
)
from captum_vz.study.methods import Batch, Method, encoder_of
from captum_vz.study.paper.controls import MOST_CONTROLS, Controls, controlled
from captum_vz.study.paper.further import Further, further_tables
from captum_vz.study.paper.probing import PROBING_COLUMNS, SEEDS, compressions, probe, target_states
from captum_vz.study.paper.report import Reproduction
from captum_vz.study.results import Study, check_used, study_examples
from captum_vz.study.run import run_study
from captum_vz.study.scoring.given import checked_rows, given_methods
from captum_vz.study.scoring.rows import reason_of

with study_extra("captum_vz.study"):
    import pandas as pd
    import pyarrow as pa
    from accelerate import PartialState

if TYPE_CHECKING:
    from pandas import DataFrame

#: The smallest number of examples for the paper's blocks, because the first block needs two.
FEWEST: Final = round(2 / BOUNDARIES[0])


PROBING: Final = "probing.parquet"


def reproduce(
    models: Mapping[str, Source],
    examples: Sequence[Example],
    output: str | Path,
    methods: Any = None,
    *,
    batch_size: int = 32,
    shard_size: int = 64,
    confidence: float = 0.95,
    resamples: int = 1999,
    quiet: bool = False,
    about: str = "",
    controls: int | None = 0,
    command: str | None = None,
    data: Iterable[str | Path] = (),
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
    ``skipped.csv``), the report (``report.md``), ``probing.png`` and ``faithfulness.png``.

    Args:
        models: As `run_study` takes them, with a head for masked words or for the next word. For a model that does not
            predict words, faithfulness and the methods that explain an output are omitted.
        examples: With a cue, the two forms of the target and, for probing, a label.
        output: The folder.
        methods: See :func:`~captum_vz.study.run_study`. Methods that refuse a model or fail are omitted from its
            study, and listed in the report with the reason.
        batch_size: See :func:`~captum_vz.study.run_study`, like the four arguments after it.
        shard_size: The largest number of examples that are computed again if a process is killed.
        confidence: The confidence level of the intervals.
        resamples: The number of bootstrap resamples of the examples.
        quiet: Whether there is no progress bar.
        about: How the examples were selected, and how many were dropped. The report begins with it; see
            :func:`~captum_vz.study.select_blimp`.
        controls: The number of sentences of the package's grammar for the sanity checks
            (:func:`~captum_vz.study.sanity_checks`) and the truths by patching
            (:func:`~captum_vz.study.value_patching`). None: as many as examples, 40 at most. 0: none.
        command: See :func:`~captum_vz.study.run_study`, like `data`.
        data: See there.

    Returns:
        Tables, and a report that prints.

    Raises:
        ValueError: What `run_study` raises; ELECTRA's discriminator, which predicts no words; or a model that can use
            no example.

    >>> import tempfile
    >>> from captum_vz.study import Example, reproduce
    >>> from captum_vz.testbed import agreement_sentences, load_model
    >>> examples = [Example.from_record(record) for record in agreement_sentences(4)]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     found = reproduce({"agreement": load_model}, examples, folder, ["value-zeroing"], quiet=True)
    >>> print(found)
    ## agreement: 4 sentences, 0 skipped
    ...
    | value-zeroing | 0...
    """
    chosen = given_methods(methods)
    if not models or not examples:
        raise ValueError(f"models is {list(models)}, and there are {len(examples)} examples: pass at least 1 of each.")
    folder, data = Path(output), list(data)
    # Some systems do not distinguish the case of file names.
    parts = [safe_name(name).casefold() for name in models]
    if len(set(parts)) < len(parts):
        raise ValueError(f"models is {list(models)}: pass names that differ in more than case, for their folders.")
    studies, probings, correlations, omitted, checked, further = [], [], [], [], [], []
    count = min(len(examples), MOST_CONTROLS) if controls is None else controls
    if count < 0:
        raise ArgumentError(f"controls is {controls}: pass a number of sentences, 0 or more.")
    for name, source in models.items():
        model, tokenizer = source() if callable(source) else source
        _refuse_discriminator(name, model)
        part = folder / safe_name(name)
        first = _first_usable(name, model, tokenizer, examples)
        usable, refused = _usable(model, tokenizer, first, chosen)
        if not usable:
            raise ValueError(f"no method can explain {name!r}: {next(iter(refused.values()))}")
        metrics = ["cue_dot", "cue_ap"]
        if _predicts_words(model, tokenizer, first):
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
            shard_size=shard_size,
            confidence=confidence,
            resamples=resamples,
            command=command,
            data=data,
            quiet=quiet,
        )
        check_used(study)
        studies.append(study)
        held = study_examples(study)  # it may hold more than this call passes
        labels = _labels(held, study)
        kinds = set(labels.values())
        if len(labels) < FEWEST or len(kinds) < 2:
            refused["probing"] = (
                f"{len(labels)} sentences have a label, of {len(kinds)} kinds. Pass at least {FEWEST}, of 2 kinds."
            )
        else:
            bits = _probed(name, model, tokenizer, labels, study, batch_size)
            compression = compressions(bits, len(kinds), confidence, resamples)
            probings.append(compression.assign(model=name))
            correlations.append(_correlations(study, compression, confidence, resamples).assign(model=name))
        if count and "blank_out" in metrics:
            options: dict[str, Any] = {"batch_size": batch_size, "confidence": confidence, "resamples": resamples}
            control = controlled(name, (model, tokenizer), usable, part / "controls", count, quiet=quiet, **options)
            checked.append(control)
        if PartialState().is_main_process:
            further.append(
                further_tables(
                    name,
                    encoder_of(model),
                    tokenizer,
                    study,
                    held,
                    predicts="blank_out" in metrics,
                    batch_size=batch_size,
                    confidence=confidence,
                    resamples=resamples,
                )
            )
        omitted += [{"model": name, "what": what, "reason": reason} for what, reason in refused.items()]
    differences = pd.concat([study.differences for study in studies], ignore_index=True)
    repeat = dict.fromkeys(line for study in studies for line in study.repeat)
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
    )
    state = PartialState()
    if state.is_main_process:
        found.write(folder)
    state.wait_for_everyone()
    return found


def _refuse_discriminator(name: str, model: Any) -> None:
    """Refuse ELECTRA's discriminator: of the two published checkpoints, the better known one predicts no words."""
    if "ElectraForPreTraining" in (type(model).__name__, *(model.config.architectures or ())):
        raise ValueError(
            f"{name!r} is a discriminator of ELECTRA, which detects replaced words and predicts none: pass "
            "the generator it was trained with, such as 'google/electra-base-generator'."
        )


def _first_usable(name: str, model: Any, tokenizer: Any, examples: Sequence[Example]) -> Encoded:
    reason, most, causal = "", max_tokens(model, tokenizer), predicts_next(model)
    for example in examples:
        try:
            return encode(tokenizer, example, max_tokens=most, needs_cue=True, until_target=causal)
        except BadExampleError as error:
            reason = str(error)
    raise ValueError(f"{name!r} can use none of the {len(examples)} examples: {reason}.")


def _usable(
    model: Any, tokenizer: Any, example: Encoded, methods: Mapping[str, Method]
) -> tuple[dict[str, Method], dict[str, str]]:
    """The methods that can explain this model, and why the others refuse it or fail."""
    model = encoder_of(model)
    forms = example.forms or (None, None)
    targets, foils = (None if form is None else [form] for form in forms)
    inputs = pad(tokenizer, [example], model.device)
    batch = Batch(model, tokenizer, find_layers(model), inputs, [example.target], targets, foils)
    usable, refused = {}, {}
    for name, method in methods.items():
        try:
            checked_rows(name, method, batch, ["the first"])
            usable[name] = method
        except Exception as error:  # a method that fails costs its own rows
            refused[name] = reason_of(error)
    return usable, refused


@torch.no_grad()
def _predicts_words(model: Any, tokenizer: Any, example: Encoded) -> bool:
    """Whether a model gives each token a score for each word of its vocabulary."""
    model = encoder_of(model)
    logits = getattr(model(**pad(tokenizer, [example], model.device)), "logits", None)
    return isinstance(logits, Tensor) and logits.ndim == 3 and logits.shape[-1] >= len(tokenizer)


def _labels(examples: Sequence[Example], study: Study) -> dict[Example, str]:
    """The labels of the examples of a study that have a label and were not skipped."""
    used = set(study.rows(["example"])["example"])
    return {example: example.label for example in examples if example.id in used and example.label is not None}


def _probed(
    name: str, model: Any, tokenizer: Any, labels: Mapping[Example, str], study: Study, batch_size: int
) -> DataFrame:
    """The bits of each label in each layer, read from the study's folder, or computed if they are missing."""
    model, state = encoder_of(model), PartialState()
    path, weights = study.folder / PROBING, fingerprint(model, tokenizer)
    made_of = digest(study.settings["captum_vz"], SEEDS, [example.to_dict() for example in labels])
    # Other examples may have run out of memory at the last start.
    if state.is_main_process and not (path.exists() and read_stamp(path).made_of == made_of):
        encoded = [encode(tokenizer, example, until_target=predicts_next(model)) for example in labels]
        with on_device((model, tokenizer), state.device):
            states = target_states(model, tokenizer, find_layers(model), encoded, batch_size)
        bits, stamp = probe(states, list(labels.values())), Stamp(weights, made_of)
        write_whole(path, to_parquet(pa.Table.from_pandas(bits, preserve_index=False), stamp))
    state.wait_for_everyone()
    table, stamp = read_table(path, made_of)
    check_weights(path, name, stamp, weights)
    return table


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
