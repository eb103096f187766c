"""The share of a stage's time in which no matrix product runs on the GPU: the tensor cores are idle."""

import time

import torch
from torch.profiler import ProfilerActivity, profile

#: Before each profiled run, as before the timed ones: without it the clock falls, and products take longer than timed.
PAUSE_S = 0.2
#: Words in the names of kernels that multiply matrices: cuBLAS, CUTLASS (torch._grouped_mm), Triton and megamoe.
PRODUCTS = (
    *("gemm", "nvjet", "cutlass", "xmma", "triton_mm"),
    *("product_", "and_pull_kernel", "gradient_kernel", "gradients_beside_rows_kernel"),
)


def union_ms(spans_us):
    """Length of the union of (begin, end) spans."""
    total, end_so_far = 0.0, float("-inf")
    for begin, end in sorted(spans_us):
        total += max(0.0, end - max(begin, end_so_far))
        end_so_far = max(end_so_far, end)
    return total / 1e3


def is_product(name):
    return any(word in name.lower() for word in PRODUCTS)


def products_ms(run, num_runs=3):
    """GPU time with a product running in one run() of this rank, ms: the mean over num_runs."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(num_runs):
            time.sleep(PAUSE_S)
            run()
            torch.cuda.synchronize()
    spans = [
        (event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA and is_product(event.name)
    ]
    return union_ms(spans) / num_runs


def idle_share(run, stage_ms):
    """Of stage_ms, how long run() takes. Its kernels are timed under the profiler, but the stage is not: the profiler
    delays launches, and with them what lies between kernels."""
    return max(0.0, 1 - products_ms(run) / stage_ms)
