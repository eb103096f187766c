"""The record of the products, from small files of the kind that products_bench and grouped_mm.py write."""

import json

import pytest
from programs import load_program

#: P is 800 TFLOP/s and memory 4 TB/s. down: 400 TFLOP/s, FLOPs take 1 ms and bytes 0.5. dw_fp32_add: 100 TFLOP/s,
#: 0.5 ms and 3.
MEASURED = [
    {"shape": "qwen3-30b", "product": "down", "sharing": "auto", "ms": 2.0, "flops": 8e11, "bytes": 2e9},
    {"shape": "qwen3-30b", "product": "down", "sharing": "rows", "ms": 1.0, "flops": 8e11, "bytes": 2e9},
    {"shape": "qwen3-30b", "product": "dw_fp32_add", "sharing": "auto", "ms": 4.0, "flops": 4e11, "bytes": 12e9},
    {"shape": "mixtral", "product": "dx", "sharing": "auto", "ms": 1.0, "flops": 7e11, "bytes": 1e9},
]
RUN = {"dense_tflops": 800.0, "copy_tb_per_s": 4.0, "min_ms": 0.5, "max_ms": 5.0, "relative_error": 1.66e-3}
TORCH = [
    {
        "layer": "grouped_mm",
        "shape": "qwen3-30b",
        "dense_tflops": 790.0,
        "products": {"down": {"ms": 2.5, "tflops": 320.0}},
    },
    {
        "layer": "grouped_mm",
        "shape": "mixtral",
        "dense_tflops": 790.0,
        "products": {"dx": {"ms": 0.9, "tflops": 777.0}},
    },
]


@pytest.fixture
def record():
    module = load_program("bench/products/record.py")
    # These rows have few of the products; the shares asked are the module's own.
    module.LEAST_SHARES = {"qwen3-30b": {"down": module.LEAST_SHARES["qwen3-30b"]["down"]}}
    return module


@pytest.fixture
def files(tmp_path):
    paths = tmp_path / "products.json", tmp_path / "torch.json"
    paths[0].write_text(json.dumps([one | RUN for one in MEASURED]))
    paths[1].write_text(json.dumps(TORCH))
    return [str(path) for path in paths]


def written(record, folder, files, monkeypatch):
    monkeypatch.setattr(
        record, "first_line", lambda command: "NVIDIA H200" if "--query-gpu=name" in command else "some version"
    )
    assert record.main([*files, "--output", str(folder), "--commit", "0123456789abcdef", "--command", "a command"]) == 0
    text = (folder / "products-h200.md").read_text()
    return json.loads((folder / "products-h200.json").read_text()), text


def test_floors_and_shares_follow_from_flops_and_bytes(record, tmp_path, files, monkeypatch):
    records, text = written(record, tmp_path, files, monkeypatch)
    assert [(one["layer"], one["shape"]) for one in records] == [
        ("megamoe", "qwen3-30b"),
        ("megamoe", "mixtral"),
        ("grouped_mm", "qwen3-30b"),
        ("grouped_mm", "mixtral"),
    ]
    assert all(one["commit"] == "0123456789abcdef" and one["command"] == "a command" for one in records)
    assert len({one["run"] for one in records}) == 1
    down, added = records[0]["products"]["down"], records[0]["products"]["dw_fp32_add"]
    expected = {
        "ms": 2.0,
        "tflops": 400.0,
        "share_of_dense": 0.5,
        "gigabytes": 2.0,
        "share_of_copy": 0.25,
        "floor_ms": 1.0,
    }
    assert {name: down[name] for name in expected} == pytest.approx(expected)
    assert (down["binds"], down["torch_tflops"], down["torch_alone_tflops"]) == ("FLOPs", 320.0, 320.0)
    expected = {"tflops": 100.0, "share_of_dense": 0.125, "gigabytes": 12.0, "share_of_copy": 0.75, "floor_ms": 3.0}
    assert {name: added[name] for name in expected} == pytest.approx(expected)
    assert (added["binds"], added["torch_tflops"]) == ("bytes", None)
    assert "| qwen3-30b | (b) down | 2.000 | 400 | 0.500 | 2.00 | 0.25 | 1.000 | FLOPs | 320 | 320 | 1.66e-03 |" in text
    assert "| qwen3-30b | 12.0 | 4.00 | 3.00 | 0.75 |" in text


def test_what_falls_short_is_named(record, tmp_path, files, monkeypatch):
    _, text = written(record, tmp_path, files, monkeypatch)
    assert "Missed:\n\n- qwen3-30b (b) down: 0.500 P, asked 0.66\n" in text and "All hold" not in text
    assert "At other shapes slower than torch's:\n\n- mixtral (d) dx: 700 TFLOP/s, torch's 777\n" in text
    assert "slower than torch's product without one:\n\n- mixtral (d) dx: 700 TFLOP/s, torch's 777\n\n##" in text
    record.LEAST_SHARES = {"qwen3-30b": {"down": 0.49}}
    assert "All hold." in written(record, tmp_path, files, monkeypatch)[1]
    record.LEAST_SHARES["mixtral"] = {}
    assert "Missed:\n\n- mixtral (d) dx: 700 TFLOP/s, torch's 777\n" in written(record, tmp_path, files, monkeypatch)[1]


def test_a_product_that_was_asked_for_and_not_measured_is_no_record(record, tmp_path, files, monkeypatch):
    record.LEAST_SHARES = {"qwen3-30b": {"down": 0.49, "p": 0.6}}
    with pytest.raises(ValueError, match="qwen3-30b: p was not measured"):
        written(record, tmp_path, files, monkeypatch)
    assert not list(tmp_path.glob("products-h200.*"))


def test_without_torch_only_ours_is_recorded(record, tmp_path, files, monkeypatch):
    records, text = written(record, tmp_path, files[:1], monkeypatch)
    assert [one["layer"] for one in records] == ["megamoe", "megamoe"]
    assert records[0]["products"]["down"]["torch_tflops"] is None and "slower than torch" not in text


def layers_of(records):
    return [record for record in records if record["benchmark"] == "layer over hosts" and record["overlap"] == "on"]


def test_the_record_of_layers_over_hosts(tmp_path):
    run = {
        "commit": "0123456789ab",
        "hardware": "2 x NVIDIA H200",
        "network": "NCCL_NET=Socket",
        "versions": {"cuda": "13.0", "nccl": "2.28.9"},
        "command": "hosts_bench",
        "run": "one",
    }
    message = {"benchmark": "message between hosts", "network_ctas": 8, "ms": 0.5, "gbytes_per_s_each_way": 2.0}
    times = {"ms": 22.0, "off_ms": 31.0, "compute_ms": 9.0, "transfer_ms": 21.0, "first_group_ms": 2.5}
    times |= {"last_group_ms": 2.0}
    passes = {name: times for name in ("forward", "backward", "step")}
    clocked = {name: times | {"clock_ghz": 1.354, "off_clock_ghz": 1.5} for name in passes}
    shape = {"tokens_per_rank": 4096, "hidden_dim": 1024, "intermediate_dim": 32768, "num_experts": 16, "top_k": 8}
    layer = {"benchmark": "layer over hosts", "mode": "recompute", "network_ctas": 8, "pause_ms": 200} | shape | passes
    ways = [
        {"overlap": "off", "groups": 1, "groups_by_default": False},
        {"overlap": "on", "groups": 4, "groups_by_default": False},
        {"overlap": "on", "groups": 5, "groups_by_default": True} | clocked,
    ]
    times_of_sizes = {"agree_ms": 0.2, "exact_ms": 5.0, "exact_bytes": 8_000_000, "padded_ms": 9.0}
    times_of_sizes |= {"padded_bytes": 16_000_000, "padded_to_mean_ms": 6.0, "padded_to_mean_bytes": 10_000_000}
    comparison = {"benchmark": "sizes of messages", "network_ctas": 4, "hidden_dim": 1024, "num_experts": 16, "top_k": 8}
    comparison |= {"tokens_per_rank": 4096} | times_of_sizes
    routings = [{"routing": "uniform", "padded_to_mean_fits": True}, {"routing": "zipf", "padded_to_mean_fits": False}]
    bench = {
        "commit": "0123456789ab",
        "shape": "qwen3-30b",
        "tokens_per_rank": 8192,
        "mode": "saved",
        "path": "groups",
        "forward_ms": 90.0,
        "forward_ms_range": [89.0, 95.0],
        "backward_ms": 100.0,
        "backward_ms_range": [99.0, 101.0],
    }
    sizes = [{"bytes": size} for size in (4 << 10, 1 << 20)]
    records = [message | size | run for size in sizes] + [layer | way | run for way in ways]
    records += [comparison | routing | run for routing in routings]
    (tmp_path / "hosts.json").write_text(json.dumps(records))
    (tmp_path / "bench.json").write_text(json.dumps([bench]))
    (tmp_path / "notes.md").write_text("What it says.\n")
    module = load_program("bench/hosts/record.py")
    inputs = [str(tmp_path / "hosts.json"), str(tmp_path / "bench.json"), "--notes", str(tmp_path / "notes.md")]
    module.main([*inputs, "--output", str(tmp_path), "--name", "two"])
    assert json.loads((tmp_path / "hosts-two.json").read_text()) == [*records, bench]
    text = (tmp_path / "hosts-two.md").read_text()
    assert "| 0123456789ab | 8 | 0.50 ms, 2.00 GB/s | 0.50 ms, 2.00 GB/s |" in text
    assert text.count("| forward | 22.0 |") == 2  # without overlap it is a column of the others
    assert "| 8 | 5 (default) | step | 22.0 |" in text
    assert "| 4096 | uniform | 5.00 ms, 8.0 MB | 0.20 ms | 9.00 ms, 16.0 MB | 6.00 ms, 10.0 MB |" in text
    assert "| 4096 | zipf | 5.00 ms, 8.0 MB | 0.20 ms | 9.00 ms, 16.0 MB | too small |" in text
    assert "| 8 | 4 | step | 22.0 | 31.0 | 9.0 | 21.0 | 2.5 | 2.0 | 27.6 |  |" in text
    assert "| 8 | 5 (default) | step | 22.0 | 31.0 | 9.0 | 21.0 | 2.5 | 2.0 | 27.6 | 1.35 (1.50) |" in text
    assert "| 0123456789ab | qwen3-30b | 8192 | saved | on | 90.0 [89.0, 95.0] | 100.0 [99.0, 101.0] |" in text
    assert text.endswith("What it says.\n")
    assert "of messages the slowest rank's, of layers rank 0's" in text
    told = [record | ({"times_of": "slowest rank"} if record in layers_of(records) else {}) for record in records]
    (tmp_path / "hosts.json").write_text(json.dumps(told))
    module.main([*inputs, "--output", str(tmp_path), "--name", "two"])
    assert "Medians: the slowest rank's." in (tmp_path / "hosts-two.md").read_text()
    told[records.index(layers_of(records)[0])] = layers_of(records)[0]
    (tmp_path / "hosts.json").write_text(json.dumps(told))
    with pytest.raises(SystemExit, match="make two records"):
        module.main([*inputs, "--output", str(tmp_path), "--name", "two"])
