"""python -m megamoe.plot FILE...: pictures of benchmark records and training logs, as PNG and SVG.

A JSON file with a list of benchmark records becomes bars of time and TFLOP/s beside the dense ceiling of the same run;
a file of JSON lines with `step` and `loss` becomes a loss curve. Several training logs share one picture.
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
    return records


def is_training_log(records: list[dict]) -> bool:
    return any("step" in record and "loss" in record for record in records)


def _label(record: dict) -> str:
    words = [record["layer"], record.get("path"), record.get("mode"), "compiled" if record.get("compiled") else None]
    return " ".join(word for word in words if word)


def draw_benchmarks(records: list[dict]) -> plt.Figure:
    """Two rows, milliseconds and TFLOP/s of forward and backward; a group of bars for each shape."""
    shapes = list(dict.fromkeys(record["shape"] for record in records))
    labels = list(dict.fromkeys(_label(record) for record in records))
    by_place = {(record["shape"], _label(record)): record for record in records}
    figure, axes = plt.subplots(2, 2, figsize=(4 + 3 * len(shapes), 8), squeeze=False)
    width = 0.8 / len(labels)
    for column, direction in enumerate(("forward", "backward")):
        for row, (unit, name) in enumerate((("ms", "ms"), ("tflops", "TFLOP/s per device"))):
            axis = axes[row][column]
            for index, label in enumerate(labels):
                places = [position for position, shape in enumerate(shapes) if (shape, label) in by_place]
                heights = [by_place[shapes[position], label][f"{direction}_{unit}"] for position in places]
                bars = axis.bar(
                    [place + (index - (len(labels) - 1) / 2) * width for place in places], heights, width, label=label
                )
                axis.bar_label(bars, fmt="%.3g", fontsize=7)
            ceilings = {record["dense_tflops"] for record in records if record.get("dense_tflops")}
            if unit == "tflops" and ceilings:
                axis.axhline(max(ceilings), color="black", linestyle="--", linewidth=1, label="dense ceiling")
            axis.set_xticks(range(len(shapes)), shapes)
            axis.set_ylabel(name)
            axis.set_title(direction)
    axes[1][0].legend(fontsize=8)
    first = records[0]
    figure.suptitle(f"{first.get('hardware', '')}, {first.get('ranks', 1)} ranks, {first.get('date', '')}", fontsize=9)
    figure.tight_layout()
    return figure


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


def save(figure: plt.Figure, stem: pathlib.Path) -> list[pathlib.Path]:
    paths = [stem.with_suffix(suffix) for suffix in (".png", ".svg")]
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
    options.output.mkdir(parents=True, exist_ok=True)
    try:
        records = {path: load(path) for path in options.files}
        logs = {path.stem: found for path, found in records.items() if is_training_log(found)}
        written = save(draw_losses(logs), options.output / "loss.png") if logs else []
        for path, found in records.items():
            if not is_training_log(found):
                written += save(draw_benchmarks(found), options.output / path.with_suffix(".png").name)
    except (OSError, ValueError) as error:
        print(f"python -m megamoe.plot: {error}", file=sys.stderr)
        return 1
    except KeyError as error:
        print(f"python -m megamoe.plot: a benchmark record has no {error}", file=sys.stderr)
        return 1
    print(*written, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
