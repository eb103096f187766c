"""The command line, the pictures of records and traces, the comparison of layers and the wheel."""

import itertools
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import zipfile

import pytest
import torch
from megamoe import __main__ as command
from megamoe import _library, plot
from programs import ROOT, load_program
from ranks import run_ranks


def test_info_says_what_can_run_and_why_not():
    text = command.info()
    assert "backend cpu: ready" in text and f"PyTorch {torch.__version__}" in text
    assert "backend cuda: " in text


def test_a_package_without_operators_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(_library, "PATH", pathlib.Path("/nowhere/_ops.so"))
    with pytest.raises(ImportError, match="operators are not at /nowhere/_ops.so. Install the package"):
        _library.load()
    monkeypatch.undo()
    monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")
    with pytest.raises(ImportError, match="needs PyTorch 2.11 or newer, this is 2.9.1"):
        _library.load()


@pytest.mark.parametrize("document", ["docs/pytorch.md", "README.md"])
def test_python_in_the_documents_runs(document, capsys):
    path = ROOT / document
    if not path.exists():
        pytest.skip(f"no {document}")
    for block in re.findall(r"^```python\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE):
        exec(compile(block, document, "exec"), {})


# ---- Pictures --------------------------------------------------------------------------------------------


def benchmark_record(**changes):
    record = {
        "layer": "megamoe",
        "path": "fused",
        "mode": "saved",
        "shape": "qwen3-30b",
        "tokens_per_rank": 8192,
        "ranks": 2,
        "dense_tflops": 770.0,
        "forward_ms": 2.0,
        "backward_ms": 4.0,
        "forward_tflops": 200.0,
        "backward_tflops": 300.0,
        "hardware": "a machine",
        "date": "2026-01-01",
    }
    return record | changes


def test_benchmark_records_become_bars(tmp_path, capsys):
    records = [
        benchmark_record(),
        benchmark_record(layer="grouped_mm", path=None, forward_ms=5.0),
        benchmark_record(shape="qwen3-235b"),
    ]
    file = tmp_path / "results.json"
    file.write_text(json.dumps(records))
    figure = plot.draw_layers(records)
    heights = sorted(patch.get_height() for patch in figure.axes[0].patches)
    assert heights == [2.0, 2.0, 5.0]
    assert plot.main([str(file), "--output", str(tmp_path)]) == 0
    for name in ("results.png", "results.svg"):
        assert (tmp_path / name).stat().st_size > 5000


def overlap(one, other):
    return one.x0 < other.x1 and other.x0 < one.x1 and one.y0 < other.y1 and other.y0 < one.y1


@pytest.mark.parametrize("name", ["layer-h200x2", "compare-h200x2", "cpu-2core", "step-h200x2", "train-step-h200x2"])
def test_every_committed_record_is_drawn_once_beside_the_legend(name):
    path = ROOT / "bench/results" / f"{name}.json"
    records = json.loads(path.read_text())
    figures = plot.draw([path])
    assert all(stem.startswith(name) for stem in figures)
    fields = ["step_ms"] if "step" in name else ["forward_ms", "forward_tflops", "backward_ms", "backward_tflops"]
    speeds = [record["ranks"] * record["tokens_per_rank"] / record["step_ms"] for record in records if "step" in name]
    expected = sorted(record[field] for field in fields for record in records) + sorted(speeds)
    assert sorted(
        patch.get_height() for figure in figures.values() for axis in figure.axes for patch in axis.patches
    ) == pytest.approx(sorted(expected))
    for figure in figures.values():
        figure.draw_without_rendering()
        (legend,) = figure.legends
        assert not any(overlap(legend.get_window_extent(), axis.get_tightbbox()) for axis in figure.axes)
        for axis in figure.axes:  # no bar or name over another
            names = [name.get_window_extent() for name in axis.get_xticklabels()]
            assert not any(overlap(*neighbours) for neighbours in zip(names, names[1:]))
            lefts = sorted(patch.get_x() for patch in axis.patches)
            assert all(right - left > 0.9 for left, right in zip(lefts, lefts[1:]))


def bars_of(figure, row=0):
    """Bar labels by the group's name."""
    axis = figure.axes[row]
    ticks = [(tick, name.get_text()) for tick, name in zip(axis.get_xticks(), axis.get_xticklabels())]
    bars = {name: {} for _, name in ticks}
    for container in axis.containers:
        for patch in container:
            middle = patch.get_x() + patch.get_width() / 2
            _, name = min(ticks, key=lambda tick: abs(tick[0] - middle))
            bars[name][container.get_label()] = patch.get_height()
    return bars


def test_records_that_differ_in_anything_are_bars_of_their_own():
    records = [
        benchmark_record(forward_ms=1.0),
        benchmark_record(forward_ms=2.0, ranks=1, dense_tflops=800.0),
        benchmark_record(forward_ms=3.0, weight_gradients="accumulate_fp32"),
        benchmark_record(forward_ms=4.0, run="another"),
        benchmark_record(forward_ms=5.0, run="another"),
    ]
    figure = plot.draw_layers(records)
    bars = bars_of(figure)
    assert bars["qwen3-30b\n1 rank"] == {"megamoe fused saved": 2.0}
    two = bars["qwen3-30b\n2 ranks"]
    assert sorted(two.values()) == [1.0, 3.0, 4.0, 5.0]
    assert [two[f"megamoe fused saved another (record {index})"] for index in (3, 4)] == [4.0, 5.0]
    (ceilings,) = figure.axes[2].collections
    assert sorted(segment[0][1] for segment in ceilings.get_segments()) == [770.0] * 4 + [800.0]
    figures = plot.draw_benchmarks([*records, benchmark_record(tokens_per_rank=1024)])
    assert list(figures) == ["-8192-tokens", "-1024-tokens"]


def test_logs_of_one_name_are_curves_of_their_own(tmp_path, capsys):
    files = []
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        files.append(tmp_path / str(number) / "log.jsonl")
        files[-1].write_text(json.dumps({"step": 1, "loss": number}))
    curves = plot.draw(files)["loss"].axes[0].lines
    assert [list(curve.get_ydata()) for curve in curves] == [[0], [1]]
    for file in files:
        file.write_text(json.dumps(benchmark_record()))
    assert plot.main([*map(str, files), "--output", str(tmp_path)]) == 1
    assert "1/log.jsonl: there is a picture log already" in capsys.readouterr().err


def test_training_logs_become_a_curve(tmp_path):
    file = tmp_path / "log.jsonl"
    file.write_text(
        "\n".join(json.dumps({"step": step, "loss": 5 - step}) for step in range(4)) + '\n{"held_out_loss": 2.5}\n'
    )
    curve = plot.draw_losses({"log": plot.load(file)}).axes[0].lines[0]
    assert list(curve.get_ydata()) == [5, 4, 3, 2]
    assert plot.main([str(file), "--output", str(tmp_path)]) == 0
    assert (tmp_path / "loss.png").exists() and (tmp_path / "loss.svg").exists()


@pytest.mark.parametrize(
    "content, message",
    [
        ("", "has no records"),
        ("[{]", "neither"),
        ("[1]", "other things than records"),
        ('[{"shape": "x"}]', "record 0 has no 'layer'"),
        ((ROOT / "bench/results/products-h200.json").read_text(), "no 'forward_ms'.*Drawn are records of a layer"),
        (json.dumps([{"layer": "x", "shape": "x", "ranks": 1, "step_ms": 1.0}]), "no 'tokens_per_rank', 'layers'"),
    ],
)
def test_other_files_are_refused(tmp_path, capsys, content, message):
    file = tmp_path / "other.json"
    file.write_text(content)
    assert plot.main([str(file), "--output", str(tmp_path)]) == 1
    assert re.search(message, capsys.readouterr().err)


# ---- Comparison ------------------------------------------------------------------------------------------


#: In place of the C++ program: writes what its bench would, and what it was asked for.
BENCH = """#!{python}
import json, sys
arguments = sys.argv[1:]
def after(name): return arguments[arguments.index(name) + 1]
path = {{"on": "fused", "off": "sequential"}}[after("--overlap")]
if path == {failing!r}:
    sys.exit("no such device")
shapes = arguments[arguments.index("--shape") + 1 :]
records = [
    dict(layer="megamoe", path=path, mode=after("--mode"), shape=shape, tokens_per_rank=int(after("--tokens")),
         ranks=int(after("--ranks")), forward_ms=1e6, backward_ms=1e-6, forward_tflops=1.0,
         backward_tflops=2.0, hardware="as told", date="2026-01-01", run="its own", command=" ".join(arguments))
    for shape in shapes
]
json.dump(records, open(after("--json"), "w"))
"""


def write_bench(folder, failing=None):
    program = folder / "megamoe"
    program.write_text(BENCH.format(python=sys.executable, failing=failing))
    program.chmod(0o755)
    return program


def compare_on_rank(rank, file, cpp):
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}  # as torchrun does
    program = load_program("bench/compare.py")
    program.join_group = lambda device: None  # the test has joined one
    arguments = ["--device", "cpu", "--shapes", "tiny", "--tokens", "64", "--layers", "megamoe,grouped_mm,torchtitan"]
    arguments += ["--runs", "2", "--warmups", "1", "--json", str(file), "--cpp", str(cpp)]
    records = program.compare(program.parse(arguments))
    return records, program.table(records), program.table_beside_cpp(records)


def test_layers_are_compared_in_one_run(tmp_path):
    file = tmp_path / "records.json"
    (records, table, beside), (others, _, nothing) = run_ranks(
        compare_on_rank, 2, tmp_path, file, write_bench(tmp_path)
    )
    assert json.loads(file.read_text()) == records
    ways = [(path, mode) for path in ("fused", "sequential") for mode in ("saved", "recompute")]
    of_cpp, measured = records[: len(ways)], records[len(ways) :]
    assert [(record["path"], record["mode"]) for record in of_cpp] == ways
    for record in of_cpp:
        assert (record["called_from"], record["hardware"], record["run"]) == ("C++", "as told", measured[0]["run"])
        assert record["command"].startswith("bench --backend cpu --ranks 2 --tokens 64 ")
        assert " --json bench.json " in record["command"]
    assert [record["forward_ms"] for record in measured] == [record["forward_ms"] for record in others]
    assert [(record["layer"], record["path"], record["mode"], record["ranks"]) for record in measured] == [
        *(("megamoe", *way, 2) for way in ways),
        ("grouped_mm", "sequential", "saved", 1),
        ("torchtitan", "sequential", "saved", 2),
    ]
    assert all(
        record["backward_ms"] > 0 and record["forward_idle_ms"] > 0 and record["run"] == measured[0]["run"]
        for record in measured
    )
    assert len(table.splitlines()) == len(records) + 2 and table.count("from C++") == len(ways)
    assert len(beside.splitlines()) == 3 * len(ways) + 1 and nothing == ""
    assert plot.main([str(file), "--output", str(tmp_path)]) == 0


def test_the_table_beside_cpp_tells_what_pytorch_costs():
    program = load_program("bench/compare.py")
    fields = {"forward_idle_ms": 2.0, "backward_ms": 100.0}
    cpp = benchmark_record(called_from="C++", forward_ms=2.0, **fields)
    ours = benchmark_record(called_from="PyTorch", forward_ms=2.0599, forward_idle_ms=2.0601, backward_ms=102.0)
    slower = benchmark_record(called_from="PyTorch", shape="qwen3-235b", forward_ms=1.0, **fields)
    lines = program.table_beside_cpp([cpp, ours, slower, benchmark_record(layer="torchtitan")]).splitlines()
    assert [line.split()[3:] for line in lines[1:]] == [
        ["forward", "2.000", "2.060", "60", "3.0%", "within"],
        ["from", "idle", "2.000", "2.060", "60", "3.0%", "more"],
        ["backward", "100.000", "102.000", "2000", "2.0%", "within"],
    ]


def test_a_cpp_program_that_fails_is_named(tmp_path):
    program = load_program("bench/compare.py")
    options = program.parse(["--device", "cpu", "--cpp", str(write_bench(tmp_path, failing="sequential"))])
    with pytest.raises(RuntimeError, match="--overlap off .* ended with 1: no such device"):
        program.records_of_cpp(options, 2)


def test_no_more_passes_are_timed_where_both_halves_agree(monkeypatch):
    program = load_program("bench/compare.py")
    assert program.is_steady([(1.0, 5.0), (9.0, 5.0), (1.0, 5.0)] * 2)
    assert not program.is_steady([(1.0, 5.0), (1.0, 5.0), (1.0, 5.1), (1.0, 5.1)])
    assert not program.is_steady([(1.0, 5.0)] * 2)

    class Clock:
        """Every pass takes what is next in `lengths`."""

        def __init__(self, device):
            self.meet, self.wait, self.mark = (lambda ahead: None), (lambda: None), (lambda: None)
            self.ms = lambda begin, end: next(lengths)

    monkeypatch.setattr(program, "Clock", Clock)
    monkeypatch.setattr(program, "slowest", lambda samples, device: samples)
    monkeypatch.setattr(program, "PAUSE_S", 0)
    options = program.parse(["--device", "cpu", "--runs", "8", "--warmups", "1"])
    for value, num_passes in ((lambda index: 50.0, 4), (lambda index: 50.0 + index, 8)):
        lengths = map(value, itertools.count())
        assert len(program.time_passes(lambda mark: [mark(), mark()], options, "cpu")) == num_passes


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--shapes other", "--shapes: other is not one of tiny, qwen3-30b"),
        ("--layers megamoe,other", "--layers: other is not one of megamoe, grouped_mm"),
        ("--paths other", "--paths: other is not one of fused, sequential"),
        ("--modes other", "--modes: other is not one of saved, recompute"),
        ("--cpp /nowhere/megamoe", "--cpp: /nowhere/megamoe is not a program"),
    ],
)
def test_the_comparison_refuses_options_by_name(arguments, message, capsys):
    with pytest.raises(SystemExit) as end:
        load_program("bench/compare.py").parse(arguments.split())
    assert end.value.code == 2 and f"error: {message}" in capsys.readouterr().err


def test_layers_that_differ_are_not_compared():
    program = load_program("bench/compare.py")
    leaf = torch.ones(4, 4, requires_grad=True)

    class Problem:
        dy = torch.ones(4, 4)

    same, other = (lambda: leaf * 2.0), (lambda: leaf * 2.1)
    program.check_results(Problem, [("a", same, [leaf, leaf]), ("b", same, [leaf, leaf])])
    with pytest.raises(RuntimeError, match="b: y differs from the first layer's by 0.05"):
        program.check_results(Problem, [("a", same, [leaf, leaf]), ("b", other, [leaf, leaf])])


def test_the_idle_share_counts_products_that_overlap_once(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench" / "baseline"))
    import idle_share

    assert idle_share.union_ms([(0, 1000), (500, 2000), (3000, 4000), (3200, 3300)]) == 3.0
    assert idle_share.union_ms([]) == 0
    names = {
        "nvjet_tst_128x256_64x4": True,
        "void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<GemmUniversal>>": True,
        "void megamoe::gpu::product_and_push_kernel<Down>": True,
        "void megamoe::gpu::gate_up_and_pull_kernel<SwiGlu>": True,
        "void megamoe::products::weight_gradient_kernel<true>": True,
        "void megamoe::gpu::weight_gradients_beside_rows_kernel<true>": True,
        "void megamoe::gpu::pull_kernel": False,
        "ncclDevKernel_SendRecv": False,
        "triton_poi_fused_mul_silu_0": False,
        "void at::native::index_elementwise_kernel<128>": False,
    }
    assert {name: idle_share.is_product(name) for name in names} == names


# ---- Wheel -----------------------------------------------------------------------------------------------


def test_the_wheel_holds_the_package_and_works(tmp_path):
    def run(*arguments, **environment):
        clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        result = subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env=clean | environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert result.returncode == 0, result.stdout
        return result.stdout

    # Without isolation: nothing is downloaded.
    launcher = {"CMAKE_CXX_COMPILER_LAUNCHER": "ccache"} if shutil.which("ccache") else {}
    without_cuda = ["-C", "cmake.define.MEGAMOE_CUDA=OFF"]  # kernels take minutes to compile
    options = ["--no-deps", "--no-build-isolation", "--wheel-dir", ".", *without_cuda]
    run("-m", "pip", "wheel", str(ROOT), *options, **launcher)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.startswith("megamoe-") and "-py3-none-linux" in wheel.name
    sources = {f"megamoe/{path.name}" for path in (ROOT / "python/megamoe").glob("*.py")}
    with zipfile.ZipFile(wheel) as archive:
        package = {name for name in archive.namelist() if name.startswith("megamoe/")}
    assert package == sources | {"megamoe/_ops.so", "megamoe/py.typed", "megamoe/__init__.pyi"}
    run("-m", "pip", "install", "--no-deps", "--no-index", "--target", "site", wheel.name)
    site = str(tmp_path / "site")
    text = run("-m", "megamoe", "info", PYTHONPATH=site)
    assert f"operators: {site}" in text and "backend cuda: this build has none" in text


def test_draw_trace_draws_stages_and_roles(tmp_path):
    def name(process, thread, words):
        return {"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": words}}

    def span(process, thread, words, begin, duration):
        return {"ph": "X", "name": words, "pid": process, "tid": thread, "ts": begin, "dur": duration}

    events = [name(0, 0, "stages"), span(0, 0, "gate_up", 0, 900), name(0, 5, "SM 003 math 0")]
    events += [span(0, 5, "main loop", 10 * i, 5) for i in range(80)]
    trace, picture = tmp_path / "trace.json", tmp_path / "picture.svg"
    trace.write_text(json.dumps({"traceEvents": events}))
    command_line = [sys.executable, ROOT / "scripts/draw_trace", trace, picture]
    subprocess.run(command_line, check=True)
    text = picture.read_text()
    assert ">gate_up<" in text and ">SM 003 math 0<" in text and "0.90 ms" in text
    assert text.count("v14h") == 80  # a box a span
    result = subprocess.run([*command_line, "--rank", "1"], capture_output=True, text=True)
    assert result.returncode == 1 and "no SM of rank 1" in result.stderr


STREAMS = [(0, "caller's stream"), (1, "network")]


def test_draw_trace_draws_both_streams_of_hosts_bench(tmp_path):
    names = [{"ph": "M", "name": "thread_name", "pid": 0, "tid": tid, "args": {"name": name}} for tid, name in STREAMS]
    spans = [
        {"ph": "X", "name": name, "pid": 0, "tid": tid, "ts": begin, "dur": 400}
        for tid, name, begin in [(0, "gate_up", 0), (0, "await_results", 400), (1, "rows", 0), (1, "results", 400)]
    ]
    trace, picture = tmp_path / "trace.json", tmp_path / "picture.svg"
    trace.write_text(json.dumps({"traceEvents": names + spans}))
    subprocess.run([sys.executable, ROOT / "scripts/draw_trace", trace, picture], check=True)
    text = picture.read_text()
    assert ">products<" in text and ">transfers<" in text and "0.80 ms" in text
    assert text.count(">gate_up<") == text.count(">results<") == 2  # in its box, and in the legend
    assert text.count("#eeeeee") == 2  # waits
