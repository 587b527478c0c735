"""The results of a study: read from its folder, summarised, drawn, and signed with where they come from."""

from __future__ import annotations

import hashlib
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from matplotlib.figure import Figure, FigureBase

from captum_vz import __version__
from captum_vz._files import safe_name, write_whole
from captum_vz._start import room
from captum_vz.errors import needs_extra
from captum_vz.methods import DECIDING
from captum_vz.study import folder as store
from captum_vz.study.examples import Example
from captum_vz.study.figures import counted, draw_differences, draw_summary
from captum_vz.study.folder import ALL, LIBRARIES, MANIFEST, tables
from captum_vz.study.scoring import COLUMNS
from captum_vz.visualization.pictures.files import add_provenance, root_figure

with needs_extra("captum_vz.study", "study"):
    import pandas as pd
    from pandas import DataFrame

AnyFigure = TypeVar("AnyFigure", bound=FigureBase)

#: The key of the settings that holds where the results come from. It is no part of what the rows are made of.
PROVENANCE: Final = "provenance"
#: The seeds of the bootstrap, and of methods that draw random numbers.
_SEEDS: Final = {"bootstrap": 0, "methods": 0}
#: How the identity of code begins that the versions of the libraries name.
_PACKAGED: Final = tuple(f"{name}." for name in ("captum_vz", *LIBRARIES))
_FOOT_SIZE: Final = 6
SUMMARY: Final = "summary.csv"
SKIPPED: Final = "skipped.csv"
DIFFERENCES: Final = "differences.csv"
FIGURES: Final = "figures"
MOST_TIES: Final = 4  #: a line names at most so many pairs; all are in the table of differences


class Study:
    """The results of a study, read from the folder that :func:`run_study` has written, or is writing.

    A broken file is a ValueError. A folder without a study, and a summary of a study that is not finished, are a
    FileNotFoundError.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not (self.folder / MANIFEST).is_file():
            raise FileNotFoundError(f"{self.folder / MANIFEST} is missing: expected the folder of a study.")
        #: The version of captum_vz, and the models, methods and metrics of the study with the identity of their code.
        self.settings: dict[str, Any] = store.read_settings(self.folder)

    def rows(self, columns: Sequence[str] | None = None) -> DataFrame:
        """All finished rows, one for each model, example, method and layer.

        They are in the order of models and examples, without skipped examples. ``layer`` is NA for methods without
        layers. `columns` are some of the columns of :meth:`Scorer.score`, and ``model``; None: all.
        """
        rows = self.to_arrow(columns).to_pandas()
        return rows.astype({name: "Int64" for name in ("layer", "deciding", "target") if name in rows})

    def to_arrow(self, columns: Sequence[str] | None = None) -> Any:
        """The rows of :meth:`rows` as a table of pyarrow, which many libraries take."""
        every = [*(name for name in COLUMNS if name != "skipped"), *self.settings["metrics"], "model"]
        wanted = every if columns is None else list(columns)
        return store.latest(self.folder, lambda settings: tables.read_rows(self.folder, settings, wanted))

    def to_dataset(self, columns: Sequence[str] | None = None) -> Any:
        """The rows of :meth:`rows` as a `datasets.Dataset` of Hugging Face. It needs the extra `datasets`."""
        with needs_extra("to_dataset", "datasets"):
            from datasets import Dataset
        return Dataset(self.to_arrow(columns))

    @property
    def skipped(self) -> DataFrame:
        """The examples without numbers, with the reason in ``skipped``, and the ``method`` or ``metric`` it fails."""
        return tables.skipped_rows(store.latest(self.folder, partial(tables.collect, self.folder)))

    @property
    def summary(self) -> DataFrame:
        """The mean, its interval and the numbers of examples, for each model, method, layer, group and metric.

        The columns are ``model``, ``method``, ``layer``, ``group`` ("all": all examples), ``metric``, ``mean``,
        ``std``, ``low``, ``high``, ``examples`` (how many have a value), ``undefined`` (how many have no value, because
        constant scores order nothing) and ``skipped`` (how many could not be used).
        """
        return self._table(SUMMARY)

    @property
    def differences(self) -> DataFrame:
        """The paired difference of each pair of methods, for each model and metric: last layers, all examples.

        The columns are ``model``, ``metric``, and the fields of :class:`~captum_vz.metrics.Difference`.
        """
        return self._table(DIFFERENCES)

    def _table(self, name: str) -> DataFrame:
        path = self.folder / name
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing: the study is not finished. Start it again to continue.")
        # A name may be "NA", "0.5" or empty. Only numbers can be missing.
        names = dict.fromkeys(("model", "method", "group", "metric", "one", "other"), str)
        table = pd.read_csv(path, dtype={"layer": "Int64", **names}, keep_default_na=False, na_values=[""])
        return table.fillna(dict.fromkeys(names, ""))

    def means(self, metrics: Iterable[str] | None = None, digits: int = 3) -> dict[str, DataFrame]:
        """A table for each model, methods by metrics: the mean over all examples, and its interval.

        Means are of a method's last layer. Without `metrics`, all metrics of the folder are shown.
        """
        last = self.summary.query(f"group == {ALL!r}").groupby(["model", "method", "metric"], sort=False).tail(1)
        last = last.assign(cell=[with_interval(one.mean, one.low, one.high, digits) for one in last.itertuples()])
        last = last if metrics is None else last[last["metric"].isin([*metrics])]
        return {
            str(model): rows.pivot(index="method", columns="metric", values="cell")
            .loc[rows["method"].unique(), rows["metric"].unique()]
            .rename_axis(index=None, columns=str(model))
            for model, rows in last.groupby("model", sort=False)
        }

    def __str__(self) -> str:
        """The tables of :meth:`means`, and :meth:`lines`."""
        return self.told()

    def told(self, metrics: Sequence[str] | None = None) -> str:
        """The study as it prints, of some metrics only."""
        tables = [f"{table.to_string(line_width=room())}\n" for table in self.means(metrics).values()]
        return "\n".join([*tables, *self.lines(metrics)]).rstrip()

    def lines(self, metrics: Sequence[str] | None = None) -> list[str]:
        """Lines on pairs of methods that are not shown to differ, on skipped examples, and on layers that decide."""
        skipped, differences, lines = self.skipped, self.differences, []
        if metrics is not None:
            differences = differences[differences["metric"].isin(metrics)]
            skipped = skipped[skipped["metric"].isna() | skipped["metric"].isin(metrics)]
        for (model, metric), rows in differences.groupby(["model", "metric"], sort=False):
            ties, count = tied_pairs(rows), counted(int(rows["examples"].max()), "sentence")
            few = f": {', '.join(ties)}" if len(ties) <= MOST_TIES else ""
            told = f"{len(ties)} of {counted(len(rows), 'pair')} of methods not shown to differ ({count}){few}"
            if not ties:
                told = f"all {counted(len(rows), 'pair')} of methods differ ({count})"
            lines.append(f"{model}, {metric}: {told}")
        by = ["model", skipped["method"].fillna(""), skipped["metric"].fillna("")]
        for who, rows in skipped.groupby(by, sort=False):
            often = "" if rows["skipped"].nunique() == 1 else "most often: "
            why = f"{often}{rows['skipped'].mode()[0]}"
            lines.append(f"{', '.join(filter(None, who))}: {counted(len(rows), 'example')} skipped ({why})")
        if not any(name.endswith(f":{DECIDING}") for name in self.settings["methods"]):
            return lines
        rows = self.rows(["model", "method", "deciding"]).dropna()  # the layers that methods have chosen
        for (model, method), layers in rows.groupby(["model", "method"], sort=False)["deciding"]:
            low, high, most = layers.min(), layers.max(), layers.mode()[0]
            often = f", most often {most} (in {(layers == most).sum()} of {counted(len(layers), 'sentence')})"
            lines.append(f"{model}, {method}: layer{f's {low} to {high}{often}' if low < high else f' {low}'}")
        return lines

    def plot(self, metric: str) -> Figure:
        """The summary of one metric over all examples as a figure: by layer, and in the last layer."""
        return sign_figure(draw_summary(self.summary, metric), self.settings)

    def plot_differences(self, metric: str) -> Figure:
        """The paired differences of the methods in one metric as a figure."""
        return sign_figure(draw_differences(self.differences, metric), self.settings)

    @property
    def repeat(self) -> list[str]:
        """What a reader needs to repeat the study: versions, models, data, seeds and commands, a line for each."""
        return repeat_lines(self.settings)

    @property
    def examples(self) -> list[Example]:
        """All examples of the study, also of earlier starts."""
        return [
            example for block in store.blocks_of(self.settings) for example in store.read_examples(self.folder, block)
        ]

    def check_used(self) -> None:
        """Raises a ValueError if a model could use no example of a finished study."""
        whole = self.summary.query(f"group == {ALL!r}")
        for model, lines in whole.groupby("model", sort=False):
            if not (lines["examples"] + lines["undefined"]).any():
                skipped = self.skipped
                raise ValueError(
                    f"{model!r} could use none of the {self.settings['examples']['count']} examples, most often "
                    f"because: {skipped[skipped['model'] == model]['skipped'].mode()[0]}. "
                    f"{self.folder / SKIPPED} lists the reasons."
                )


def write_results(folder: Path, metrics: Iterable[str], confidence: float, resamples: int) -> None:
    """Write the summary, the skipped examples, the figures of some metrics and the provenance, if they are missing."""
    with store.lock_of(folder, SUMMARY):
        settings = store.read_settings(folder)
        provenance = provenance_of(settings, confidence, resamples)
        if (folder / SUMMARY).is_file() and settings.get(PROVENANCE) == provenance:
            return
        settings, found = store.latest(folder, lambda now: (now, tables.collect(folder, now)))
        provenance = provenance_of(settings, confidence, resamples)
        summary = tables.summarise(found, settings, confidence, resamples)
        differences = tables.paired_differences(found, settings, confidence, resamples)
        settings[PROVENANCE] = provenance
        (folder / FIGURES).mkdir(exist_ok=True)
        for metric in metrics:
            drawn = {metric: draw_summary(summary, metric)}
            if metric in set(differences["metric"]):
                drawn[f"{metric}-differences"] = draw_differences(differences, metric)
            for name, figure in drawn.items():
                sign_figure(figure, settings).savefig(folder / FIGURES / f"{safe_name(name)}.png")
        write_whole(folder / SKIPPED, tables.skipped_rows(found).to_csv(index=False).encode())
        write_whole(folder / DIFFERENCES, differences.to_csv(index=False).encode())
        write_whole(folder / SUMMARY, summary.to_csv(index=False).encode())
        with store.changing(folder) as now:
            now[PROVENANCE] = provenance
            tables.remove_unlisted(folder, now)


def tied_pairs(rows: DataFrame) -> list[str]:
    """The pairs of methods that are not shown to differ, such as "alti and attention"."""
    return [f"{one} and {other}" for one, other in rows[rows["tied"]][["one", "other"]].itertuples(index=False)]


def with_interval(number: float, low: float, high: float, digits: int = 2) -> str:
    """A number with its interval. A single example has no interval, and no example no number.

    >>> with_interval(0.5, 0.25, 0.75), with_interval(0.5, float("nan"), float("nan"))
    ('0.50 [0.25, 0.75]', '0.50')
    """
    if number != number:
        return "-"
    interval = f" [{low:.{digits}f}, {high:.{digits}f}]" if low == low and high == high else ""
    return f"{number:.{digits}f}{interval}"


def provenance_of(settings: Mapping[str, Any], confidence: float, resamples: int) -> dict[str, Any]:
    """Where the results of a study with these settings come from."""
    makers: dict[str, list[Any]] = {name: [] for name in settings["models"]}
    for name, parts in settings["parts"].items():
        for key in dict.fromkeys(part["holds"] for part in parts.values()):
            maker = settings["holds"][key]["made_by"]
            makers[name] += [maker] if maker and maker not in makers[name] else []
    found = {"models": makers, "seeds": _SEEDS, "confidence": confidence, "resamples": resamples}
    # Results with another digest of what they are made of are old.
    return found | {"results": store.digest({k: one for k, one in settings.items() if k != PROVENANCE})}


def repeat_lines(settings: Mapping[str, Any]) -> list[str]:
    """What a reader needs to repeat a study, one line for each thing; nothing for a study that is not finished."""
    found = settings.get(PROVENANCE)
    if not found:
        return []
    makers = [(name, one) for name, some in found["models"].items() for one in some]
    libraries = ("captum_vz", "python", *LIBRARIES)
    versions = dict.fromkeys(", ".join(f"{library} {one[library]}" for library in libraries) for _, one in makers)
    lines = [f"Versions: {'; or '.join(versions)}."]
    for name, one in makers:
        source = f" from {one['source']}" if one["source"] else ""
        where = f"weights with the SHA-256 {one['weights']}, {one['dtype']} on {one['device']}"
        lines.append(f"Model {name}: {one['model']}{source}, {where}.")
    code = [*settings["methods"].items(), *settings["metrics"].items()]
    lines += [f"Own code: {name}, {one}." for name, one in code if not one.startswith(_PACKAGED)]
    blocks = hashlib.sha256("".join(checksum for checksum, _ in settings["examples"]["blocks"]).encode()).hexdigest()
    seeds = ", ".join(f"{name} {seed}" for name, seed in found["seeds"].items())
    lines.append(f"Sentences: {settings['examples']['count']:,}, digest {blocks[:16]}.")
    lines.append(f"Seeds: {seeds}. Intervals: {100 * found['confidence']:g} %, {found['resamples']:,} resamples.")
    return lines


def sign_figure(figure: AnyFigure, *settings: Mapping[str, Any]) -> AnyFigure:
    """Write at the foot of a figure where its numbers come from, and keep the details with its file.

    The `settings` are those of the finished studies that its numbers come from, whose intervals have one level.
    """
    lines = list(dict.fromkeys(line for one in settings for line in repeat_lines(one)))
    if not lines:
        return figure
    makers = [(name, one) for each in settings for name, some in each[PROVENANCE]["models"].items() for one in some]
    first = makers[0][1] if makers else {}
    counts = " and ".join(dict.fromkeys(counted(one["examples"]["count"], "sentence") for one in settings))
    parts = [
        f"captum_vz {first.get('captum_vz', __version__)}, torch {first.get('torch', '')}",
        *dict.fromkeys(f"{name} {one['weights'][:8]}, {one['dtype']}, {one['device']}" for name, one in makers),
        f"study of {counts}, {100 * settings[0][PROVENANCE]['confidence']:g} % intervals",
    ]
    root = root_figure(figure)
    wrapped = textwrap.wrap("; ".join(parts), int(root.get_figwidth() * 72 / (0.55 * _FOOT_SIZE)))
    # The foot has room of its own, so that it does not take that of the axes.
    root.set_figheight(root.get_figheight() + 1.25 * _FOOT_SIZE / 72 * len(wrapped))
    foot = figure.supxlabel("\n".join(wrapped), x=0.01, ha="left", fontsize=_FOOT_SIZE, color="0.45")
    foot.set_parse_math(False)
    more: dict[str, str] = {}
    for key, _, value in (line.partition(": ") for line in lines):
        more[key.lower()] = "; ".join(filter(None, [more.get(key.lower()), value]))
    return add_provenance(figure, **cast(Any, more))
