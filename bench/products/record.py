#!/usr/bin/env python3
"""Makes the products' record out of what products_bench and bench/baseline/grouped_mm.py measured in one run.

    record.py products.json [torch.json] --output bench/results [--commit HASH] [--command TEXT]

Writes products-NAME.json and products-NAME.md to --output; NAME is that of the GPU. `scripts/gpu_check --skip
tests,sanitizers,layer,baseline` measures and calls this: that is the one command. FLOPs and bytes are
those of products_bench (ProductWork says what counts); P is its dense 8192^3 product and HBM its copy within the
device's memory, both of the same run. The floor of a product is the longer of FLOPs / P and bytes / HBM.
"""

import argparse
import json
import pathlib
import shlex
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from run_info import first_line, run_info  # noqa: E402

#: Products in the order of the table, what they are called there, and torch's on the same rows: with the same
#: epilogue, and alone.
PRODUCTS = {
    "gate_up": ("(a) gate_up", "gate_up_act", "gate_up"),
    "gate_up_saving": ("(a) gate_up, saving g and u", "gate_up_act", "gate_up"),
    "down": ("(b) down", "down", "down"),
    "p": ("(c) p and its epilogue", "p_act", "p"),
    "dx": ("(d) dx", "dx", "dx"),
    "dw_bf16": ("(e) weight gradients, bf16", "dw", "dw"),
    "dw_fp32": ("(e) weight gradients, fp32", None, None),
    "dw_fp32_add": ("(e) added into fp32", None, None),
}
#: The least shares of P.
LEAST_SHARES = {
    "qwen3-235b": {"gate_up": 0.82, "down": 0.78, "p": 0.78, "dx": 0.80, "dw_bf16": 0.76},
    "qwen3-30b": {"gate_up": 0.76, "down": 0.66, "p": 0.66, "dx": 0.70, "dw_bf16": 0.74},
    "deepseek-v3": {"gate_up": 0.76, "down": 0.74, "p": 0.72, "dx": 0.76, "dw_bf16": 0.68},
}


def circumstances(commit, command):
    """What all records of a run have in common."""
    query = ["nvidia-smi", "--format=csv,noheader", "--id=0"]
    return run_info(commit, command) | {
        "hardware": first_line([*query, "--query-gpu=name"]),
        "versions": {
            "cuda": first_line(["sh", "-c", "nvcc --version | tail -2"]),
            "torch": first_line([sys.executable, "-c", "import torch; print(torch.__version__)"]),
            "driver": first_line([*query, "--query-gpu=driver_version"]),
        },
    }


def product_record(measured, torch):
    """One product of one shape; `torch`: grouped_mm.py's products of that shape."""
    _, same, alone = PRODUCTS[measured["product"]]
    dense, copy = measured["dense_tflops"], measured["copy_tb_per_s"]
    tflops = measured["flops"] / measured["ms"] / 1e9
    tb_per_s = measured["bytes"] / measured["ms"] / 1e9
    flops_ms, bytes_ms = measured["flops"] / dense / 1e9, measured["bytes"] / copy / 1e9
    return {
        "ms": measured["ms"],
        "min_ms": measured["min_ms"],
        "max_ms": measured["max_ms"],
        "tflops": tflops,
        "share_of_dense": tflops / dense,
        "gigabytes": measured["bytes"] / 1e9,
        "share_of_copy": tb_per_s / copy,
        "floor_ms": max(flops_ms, bytes_ms),
        "binds": "FLOPs" if flops_ms >= bytes_ms else "bytes",
        "torch_tflops": torch.get(same, {}).get("tflops"),
        "torch_alone_tflops": torch.get(alone, {}).get("tflops"),
        "relative_error": measured["relative_error"],
    }


def make_records(measured, torch, fixed):
    """The records of bench/results/: ours, a shape each, then torch's. Of ours the kernel that the library chooses."""
    torch_products = {record["shape"]: record["products"] for record in torch}
    records = {}
    for one in measured:
        if one["sharing"] != "auto":
            continue
        entry = records.setdefault(
            one["shape"],
            {
                "layer": "megamoe",
                "shape": one["shape"],
                "tokens_per_rank": 8192,
                "ranks": 2,
                "dense_tflops": one["dense_tflops"],
                "copy_tb_per_s": one["copy_tb_per_s"],
                "products": {},
            },
        )
        entry["products"][one["product"]] = product_record(one, torch_products.get(one["shape"], {}))
    ours = [entry | fixed for entry in records.values()]
    return ours + [{"tokens_per_rank": 8192, "ranks": 2} | record | fixed for record in torch]


def in_order(record):
    """(name, product) of a record, as the table has them."""
    return [(name, record["products"][name]) for name in PRODUCTS if name in record["products"]]


def number(value, digits):
    return "" if value is None else f"{value:.{digits}f}"


def table(ours):
    lines = [
        "| shape | product | ms | TFLOP/s | share of P | GB | share of HBM | floor, ms | binds | torch, TFLOP/s "
        "| torch alone | relative error |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for record in ours:
        for name, product in in_order(record):
            lines.append(
                f"| {record['shape']} | {PRODUCTS[name][0]} | {product['ms']:.3f} | {product['tflops']:.0f} | "
                f"{product['share_of_dense']:.3f} | {product['gigabytes']:.2f} | {product['share_of_copy']:.2f} | "
                f"{product['floor_ms']:.3f} | {product['binds']} | {number(product['torch_tflops'], 0)} | "
                f"{number(product['torch_alone_tflops'], 0)} | {product['relative_error']:.2e} |"
            )
    return lines


def missed(ours):
    """A line for each product that misses its least share of P, or is slower than torch's where shares are asked."""
    lines = []
    for record in ours:
        for name, least in LEAST_SHARES.get(record["shape"], {}).items():
            if name not in record["products"]:
                raise ValueError(f"{record['shape']}: {name} was not measured")
            share = record["products"][name]["share_of_dense"]
            if share < least:
                lines.append(f"- {record['shape']} {PRODUCTS[name][0]}: {share:.3f} P, asked {least:.2f}")
    return lines + slower([record for record in ours if record["shape"] in LEAST_SHARES])


def slower(ours, theirs="torch_tflops"):
    """A line for each product that torch's outruns: with the same epilogue, or `theirs`."""
    return [
        f"- {record['shape']} {PRODUCTS[name][0]}: {product['tflops']:.0f} TFLOP/s, torch's {product[theirs]:.0f}"
        for record in ours
        for name, product in in_order(record)
        if product[theirs] is not None and product["tflops"] < product[theirs]
    ]


def added_traffic(ours):
    lines = ["| shape | GB | ms | TB/s | share of HBM |", "|---|---|---|---|---|"]
    for record in ours:
        if product := record["products"].get("dw_fp32_add"):
            rate = product["gigabytes"] / product["ms"]
            lines.append(
                f"| {record['shape']} | {product['gigabytes']:.1f} | {product['ms']:.2f} | {rate:.2f} | "
                f"{product['share_of_copy']:.2f} |"
            )
    return lines


def shares_asked():
    lines = ["| shape | (a) | (b) | (c) | (d) | (e) bf16 |", "|---|---|---|---|---|---|"]
    for shape, least in LEAST_SHARES.items():
        lines.append(f"| {shape} | " + " | ".join(f"{share:.2f}" for share in least.values()) + " |")
    return lines


def document(records):
    ours = [record for record in records if record["layer"] == "megamoe"]
    first = ours[0]
    versions = first["versions"]
    short = missed(ours)
    elsewhere = slower([record for record in ours if record["shape"] not in LEAST_SHARES])
    plain = slower(ours, "torch_alone_tflops")
    return "\n".join(
        [
            f"# The products on one {first['hardware']}",
            "",
            f"Run {first['run']}, source {first['commit'][:12]}, {versions['cuda']}, driver {versions['driver']}, "
            f"torch {versions['torch']}; measured and",
            f"written by `{first['command']}`. All records are in {file_stem(first)}.json.",
            "",
            f"P, a dense 8192^3 product of bf16 through cuBLAS in the same run: {first['dense_tflops']:.1f} TFLOP/s. HBM, a",
            f"copy within the device's memory: {first['copy_tb_per_s']:.2f} TB/s read and written. Rows as 8192 tokens a rank,",
            "two ranks and uniform random routing give them; useful FLOPs only; medians of bursts of about 40 ms, ours and",
            "torch's alike (docs/perf_log.md says why). GB: every operand and result once. The floor is the longer of",
            "FLOPs / P and bytes / HBM. Torch is `torch._grouped_mm` on the same rows, with the activation of gate_up and the",
            'epilogue of p as one compiled elementwise kernel after it; "torch alone" is its product without them.',
            "",
            *table(ours),
            "",
            "## Against what is asked",
            "",
            "The least shares of P; each product of these shapes is also to be as fast as torch's with the same epilogue:",
            "",
            *shares_asked(),
            "",
            *(["Missed:", "", *short] if short else ["All hold."]),
            *(["", "At other shapes slower than torch's:", "", *elsewhere] if elsewhere else []),
            *(["", "With its epilogue slower than torch's product without one:", "", *plain] if plain else []),
            "",
            "## Adding into fp32",
            "",
            "Bound by memory where anything is: old values in, sums out, beside the operands.",
            "",
            *added_traffic(ours),
            "",
        ]
    )


def file_stem(record):
    return "products-" + record["hardware"].replace("NVIDIA", "").strip().lower().replace(" ", "-")


def write(records, folder):
    """Both files; the path of the second."""
    text = document(records)
    stem = folder / file_stem(records[0])
    stem.with_suffix(".json").write_text(json.dumps(records, indent=1) + "\n")
    stem.with_suffix(".md").write_text(text)
    return stem.with_suffix(".md")


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("products", type=pathlib.Path, help="--json of products_bench")
    parser.add_argument("torch", type=pathlib.Path, nargs="?", help="--json of grouped_mm.py")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("bench/results"))
    parser.add_argument("--commit", default="", help="of the measured source, where the tree is not a git checkout")
    parser.add_argument("--command", default=shlex.join(["bench/products/record.py", *sys.argv[1:]]))
    args = parser.parse_args(arguments)
    torch = json.loads(args.torch.read_text()) if args.torch else []
    records = make_records(json.loads(args.products.read_text()), torch, circumstances(args.commit, args.command))
    print(write(records, args.output))
    return 0


if __name__ == "__main__":
    sys.exit(main())
