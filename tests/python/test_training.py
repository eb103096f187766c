"""The training example, and the comparison of training steps."""

import json
import re

import pytest
import torch
import torch.distributed as dist
from programs import ROOT, load_program
from ranks import run_ranks
from torch.distributed.run import get_args_parser


def train(folder, *arguments, module=None):
    text = folder / "text"
    if not text.exists():
        text.write_bytes((ROOT / "LICENSE").read_bytes())
    module = module or load_program("examples/train_qwen3_moe.py")
    fixed = ["--text", str(text), "--layers", "1", "--batch", "4", "--sequence", "32", "--device", "cpu"]
    return module.train(module.parse([*fixed, *map(str, arguments)]))


def losses(records):
    return [record["loss"] for record in records]


def test_the_example_learns_and_resumes_where_it_stopped(tmp_path):
    records = train(tmp_path, "--steps", 8, "--log-file", tmp_path / "log.jsonl")
    assert losses(records)[-1] < losses(records)[0] - 0.5
    assert all(0 < record["moe_share"] < 1 and record["tokens_per_s"] > 0 for record in records)
    assert [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()] == records

    checkpoint = ["--checkpoint", tmp_path / "checkpoint"]
    first = train(tmp_path, "--steps", 5, *checkpoint)
    rest = train(tmp_path, "--steps", 8, *checkpoint, "--resume")
    assert losses(first + rest) == losses(records)

    # The log of a run that went on for two steps behind its checkpoint, and ended within a line.
    log = tmp_path / "log.jsonl"
    kept = log.read_text().splitlines()[:5]
    log.write_text("\n".join([*kept, '{"step": 6, "loss": 1}', '{"step": 7, "loss": 1}', '{"step": 8, "lo']))
    train(tmp_path, "--steps", 5, "--checkpoint", tmp_path / "again")
    again = train(tmp_path, "--steps", 7, "--checkpoint", tmp_path / "again", "--resume", "--log-file", log)
    assert log.read_text().splitlines() == kept + [json.dumps(record) for record in again]

    other = train(tmp_path, "--steps", 8, "--experts", "grouped_mm")
    assert losses(other) == pytest.approx(losses(records), rel=0.02)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--resume", "--resume: needs --checkpoint"),
        ("--save-every 2", "--save-every: needs --checkpoint"),
        ("--batch 0", "--batch: 0 is less than 1"),
        ("--sequence 1", "--sequence: 1 is less than 2"),
        ("--layers 0", "--layers: 0 is less than 1"),
        ("--layers x", "--layers: invalid"),
        ("--text /nowhere/text", "--text: /nowhere/text is not a file"),
        ("--log-file /nowhere/log", "--log-file: /nowhere/log is a folder, or in none"),
        ("--checkpoint /dev/null", "--checkpoint: /dev/null is not a folder"),
        ("--device cuda --experts grouped_mm", "--device: PyTorch finds no CUDA device"),
        ("--device cuda", "--device: backend cuda: "),
    ],
)
def test_the_example_refuses_options_by_name(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if arguments == "--device cuda" and not torch.ops.megamoe.backend_refusal("cuda"):
        pytest.skip("this machine has what the option asks for")
    module = load_program("examples/train_qwen3_moe.py")
    with pytest.raises(SystemExit) as end:
        module.parse(f"--text {ROOT / 'LICENSE'} {arguments}".split())
    assert end.value.code == 2 and f"error: argument {message}" in capsys.readouterr().err


@pytest.mark.parametrize("program", ["examples/train_qwen3_moe.py", "bench/compare.py", "bench/train_step.py"])
def test_torchrun_passes_every_option_on(program):
    """It takes what abbreviates an option of its own, --log say, even after the program's name."""
    options = re.findall(r'add_argument\(\s*"(--[a-z-]+)"', (ROOT / program).read_text())
    assert len(options) > 3
    for option in options:
        given = [program, option, "value"]
        assert get_args_parser().parse_args(given).training_script_args == given[1:]


@pytest.fixture
def alone_in_a_group(monkeypatch):
    """What the layer in TorchTitan's order needs; its functions are compiled on GPUs only, for time."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_the_example_takes_torchtitans_order(tmp_path, alone_in_a_group):
    for parameters in ("fp32", "bf16"):
        options = ["--steps", 4, "--parameters", parameters]
        records = train(tmp_path, *options, "--experts", "torchtitan")
        assert losses(records) == pytest.approx(losses(train(tmp_path, *options)), rel=0.02)
        assert all(0 < record["moe_share"] < 1 for record in records)


def test_training_steps_are_compared(tmp_path, alone_in_a_group):
    file = tmp_path / "steps.json"
    program = load_program("bench/train_step.py")
    arguments = f"--device cpu --shapes small:1 --sequence 16 --sequences 1 --steps 1 --no-compile --json {file}"
    records = program.compare(program.parse([*arguments.split(), "--text", str(ROOT / "LICENSE")]))
    assert json.loads(file.read_text()) == records
    assert [record["layer"] for record in records] == ["torchtitan", "megamoe"]
    assert records[0]["loss"] == pytest.approx(records[1]["loss"], rel=0.01)
    assert all(record["step_ms"] > 0 and 0 < record["moe_share"] < 1 for record in records)
    assert len(program.table(records).splitlines()) == 3


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--shapes small", "--shapes: 'small' is not SHAPE:LAYERS"),
        ("--shapes small:x", "--shapes: 'small:x' is not SHAPE:LAYERS"),
        ("--shapes small:1,large:2", "--shapes: large is not one of small, qwen3-30b, qwen3-235b"),
        ("--shapes small:0", "--shapes: 'small:0' has less than one layer"),
        ("--shapes small:fit", "--shapes: what fits is told on CUDA devices alone"),
        ("--experts megamoe,none", "--experts: none is not one of torchtitan, megamoe, grouped_mm"),
        ("--sequence 1", "--sequence: 1 is less than 2"),
        ("--sequences 0", "--sequences: 0 is less than 1"),
        ("--steps 0", "--steps: 0 is less than 1"),
        ("--text /nowhere/text", "--text: /nowhere/text is not a file"),
        ("--json /nowhere/steps.json", "--json: /nowhere/steps.json is a folder, or in none"),
        ("--device cuda", "--device: PyTorch finds no CUDA device"),
    ],
)
def test_the_comparison_of_steps_refuses_options_by_name(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as end:
        load_program("bench/train_step.py").parse(f"--device cpu --text {ROOT / 'LICENSE'} {arguments}".split())
    assert end.value.code == 2 and f"error: argument {message}" in capsys.readouterr().err


def test_as_many_layers_as_fit_are_told_from_few(monkeypatch, alone_in_a_group, capsys):
    program = load_program("bench/train_step.py")
    gib = 2**30
    assert program.layers_that_fit([10 * gib, 16 * gib], 100 * gib) == 1 + 28  # 85 GiB are left, 3 a layer
    assert program.layers_that_fit([10 * gib, 16 * gib], 9 * gib) == 1
    taken = []  # (layers, experts, steps)
    monkeypatch.setattr(program, "measure", lambda _, shape, *of: taken.append((*of[:2], of[2].steps)))
    sizes = {"torchtitan": (8, 5), "megamoe": (10, 3)}  # GiB of everything and of a layer
    monkeypatch.setattr(
        program, "used_bytes", lambda: (sizes[taken[-1][1]][0] + taken[-1][0] * sizes[taken[-1][1]][1]) * gib
    )
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 100 * gib))
    options = program.parse(["--device", "cpu", "--shapes", "small:1", "--text", str(ROOT / "LICENSE")])
    assert program.most_layers(None, "small", options) == 17  # 95 - 8 over 5
    assert taken == [(1, "torchtitan", 1), (3, "torchtitan", 1), (1, "megamoe", 1), (3, "megamoe", 1)]
    assert "{'torchtitan': 17, 'megamoe': 28} on rank 0, 17 are taken" in capsys.readouterr().out


def train_on_rank(rank, folder):
    return losses(train(folder, "--steps", 4))


def test_the_example_on_two_ranks_takes_the_same_steps(tmp_path):
    train(tmp_path, "--steps", 0)  # writes the text
    both = run_ranks(train_on_rank, 2, tmp_path, tmp_path)
    assert both[0] == both[1]
    assert both[0] == pytest.approx(losses(train(tmp_path, "--steps", 4)), rel=0.02)


def train_and_end_before_a_save(rank, folder, ending_rank, ending_step):
    module = load_program("examples/train_qwen3_moe.py")
    save = module.Trainer.save

    def save_or_end(trainer):
        if rank == ending_rank and trainer.step == ending_step:
            raise RuntimeError("the machine is gone")
        save(trainer)

    module.Trainer.save = save_or_end
    train(folder, "--steps", 4, "--save-every", 2, "--checkpoint", folder / "checkpoint", module=module)


def resume_on_rank(rank, folder):
    return losses(train(folder, "--steps", 4, "--checkpoint", folder / "checkpoint", "--resume"))


def test_ranks_resume_from_the_newest_step_that_all_have(tmp_path):
    train(tmp_path, "--steps", 0)  # writes the text
    whole = run_ranks(train_on_rank, 2, tmp_path, tmp_path)
    # Rank 0 has written step 4 when rank 1 ends.
    run_ranks(train_and_end_before_a_save, 2, tmp_path, tmp_path, 1, 4, failing=(0, 1))
    folder = tmp_path / "checkpoint"
    names = [f"step0000000{step}-rank{rank}of2.pt" for step, rank in ((2, 0), (2, 1), (4, 0))]
    assert sorted(path.name for path in folder.iterdir()) == names
    assert run_ranks(resume_on_rank, 2, tmp_path, tmp_path) == [of_rank[2:] for of_rank in whole]
    assert sorted(path.name for path in folder.iterdir()) == [f"step00000004-rank{rank}of2.pt" for rank in (0, 1)]

    (folder / names[2]).rename(folder / names[0])  # no step in common
    for refusal in run_ranks(resume_on_rank, 2, tmp_path, tmp_path, failing=(0, 1)):
        assert "no step that all ranks have: rank 0 of 2 has [2]; rank 1 of 2 has [4]" in refusal
    with pytest.raises(SystemExit, match="rank 0 of 1 has none"):
        resume_on_rank(0, tmp_path)


def train_whole_and_in_part(rank, folder, device, resumes):
    """The losses of six steps and of the first three of them, which leave a checkpoint; or of those after it."""
    torch.set_default_device(None)  # the example says where its tensors are
    module = load_program("examples/train_qwen3_moe.py")
    module.be_deterministic()
    checkpoint = ["--checkpoint", folder / "checkpoint"]
    ways = [["--steps", 6, *checkpoint, "--resume"]] if resumes else [["--steps", 6], ["--steps", 3, *checkpoint]]
    return [losses(train(folder, *way, "--device", device, module=module)) for way in ways]


def test_ranks_resume_with_the_bits_of_an_unbroken_run(tmp_path, device_of_ranks):
    (tmp_path / "text").write_bytes((ROOT / "LICENSE").read_bytes())
    before = run_ranks(train_whole_and_in_part, 2, tmp_path, tmp_path, device_of_ranks, False, device=device_of_ranks)
    after = run_ranks(train_whole_and_in_part, 2, tmp_path, tmp_path, device_of_ranks, True, device=device_of_ranks)
    (whole, first), (rest,) = before[0], after[0]
    assert first + rest == whole and len(whole) == 6 and whole[-1] < whole[0]
    assert (before[1], after[1]) == (before[0], after[0])
