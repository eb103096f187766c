"""Times torch._grouped_mm on the ragged rows that products_bench used (--rows rows.json), for the same products.

    python3 grouped_mm.py rows.json [--shapes qwen3-235b,...] [--json out.json]

gate_up is one product over the fused weights [e, 2I, H]; gate_up_act adds silu(g) * u, compiled; dx is one product over
[dg | du] and the fused weights; dw is d_down plus d_gate and d_up fused. Medians, TFLOP/s of useful FLOPs.
"""
import argparse
import json
import statistics
import time

import torch


def median_ms(run):
    """As products_bench times: a pause, then a burst of about 40 ms, because the clock falls under sustained load."""
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    repetitions = max(7, min(25, int(40 / start.elapsed_time(end))))
    time.sleep(0.2)
    for _ in range(2):
        run()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repetitions + 1)]
    events[0].record()
    for i in range(repetitions):
        run()
        events[i + 1].record()
    torch.cuda.synchronize()
    return statistics.median(events[i].elapsed_time(events[i + 1]) for i in range(repetitions))


def dense_tflops():
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    b = torch.randn_like(a)
    return 2 * 8192**3 / median_ms(lambda: a @ b) / 1e9


def measure(shape):
    hidden, intermediate, rows = shape["hidden"], shape["intermediate"], shape["rows"]
    total, experts = sum(rows), len(rows)
    offsets = torch.tensor(rows, device="cuda").cumsum(0).to(torch.int32)

    def randn(*size):
        return torch.randn(*size, device="cuda", dtype=torch.bfloat16)

    x_NH, a_NI, gu_N2I = randn(total, hidden), randn(total, intermediate), randn(total, 2 * intermediate)
    down_eHI = randn(experts, hidden, intermediate) * intermediate**-0.5
    fused_e2IH = randn(experts, 2 * intermediate, hidden) * hidden**-0.5
    mm = torch._grouped_mm
    act = torch.compile(lambda h: torch.nn.functional.silu(h[:, :intermediate]) * h[:, intermediate:])
    # dw needs each group's first row at a multiple of 8: sizes are rounded up for both, FLOPs counted as useful.
    padded = [(r + 7) // 8 * 8 for r in rows]
    padded_offsets = torch.tensor(padded, device="cuda").cumsum(0).to(torch.int32)
    dy_NH, wa_NI, dgu_N2I = randn(sum(padded), hidden), randn(sum(padded), intermediate), randn(sum(padded), 2 * intermediate)

    def dw():
        mm(dy_NH.t(), wa_NI, offs=padded_offsets)
        mm(dgu_N2I.t(), dy_NH, offs=padded_offsets)

    flops = total * hidden * intermediate
    runs = {
        "down": (2, lambda: mm(a_NI, down_eHI.transpose(-2, -1), offs=offsets)),
        "gate_up": (4, lambda: mm(x_NH, fused_e2IH.transpose(-2, -1), offs=offsets)),
        "gate_up_act": (4, lambda: act(mm(x_NH, fused_e2IH.transpose(-2, -1), offs=offsets))),
        "p": (2, lambda: mm(x_NH, down_eHI, offs=offsets)),
        "dx": (4, lambda: mm(gu_N2I, fused_e2IH, offs=offsets)),
        "dw": (6, dw),
    }
    results = {}
    for name, (multiple, run) in runs.items():
        ms = median_ms(run)
        results[name] = {"ms": round(ms, 4), "tflops": round(multiple * flops / ms / 1e9, 1)}
    return results


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows")
    parser.add_argument("--shapes", default="qwen3-235b,qwen3-30b,deepseek-v3")
    parser.add_argument("--json")
    args = parser.parse_args()
    with open(args.rows) as file:
        shapes = json.load(file)
    dense = dense_tflops()
    records = []
    for name in args.shapes.split(","):
        results = measure(shapes[name])
        records.append({"layer": "grouped_mm", "shape": name, "dense_tflops": round(dense, 1), "products": results})
        text = ", ".join(f"{k} {v['tflops']:.0f} ({v['tflops'] / dense:.3f} P)" for k, v in results.items())
        print(f"torch {name}: {text}; dense {dense:.0f}", flush=True)
        torch.cuda.empty_cache()
    if args.json:
        with open(args.json, "w") as file:
            json.dump(records, file, indent=1)


if __name__ == "__main__":
    main()
