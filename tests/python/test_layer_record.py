"""The record of the layer, from records of the kind that scripts/gpu_check collects."""

import json

import pytest
from programs import load_program

SIZE = {"shape": "qwen3-30b", "tokens_per_rank": 8192, "ranks": 2, "dense_tflops": 800.0, "run": "one", "commit": "0" * 40}
OURS = SIZE | {
    "layer": "megamoe",
    "path": "fused",
    "mode": "saved",
    "weight_gradients": "store_bf16",
    "forward_ms": 1.0,
    "forward_ms_range": [0.9, 1.1],
    "forward_tflops": 400.0,
    "backward_ms": 2.0,
    "backward_ms_range": [1.9, 2.5],
    "backward_tflops": 600.0,
    "exposed_share": 0.017,
    "start_share": 0.026,
    "backward_exposed_share": 0.003,
    "backward_start_share": 0.004,
    "forward_tail_share": 0.06,
    "backward_tail_share": 0.01,
    "peers_awaited_share": 0.0,
    "summed_beside_share": 1.0,
    "clock_ghz": [1.354, 1.48],
    "dense_clock_ghz": 1.55,
    "forward_stages_ms": {"gate_up": 0.6, "down": 0.4, "reduce": 0.25},
    "backward_stages_ms": {"p": 0.5},
    "hardware": "2 x NVIDIA H200",
    "command": "megamoe bench",
}
BASELINE = SIZE | {
    "layer": "torchtitan",
    "compiled": True,
    "forward_ms": 4.0,
    "forward_tflops": 100.0,
    "backward_ms": 5.0,
    "backward_tflops": 240.0,
}
RECORDS = [
    OURS,
    OURS | {"weight_gradients": "accumulate_fp32", "backward_ms": 2.5, "backward_tflops": 480.0},
    BASELINE,
    BASELINE | {"compiled": False, "forward_ms": 6.0},
    # Another run and another size: what is above is no baseline of these.
    OURS | {"run": "two", "path": "sequential"},
    OURS | {"tokens_per_rank": 1024},
]


def write(folder, *runs):
    files = [folder / str(number) for number in range(len(runs))]
    for file, records in zip(files, runs):
        file.write_text(json.dumps(records))
    main = load_program("bench/layer_record.py").main
    assert main([*map(str, files), "--output", str(folder), "--name", "gpu"]) == 0


@pytest.fixture
def written(tmp_path):
    write(tmp_path, RECORDS[:4], RECORDS[4:])
    return json.loads((tmp_path / "layer-gpu.json").read_text()), (tmp_path / "layer-gpu.md").read_text()


def test_ratios_are_over_the_baseline_of_the_same_run_and_size(written):
    records, text = written
    assert records == RECORDS
    row = "| qwen3-30b | overlap, saved | 1.00 [0.90, 1.10] | 400, 0.500 |"
    assert f"{row} 4.00 (6.00) | 2.00 [1.90, 2.50] | 600, 0.750 | 2.50 (2.50) |" in text
    assert f"{row}  | 2.00 [1.90, 2.50] | 600, 0.750 |  |" in text  # 1024 tokens
    assert "| qwen3-30b | sequential, saved | 1.00 [0.90, 1.10] | 400, 0.500 |  |" in text
    assert "| qwen3-30b | baseline, compiled | 4.00 | 100, 0.125 |  | 5.00 | 240, 0.300 |  |" in text


def test_gradients_that_are_added_into_fp32_are_a_row_of_their_own(written):
    assert "| qwen3-30b | overlap, saved, added into fp32 |" in written[1]
    assert "| 2.50 [1.90, 2.50] | 480, 0.600 | 2.00 (2.00) |" in written[1]


def test_sizes_and_runs_have_their_own_tables(written):
    _, text = written
    headings = [line for line in text.splitlines() if line.startswith("## ")]
    assert headings == [
        "## 2 ranks of 8192 tokens, run one",
        "## 2 ranks of 1024 tokens, run one",
        "## 2 ranks of 8192 tokens, run two",
    ]
    assert "| forward: products together, of the pass | 1.00 (1.00) |" in text
    assert "| backward: products together, of the pass | 0.50 (0.25) |" in text
    assert "| forward: gate_up | 0.60 |" in text and "| 1.7% | 2.6% | 0.3% | 0.4% | 6.0% | 1.0% | 0.0% | 100.0% | 1.35, 1.48 (1.55) |" in text


def test_records_without_clocks_have_tables_too(tmp_path):
    write(tmp_path, [{name: value for name, value in OURS.items() if "clock" not in name}])
    assert "| 0.0% | 100.0% |  |" in (tmp_path / "layer-gpu.md").read_text()


def test_a_run_of_the_baseline_alone_has_a_table(tmp_path):
    write(tmp_path, [BASELINE])
    text = (tmp_path / "layer-gpu.md").read_text()
    assert "## 2 ranks of 8192 tokens, run one" in text and "| qwen3-30b | baseline, compiled | 4.00 |" in text
    assert "loaders" not in text and "stage, ms" not in text


def test_skewed_routing_is_judged_by_the_rows_of_the_busiest_rank(tmp_path):
    uniform = OURS | {"routing": "uniform", "top_k": 8, "busiest_rank_rows": 65536}
    uniform |= {"busiest_rank_floor_ms": {"forward": 0.5, "backward": 1.5}}
    skewed = uniform | {"routing": "zipf", "busiest_rank_rows": 131072, "forward_ms": 2.5, "backward_ms": 4.0}
    skewed |= {"busiest_rank_floor_ms": {"forward": 1.0, "backward": 3.0}}
    write(tmp_path, [skewed, uniform, BASELINE])
    text = (tmp_path / "layer-gpu.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| qwen3-30b | overlap, saved | ")]
    assert rows[1:3] == [
        "| qwen3-30b | overlap, saved | uniform | 65536 (1.00) | 1.00 | 0.50 | 2.00 | 0.75 |",
        "| qwen3-30b | overlap, saved | zipf | 131072 (2.00) | 2.50 | 0.40 | 4.00 | 0.75 |",
    ]
    assert len(rows) == 3 and "| 4.00 (" not in rows[0] and "| 4.00 |" in rows[0]
