"""scripts/gpu_check with programs that stand in for those of a build."""

import json
import os
import pathlib
import subprocess
import sys

from programs import ROOT, load_program


def test_gpu_check_names_failures_and_leaves_nothing_running(tmp_path):
    programs = load_program("scripts/gpu_check").TEST_PROGRAMS
    verified = ["verify_1_rank", "verify_2_ranks", "verify_2_ranks_adding_into_fp32"]
    child = tmp_path / "child"
    leaves_a_child = f"sleep 600 & echo $! >> {child}"
    scripts = {programs[1]: "echo wrong; exit 3", programs[2]: f"{leaves_a_child}; wait", programs[3]: leaves_a_child}
    for program in programs:
        path = tmp_path / program
        path.write_text(f"#!/bin/sh\n{scripts.get(program, 'exit 0')}\n")
        path.chmod(0o755)
    verify = tmp_path / "megamoe"
    verify.write_text('#!/bin/sh\necho "$@"; [ "$*" != "verify --backend cuda --ranks 2" ]\n')
    verify.chmod(0o755)
    traced = tmp_path / "traced" / "trace_gpu_test"
    traced.parent.mkdir()
    traced.write_text("#!/bin/sh\necho '[  PASSED  ] 3 tests.'; echo '[  SKIPPED ] 1 test, listed below:'\n")
    traced.chmod(0o755)
    measurements = "python,sanitizers,bench,torch,layer,baseline"
    options = ["--bin", tmp_path, "--trace-bin", traced.parent, "--out", tmp_path / "out", "--timeout", "2", "--skip"]
    command_line = [sys.executable, ROOT / "scripts/gpu_check", *options]
    result = subprocess.run([*command_line, measurements], capture_output=True, text=True)
    assert result.returncode == 1, result.stderr
    failed = {programs[1]: "FAILED (3)", programs[2]: "FAILED (timeout)", verified[1]: "FAILED (1)"}
    names = [*programs, *verified]
    assert result.stdout.splitlines() == [f"{name}: {failed.get(name, 'ok')}" for name in names]
    for number, name in zip((1, 2, 2), verified):
        ran = (tmp_path / "out" / f"{name}.log").read_text()
        assert ran.startswith(f"verify --backend cuda --ranks {number}")
    assert "--weight-gradients accumulate-fp32" in ran
    assert (tmp_path / "out" / f"{programs[1]}.log").read_text() == "wrong\n"
    (file,) = (tmp_path / "out").glob("checks-*.json")
    (record,) = json.loads(file.read_text())
    checks = {check["check"]: check for check in record["checks"]}
    assert {name: check["result"] for name, check in checks.items()} == {
        name: failed.get(name, "ok") for name in names
    }
    assert checks["trace_gpu_test"]["tests_passed"] == 3 and checks["trace_gpu_test"]["tests_skipped"] == 1
    for pid in child.read_text().split():
        status = pathlib.Path(f"/proc/{pid}/status")
        assert not status.exists() or "State:\tZ" in status.read_text()
    result = subprocess.run([*command_line, "tests,sanitisers"], capture_output=True, text=True)
    assert result.returncode == 2 and "--skip: no sanitisers; there are tests, python, sanitizers" in result.stderr


def test_gpu_check_runs_the_programs_that_are_named_under_the_sanitizers_that_are(tmp_path):
    tool = tmp_path / "path" / "compute-sanitizer"
    tool.parent.mkdir()
    tool.write_text('#!/bin/sh\necho "$@"\n')
    tool.chmod(0o755)
    skipped = "tests,python,bench,torch,layer,baseline"
    options = ["--bin", tmp_path, "--out", tmp_path / "out", "--skip", skipped, "--sanitizers", "memcheck,synccheck"]
    command_line = [sys.executable, ROOT / "scripts/gpu_check", *options, "--programs", "layer_gpu_test,peers"]
    environment = os.environ | {"PATH": f"{tool.parent}:{os.environ['PATH']}"}
    result = subprocess.run(command_line, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    names = ["memcheck_layer_gpu_test", "memcheck_peers", "synccheck_layer_gpu_test", "synccheck_peers"]
    assert result.stdout.splitlines() == [f"{name}: ok" for name in names]
    # Gradients beside dx: of one rank, and of two processes, where the kernels that send rows are watched.
    of_one = (tmp_path / "out" / "memcheck_layer_gpu_test.log").read_text()
    of_two = (tmp_path / "out" / "memcheck_peers.log").read_text()
    assert "--tool memcheck" in of_one and "CudaBesideDx.OneRank" in of_one
    assert "--target-processes all" in of_two and "beside_rows" in of_two and "CudaProcesses." in of_two
