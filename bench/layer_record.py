#!/usr/bin/env python3
"""Makes the layer's record out of what `megamoe bench --backend cuda` and bench/baseline/run.py measured.

    layer_record.py RUN/layer_results.json [...] --output bench/results --name h200x2 [--notes notes.md]

Each file holds the records of one run of scripts/gpu_check: ours, and those of the sequential layer of bench/baseline/ on
the same GPUs. Writes layer-NAME.json, all of them, and layer-NAME.md, the tables. Ratios are over the baseline of the same
run, shape, ranks and tokens. P is the dense product of the same process.
"""

import argparse
import json
import pathlib

SHAPES = ["qwen3-30b", "qwen3-235b", "deepseek-v3"]
#: Stages in the order in which they run, forward and backward.
FORWARD_STAGES = ["stage_and_plan", "meet_rows", "pull", "order_pulls", "gate_up", "down", "push", "meet_results", "reduce"]
BACKWARD_STAGES = ["stage_and_plan", "meet_rows", "pull", "order_pulls", "gate_up_again", "p", "dx", "push", "weight_gradients",
                   "meet_results", "reduce"]
#: Those of them that are products.
PRODUCT_STAGES = {"forward": ["gate_up", "down"], "backward": ["gate_up_again", "p", "dx", "weight_gradients"]}


def is_ours(record):
    return record["layer"] == "megamoe"


def routing_of(record):
    return record.get("routing", "uniform")


def kind_of(record):
    """What is measured, but for how it is done."""
    return record["run"], record["shape"], record["ranks"], record["tokens_per_rank"], routing_of(record)


def name_of(record):
    if not is_ours(record):
        return f"baseline, {'compiled' if record['compiled'] else 'eager'}"
    path = "overlap" if record["path"] == "fused" else "sequential"
    into = ", added into fp32" if record["weight_gradients"] == "accumulate_fp32" else ""
    return f"{path}, {record['mode']}{into}"


def rank_of(record):
    """Sorts a table: by shape, ours first, overlap before sequential, saved before recompute."""
    shape = SHAPES.index(record["shape"]) if record["shape"] in SHAPES else len(SHAPES)
    if not is_ours(record):
        return shape, record["shape"], 1, not record["compiled"]
    adds = record["weight_gradients"] == "accumulate_fp32"
    return shape, record["shape"], 0, record["path"] != "fused", record["mode"] != "saved", adds


def baselines_of(records):
    """{(kind, compiled): record} of the baseline."""
    return {(kind_of(record), record["compiled"]): record for record in records if not is_ours(record)}


def ratio(record, baselines, pass_name, compiled):
    """How many times faster than the baseline; None where the run has none, or for the baseline itself."""
    other = baselines.get((kind_of(record), compiled))
    return other[f"{pass_name}_ms"] / record[f"{pass_name}_ms"] if other and is_ours(record) else None


def pass_cells(record, baselines, pass_name):
    median, span = record[f"{pass_name}_ms"], record.get(f"{pass_name}_ms_range")
    times = f"{median:.2f}" + (f" [{span[0]:.2f}, {span[1]:.2f}]" if span else "")
    tflops = record[f"{pass_name}_tflops"]
    compiled, eager = (ratio(record, baselines, pass_name, is_compiled) for is_compiled in (True, False))
    over = f"{compiled:.2f}" if compiled else ""
    return [times, f"{tflops:.0f}, {tflops / record['dense_tflops']:.3f}", over + (f" ({eager:.2f})" if eager else "")]


def to_table(records, baselines):
    lines = ["| shape | path, mode | forward, ms | TFLOP/s, of P | ratio | backward, ms | TFLOP/s, of P | ratio |",
             "|---|---|---|---|---|---|---|---|"]
    for record in sorted(records, key=rank_of):
        cells = [record["shape"], name_of(record), *pass_cells(record, baselines, "forward"),
                 *pass_cells(record, baselines, "backward")]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def explained_share(record, pass_name):
    """What the rows of the rank that receives most take at P, of the time of the pass."""
    return record["busiest_rank_floor_ms"][pass_name] / record[f"{pass_name}_ms"]


def to_routing_table(records):
    """Of all routings. As far as the shares are alike, the busiest rank's rows explain what skewed routing costs."""
    lines = ["| shape | path, mode | routing | rows of the busiest rank, of the mean | forward, ms | its rows at P, of that "
             "| backward, ms | its rows at P, of that |", "|---|---|---|---|---|---|---|---|"]
    for r in sorted(records, key=lambda record: (*rank_of(record), record["busiest_rank_rows"])):
        mean = r["tokens_per_rank"] * r["top_k"]
        cells = [r["shape"], name_of(r), routing_of(r), f"{r['busiest_rank_rows']} ({r['busiest_rank_rows'] / mean:.2f})"]
        for pass_name in ("forward", "backward"):
            cells += [f"{r[f'{pass_name}_ms']:.2f}", f"{explained_share(r, pass_name):.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def to_share_table(records):
    """Records of before the backward pass was looked at for awaited rows have no share of it, others no clock."""
    lines = ["| shape | forward: loaders wait for rows | before their first tile | backward: loaders wait for rows "
             "| before their first tile | tails, forward | tails, backward | peers awaited from dx on | dx summed beside "
             "| clocks, GHz (P at) |", "|---" * 10 + "|"]
    for r in sorted(records, key=rank_of):
        shares = [r.get(f"{name}_share") for name in ("exposed", "start", "backward_exposed", "backward_start", "forward_tail",
                                                      "backward_tail", "peers_awaited", "summed_beside")]
        cells = ["" if share is None else f"{100 * share:.1f}%" for share in shares]
        clocks = r.get("clock_ghz")
        cells.append(f"{', '.join(f'{ghz:.2f}' for ghz in clocks)} ({r['dense_clock_ghz']:.2f})" if clocks else "")
        lines.append(f"| {r['shape']} | " + " | ".join(cells) + " |")
    return lines


def to_stage_table(records):
    ordered = sorted(records, key=rank_of)
    lines = ["| stage, ms | " + " | ".join(f"{r['shape']}, {name_of(r)}" for r in ordered) + " |", "|---" * (len(ordered) + 1) + "|"]
    for pass_name, stages in [("forward", FORWARD_STAGES), ("backward", BACKWARD_STAGES)]:
        for stage in stages:
            times = [r[f"{pass_name}_stages_ms"].get(stage) for r in ordered]
            if any(time is not None for time in times):
                cells = ["" if time is None else f"{time:.2f}" for time in times]
                lines.append(f"| {pass_name}: {stage} | " + " | ".join(cells) + " |")
    return lines + [products_line(ordered, pass_name) for pass_name in PRODUCT_STAGES]


def products_line(records, pass_name):
    """What the products take together, and which share of the pass that is: of the whole one, since the first stages hold waits for the host."""
    cells = []
    for record in records:
        stages = record[f"{pass_name}_stages_ms"]
        products = sum(stages.get(stage, 0.0) for stage in PRODUCT_STAGES[pass_name])
        cells.append(f"{products:.2f} ({products / record[f'{pass_name}_ms']:.2f})")
    return f"| {pass_name}: products together, of the pass | " + " | ".join(cells) + " |"


def to_markdown(records, baselines):
    ours = [record for record in records if is_ours(record)]
    hardware = sorted({record["hardware"] for record in ours})
    lines = [f"# The layer on {' and '.join(hardware)}" if ours else "# The baseline alone", "",
             "Uniform random routing unless said otherwise. Medians of the passes [fastest, slowest], the slowest rank's; bursts of about 40 ms after a",
             "pause, ours, the baseline's and the dense product's alike. P: bf16 8192^3 through cuBLAS in the same process.",
             "TFLOP/s count 6 N H I forward and 12 N H I backward, also where gate and up are computed again. The baseline is",
             "the sequential layer of `bench/baseline/` (TorchTitan's order of operations) on the same GPUs in the same run;",
             "ratios are over it compiled, in brackets over it eager. Weight gradients are bf16 unless said otherwise."]
    for run in dict.fromkeys(record["run"] for record in records):
        in_run = [record for record in records if record["run"] == run]
        of_ours = [record for record in in_run if is_ours(record)]
        if of_ours:
            first, dense = of_ours[0], [record["dense_tflops"] for record in of_ours]
            lines += ["", f"Run {run}: source {first['commit'][:12]}, {first['hardware']}, P {min(dense):.0f} to {max(dense):.0f} TFLOP/s; for example",
                      f"`{first['command']}`."]
        for ranks, tokens in dict.fromkeys((r["ranks"], r["tokens_per_rank"]) for r in in_run):
            of_all_routings = [r for r in in_run if (r["ranks"], r["tokens_per_rank"]) == (ranks, tokens)]
            of_size = [r for r in of_all_routings if routing_of(r) == "uniform"]
            lines += ["", f"## {ranks} rank{'s' if ranks > 1 else ''} of {tokens} tokens, run {run}"]
            if of_size:
                lines += ["", *to_table(of_size, baselines)]
            if of_all_routings != of_size:
                lines += ["", "The rank with most rows decides. Where skewed routing has about the same share of its rows' time at P as uniform routing,",
                          "those rows explain what it costs.", "", *to_routing_table([r for r in of_all_routings if is_ours(r)])]
            default = [r for r in of_size if name_of(r) == "overlap, saved"]
            if not default:
                continue
            sequential = [r for r in of_size if name_of(r) == "sequential, saved"]
            lines += ["", *to_share_table(default), "",
                      "Stages are looked at in passes of their own, on the rank that receives most rows. What the first stages of the forward pass say is mostly the wait for",
                      "the host, which had just read the counters of the pass before.", "", *to_stage_table(default + sequential)]
    return "\n".join(lines) + "\n"


def print_table(records):
    """A line a record, for a terminal."""
    baselines = baselines_of(records)
    print(f"{'shape':12} {'R':>2} {'T':>6} {'routing':10} {'path, mode':38} {'fwd ms':>8} {'of P':>6} {'x':>5} {'bwd ms':>8} {'of P':>6} {'x':>5}")
    for record in sorted(records, key=lambda r: (r["ranks"], r["tokens_per_rank"], rank_of(r))):
        cells = []
        for pass_name in ("forward", "backward"):
            over = ratio(record, baselines, pass_name, compiled=True)
            share = record[f"{pass_name}_tflops"] / record["dense_tflops"]
            cells.append(f"{record[f'{pass_name}_ms']:8.3f} {share:6.3f} {f'{over:.2f}' if over else '':>5}")
        print(f"{record['shape']:12} {record['ranks']:2} {record['tokens_per_rank']:6} {routing_of(record):10} {name_of(record):38} {' '.join(cells)}")


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=pathlib.Path, help="layer_results.json of scripts/gpu_check")
    parser.add_argument("--output", type=pathlib.Path, required=True, help="folder of the record")
    parser.add_argument("--notes", type=pathlib.Path, help="what follows the tables, as it is")
    parser.add_argument("--name", required=True, help="of the hardware, in the names of the files")
    options = parser.parse_args(arguments)
    records = [record for path in options.results for record in json.loads(path.read_text())]
    notes = options.notes.read_text() if options.notes else ""
    (options.output / f"layer-{options.name}.json").write_text(json.dumps(records, indent=1) + "\n")
    (options.output / f"layer-{options.name}.md").write_text(to_markdown(records, baselines_of(records)) + notes)
    print_table(records)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
