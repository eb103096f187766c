"""python -m megamoe.plot FILE...: pictures of benchmark records and training logs, as PNG and SVG.

A JSON file with a list of benchmark records becomes pictures of bars, a picture for each number of tokens a rank and a
group of bars for each shape and number of ranks; every record is drawn once. Records of a layer (`megamoe bench`,
bench/compare.py, bench/layer_record.py) show time and TFLOP/s of forward and backward, each bar under the dense ceiling
of its own run; records of steps (`megamoe bench --step`, bench/train_step.py) show milliseconds and tokens per second.
A file of JSON lines with `step` and `loss` becomes a loss curve. Several training logs share one picture.
"""

import argparse
import json
import pathlib
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  the backend is chosen before


def load(path: pathlib.Path) -> list[dict]:
    """The records of a file: a JSON list, or JSON lines. Raises ValueError, naming the file."""
    text = path.read_text()
    try:
        records = (
            json.loads(text) if text.lstrip().startswith("[") else [json.loads(line) for line in text.splitlines()]
        )
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is neither a JSON list nor JSON lines: {error}") from error
    if not records:
        raise ValueError(f"{path} has no records")
    if not all(isinstance(record, dict) for record in records):
        raise ValueError(f"{path} holds other things than records (JSON objects)")
    return records


def is_training_log(records: list[dict]) -> bool:
    return any("step" in record and "loss" in record for record in records)


#: What a record of a layer and one of a step must say to become a bar.
ALWAYS_FIELDS = ("layer", "shape", "ranks", "tokens_per_rank")
LAYER_FIELDS = (*ALWAYS_FIELDS, "forward_ms", "forward_tflops", "backward_ms", "backward_tflops")
STEP_FIELDS = (*ALWAYS_FIELDS, "layers", "step_ms")
#: Named on a bar where the records of a picture differ in them, and where nothing else tells bars of a group apart.
TOLD_WHERE_THEY_DIFFER = {
    "called_from": "",
    "backend": "",
    "weight_gradients": "",
    "routing": "routing",
    "threads": "threads",
}
LAST_RESORTS = ("hardware", "commit", "run")


def is_step(record: dict) -> bool:
    return "step_ms" in record


def check_benchmarks(records: list[dict], path: pathlib.Path) -> None:
    """Raises ValueError, naming the file and what is missing, unless every record can become a bar."""
    for number, record in enumerate(records):
        missing = [field for field in (STEP_FIELDS if is_step(record) else LAYER_FIELDS) if field not in record]
        if missing:
            raise ValueError(
                f"{path}: record {number} has no {', '.join(map(repr, missing))}. Drawn are records of a layer "
                f"({', '.join(LAYER_FIELDS)}), records of steps ({', '.join(STEP_FIELDS)}) "
                "and training logs (step, loss)"
            )


def _bar_labels(records: list[dict]) -> list[str]:
    """A label for each record; records of one group of bars have different ones."""
    differing = [
        field
        for field in TOLD_WHERE_THEY_DIFFER
        if len({record[field] for record in records if record.get(field) is not None}) > 1
    ]
    labels = []
    for record in records:
        compiled = {True: "compiled", False: "eager"}.get(record.get("compiled"))
        words = [record["layer"], record.get("path"), record.get("mode"), compiled]
        words += [f"{record[field]} {TOLD_WHERE_THEY_DIFFER[field]}".strip() for field in differing if field in record]
        labels.append(" ".join(word for word in words if word))

    def alike():
        places = [(_group(record), label) for record, label in zip(records, labels)]
        return [index for index, place in enumerate(places) if places.count(place) > 1]

    for field in LAST_RESORTS:
        indices = alike()
        if len({records[index].get(field) for index in indices}) > 1:
            for index in indices:
                labels[index] += f" {records[index].get(field)}"
    repeated = alike()
    for index in repeated:
        labels[index] += f" (record {index})"
    return labels


def _group(record: dict) -> tuple:
    return record["shape"], record.get("layers"), record["ranks"]


def _group_name(group: tuple) -> str:
    shape, layers, ranks = group
    of_layers = f"\n{layers} layers" if layers else ""
    return f"{shape}{of_layers}\n{ranks} rank" + "s" * (ranks > 1)


def _draw_bars(records: list[dict], columns: list[list[tuple]]) -> plt.Figure:
    """Groups of bars, with a space of a bar or more between groups. Each axis is (title, unit, function of a record
    that gives the height, function that gives its ceiling or None)."""
    labels = _bar_labels(records)
    names = list(dict.fromkeys(labels))
    colors = {name: plt.colormaps["tab20"](index % 20) for index, name in enumerate(names)}
    positions, ticks, position = {}, [], 0
    for group in dict.fromkeys(map(_group, records)):
        members = [index for index, record in enumerate(records) if _group(record) == group]
        members.sort(key=lambda index: names.index(labels[index]))
        positions |= {index: position + place for place, index in enumerate(members)}
        ticks.append((position + (len(members) - 1) / 2, _group_name(group)))
        position += max(len(members), 2) + 1  # a bar alone is narrower than its name
    figure, axes = plt.subplots(
        len(columns[0]),
        len(columns),
        figsize=(len(columns) * max(5, 1 + 0.33 * position), 4 * len(columns[0]) + 0.3 * len(names)),
        squeeze=False,
        layout="constrained",
    )
    for column, rows in enumerate(columns):
        for row, (title, unit, height, ceiling) in enumerate(rows):
            axis = axes[row][column]
            for name in names:
                members = [index for index, label in enumerate(labels) if label == name]
                heights = [height(records[index]) for index in members]
                bars = axis.bar([positions[index] for index in members], heights, 0.9, label=name, color=colors[name])
                axis.bar_label(bars, fmt="%.3g", fontsize=6)
            ceilings = [(positions[index], ceiling(record)) for index, record in enumerate(records) if ceiling(record)]
            if ceilings:
                axis.hlines(
                    [level for _, level in ceilings],
                    [place - 0.5 for place, _ in ceilings],
                    [place + 0.5 for place, _ in ceilings],
                    colors="black",
                    linewidth=1,
                    label="dense product, same run",
                )
            axis.set_xticks([place for place, _ in ticks], [name for _, name in ticks], fontsize=8)
            axis.set_ylabel(unit)
            axis.set_title(title)
    # The last axis has a line for the ceiling, where there is one.
    figure.legend(*axes[-1][-1].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8)
    machines = ", ".join(dict.fromkeys(record["hardware"] for record in records if "hardware" in record))
    days = ", ".join(dict.fromkeys(record["date"][:10] for record in records if "date" in record))
    figure.suptitle(f"{machines}; {records[0]['tokens_per_rank']} tokens a rank; {days}", fontsize=8)
    return figure


def draw_layers(records: list[dict]) -> plt.Figure:
    """Two rows, milliseconds and TFLOP/s of forward and backward."""
    columns = [
        [
            (direction, "ms", lambda record, name=f"{direction}_ms": record[name], lambda record: None),
            (
                direction,
                "TFLOP/s per device",
                lambda record, name=f"{direction}_tflops": record[name],
                lambda record: record.get("dense_tflops"),
            ),
        ]
        for direction in ("forward", "backward")
    ]
    return _draw_bars(records, columns)


def thousand_tokens_per_s(record: dict) -> float:
    """Of all ranks together; `megamoe bench --step` leaves it to be computed."""
    return record["ranks"] * record["tokens_per_rank"] / record["step_ms"]


def draw_steps(records: list[dict]) -> plt.Figure:
    """Milliseconds a step and tokens per second, side by side."""
    time = ("step", "ms", lambda record: record["step_ms"], lambda record: None)
    speed = ("step", "1000 tokens/s, all ranks", thousand_tokens_per_s, lambda record: None)
    return _draw_bars(records, [[time], [speed]])


def draw_benchmarks(records: list[dict]) -> dict[str, plt.Figure]:
    """The pictures of a file by what comes after its name: nothing where there is one. Layers and steps, and numbers of
    tokens a rank, are drawn apart."""
    kinds = dict.fromkeys((is_step(record), record["tokens_per_rank"]) for record in records)
    figures = {}
    for step, tokens in kinds:
        chosen = [record for record in records if (is_step(record), record["tokens_per_rank"]) == (step, tokens)]
        ending = "" if len(kinds) == 1 else f"-{'steps-' if step else ''}{tokens}-tokens"
        figures[ending] = (draw_steps if step else draw_layers)(chosen)
    return figures


def draw_losses(logs: dict[str, list[dict]]) -> plt.Figure:
    """One curve a log; the loss of held-out text as a level where the log has it."""
    figure, axis = plt.subplots(figsize=(8, 5))
    for name, records in logs.items():
        steps = [record for record in records if "step" in record and "loss" in record]
        (line,) = axis.plot([record["step"] for record in steps], [record["loss"] for record in steps], label=name)
        for record in records:
            if "held_out_loss" in record:
                axis.axhline(record["held_out_loss"], color=line.get_color(), linestyle=":", label=f"{name}, held out")
            if "unigram_loss" in record:
                axis.axhline(record["unigram_loss"], color="grey", linestyle="--", label="byte frequencies alone")
    axis.set_xlabel("step")
    axis.set_ylabel("loss (nats per byte)")
    axis.legend()
    axis.grid(alpha=0.3)
    figure.tight_layout()
    return figure


def log_names(paths: list[pathlib.Path]) -> list[str]:
    """Their names without suffix; the paths as they are where names recur, so that each log has a curve."""
    stems = [path.stem for path in paths]
    return stems if len(set(stems)) == len(stems) else [str(path) for path in paths]


def draw(paths: list[pathlib.Path]) -> dict[str, plt.Figure]:
    """All pictures by name. Raises ValueError where a file is none of ours, or two pictures would have one name."""
    records = {path: load(path) for path in paths}
    logs = [path for path, found in records.items() if is_training_log(found)]
    benchmarks = [path for path in records if path not in logs]
    for path in benchmarks:
        check_benchmarks(records[path], path)
    figures = {}
    if logs:
        figures["loss"] = draw_losses(dict(zip(log_names(logs), (records[path] for path in logs))))
    for path in benchmarks:
        for ending, figure in draw_benchmarks(records[path]).items():
            name = path.stem + ending
            if name in figures:
                raise ValueError(f"{path}: there is a picture {name} already: rename the file, or draw it alone")
            figures[name] = figure
    return figures


def save(figure: plt.Figure, folder: pathlib.Path, name: str) -> list[pathlib.Path]:
    paths = [folder / f"{name}{suffix}" for suffix in (".png", ".svg")]
    for path in paths:
        figure.savefig(path, dpi=150)
    plt.close(figure)
    return paths


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(prog="python -m megamoe.plot", description=__doc__.splitlines()[0])
    parser.add_argument(
        "files", nargs="+", type=pathlib.Path, metavar="FILE", help="benchmark records or training logs"
    )
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path(), help="folder of the pictures")
    options = parser.parse_args(arguments)
    try:
        options.output.mkdir(parents=True, exist_ok=True)
        for name, figure in draw(options.files).items():
            print(*save(figure, options.output, name), sep="\n")
    except (OSError, ValueError) as error:
        print(f"python -m megamoe.plot: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
