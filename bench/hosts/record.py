#!/usr/bin/env python3
"""Makes the record of layers over two hosts out of what hosts_bench and `megamoe bench --launched` measured.

    record.py hosts.json [bench.json ...] --output bench/results --name h200x2 [--notes notes.md]

Writes hosts-NAME.json, all records, and hosts-NAME.md, the tables.
"""

import argparse
import json
import pathlib

INTRODUCTION = """# Layers over two hosts: {hardware}

Two processes of one machine with a GPU each stand in for hosts: they see each other by NCCL's sockets on the loopback
interface alone ({network}). Uniform random routing. Medians: {whose}.

- *rest*: before each timed pass, the same with overlap and without. A chip that computes without rests may lower its clock, and without overlap it rests while rows travel.
- *without*: the same pass with `Overlap::off`, where products and transfers take turns.
- *products*: theirs and what moves rows inside the host, in that pass. *transfer*: the pass's bytes at the bandwidth of
  messages of 32 MB in the same run.
- *first*, *last*: routing and the first group's tokens, and the last group's results, which nothing hides.
- *asked*: at most 1.10 times the longer of products and transfer, with first and last added.
- *GHz*: of the multiprocessors over the pass, and over the one without overlap.

CUDA {cuda}, NCCL {nccl}; for example
`{command}`.
"""


def whose_times(layers):
    """Records without times_of were made when only rank 0 was looked at."""
    of_layers = {record.get("times_of", "rank 0") for record in layers}
    if of_layers <= {"slowest rank"}:
        return "the slowest rank's"
    if of_layers == {"rank 0"}:
        return "of messages the slowest rank's, of layers rank 0's"
    raise SystemExit("hosts/record.py: some records of layers are of the slowest rank, others of rank 0: make two records")


def is_message(record):
    return record["benchmark"] == "message between hosts"


def is_layer(record):
    return record["benchmark"] == "layer over hosts"


def is_comparison_of_sizes(record):
    return record["benchmark"] == "sizes of messages"


def table(head, rows):
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines) + "\n"


def message_table(records):
    sizes = sorted({record["bytes"] for record in records})
    rows = []
    for run, ctas in sorted({(record["run"], record["network_ctas"]) for record in records}):
        of = {one["bytes"]: one for one in records if (one["run"], one["network_ctas"]) == (run, ctas)}
        cells = [f"{of[size]['ms']:.2f} ms, {of[size]['gbytes_per_s_each_way']:.2f} GB/s" for size in sizes]
        rows.append([next(iter(of.values()))["commit"], ctas, *cells])
    return table(["source", "CTAs", *(f"{size >> 10} KB each way" for size in sizes)], rows)


SIZES = """
## Exact or padded messages

The transfers of a forward and a backward call by themselves, one group of experts, H = {hidden_dim}, E = {num_experts}, K = {top_k}, {network_ctas} CTAs; source {commit}.

- *exact*: ranks count on the device, wait for the counts on the host, tell each other, and send what there is. *known*: until sizes are known, of it.
- *padded*: nobody asks; every message holds what any routing can need. *to the mean*: a quarter more than uniform routing needs on average, where that was enough.

"""


def sizes_table(records):
    rows = []
    for record in records:
        def cell(way):
            return f"{record[f'{way}_ms']:.2f} ms, {record[f'{way}_bytes'] / 1e6:.1f} MB"

        mean = cell("padded_to_mean") if record["padded_to_mean_fits"] else "too small"
        times = [cell("exact"), f"{record['agree_ms']:.2f} ms", cell("padded"), mean]
        rows.append([record["tokens_per_rank"], record["routing"], *times])
    return table(["tokens a rank", "routing", "exact", "known", "padded", "to the mean"], rows)


TIMES = ("ms", "off_ms", "compute_ms", "transfer_ms", "first_group_ms", "last_group_ms")


def layer_rows(record):
    """Of a layer with overlap."""
    for name in ("forward", "backward", "step"):
        times = record[name]
        longer = max(times["compute_ms"], times["transfer_ms"])
        asked = 1.10 * longer + times["first_group_ms"] + times["last_group_ms"]
        milliseconds = [f"{ms:.1f}" for ms in (*(times[of] for of in TIMES), asked)]
        # Older records have no clocks.
        clocks = f"{times['clock_ghz']:.2f} ({times['off_clock_ghz']:.2f})" if "clock_ghz" in times else ""
        groups = f"{record['groups']} (default)" if record.get("groups_by_default") else record["groups"]
        yield [record["network_ctas"], groups, name, *milliseconds, clocks]


def layer_tables(records):
    head = ["CTAs", "groups", "pass", "ms", "without", "products", "transfer", "first", "last", "asked", "GHz (without)"]
    members = ("tokens_per_rank", "hidden_dim", "intermediate_dim", "num_experts", "top_k", "mode")

    def key(record):
        return (*(record[member] for member in members), record.get("pause_ms", 0), record["commit"])

    for of in dict.fromkeys(key(record) for record in records):
        mine = sorted((record for record in records if key(record) == of), key=lambda record: record["network_ctas"])
        rows = [row for record in mine for row in layer_rows(record)]
        title = "\n## {} tokens a rank, H = {}, I = {}, E = {}, K = {}, {}\n\nRest {} ms; source {}.\n\n".format(*of)
        yield title + table(head, rows)


def bench_table(records):
    rows = [
        [record["commit"], record["shape"], record["tokens_per_rank"], record["mode"], "on" if record["path"] == "groups" else "off"]
        + [f"{record[f'{name}_ms']:.1f} [{', '.join(f'{ms:.1f}' for ms in record[f'{name}_ms_range'])}]"
           for name in ("forward", "backward")]
        for record in records
    ]
    return table(["source", "shape", "tokens a rank", "mode", "overlap", "forward, ms", "backward, ms"], rows)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", nargs="+", type=pathlib.Path)
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("bench/results"))
    parser.add_argument("--name", default="h200x2")
    parser.add_argument("--notes", type=pathlib.Path, help="ends the .md")
    options = parser.parse_args(arguments)
    records = [record for path in options.records for record in json.loads(path.read_text())]
    messages = [record for record in records if record.get("benchmark") and is_message(record)]
    sizes = [record for record in records if record.get("benchmark") and is_comparison_of_sizes(record)]
    layers = [record for record in records if record.get("benchmark") and is_layer(record)]
    layers = [record for record in layers if record["overlap"] == "on"]
    benches = [record for record in records if "benchmark" not in record]
    first = messages[0]
    text = INTRODUCTION.format(**first | first["versions"], whose=whose_times(layers))
    text += "\n## Messages between hosts\n\n" + message_table(messages)
    if sizes:
        text += SIZES.format(**sizes[0]) + sizes_table(sizes)
    text += "".join(layer_tables(layers))
    if benches:
        text += "\n## `megamoe bench --launched`\n\n" + bench_table(benches)
    if options.notes:
        text += "\n" + options.notes.read_text()
    (options.output / f"hosts-{options.name}.json").write_text(json.dumps(records, indent=1) + "\n")
    (options.output / f"hosts-{options.name}.md").write_text(text)


if __name__ == "__main__":
    main()
