"""The module, and the short form of one linear map per expert; on one rank."""

import copy
import io
import pickle

import megamoe
import pytest
import torch
from megamoe import moe_overlapping_backward_op
from reference import error, expert_dim
from torch import nn
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.usefixtures("device")


def sizes():
    return {"num_experts": 8, "hidden_dim": 64, "expert_dim": expert_dim(), "top_k": 2}


# ---- Module ----------------------------------------------------------------------------------------------


def test_the_layer_is_its_router_and_its_experts():
    layer = megamoe.MoELayer(**sizes())
    x = torch.randn(2, 20, 64).bfloat16()
    y = layer(x)
    routing = layer.router(x)
    expected = megamoe.moe(x, routing.expert_ids, routing.weights, layer.gate_up, layer.down)
    assert torch.equal(y, expected) and y.shape == x.shape
    assert torch.equal(layer.load, torch.bincount(routing.expert_ids.flatten().long(), minlength=8))
    (y.float().square().sum() + layer.auxiliary_loss).backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad.norm() > 0, name
        assert megamoe.is_expert_parameter(parameter) == (name in ("gate_up", "down"))


def test_a_layer_learns():
    layer = megamoe.MoELayer(**sizes(), aux_loss_alpha=0.01)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=3e-3)
    x = torch.randn(64, 64).bfloat16()
    target = x.roll(1, -1).float()
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = (layer(x).float() - target).square().mean()
        (loss + layer.auxiliary_loss).backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


def test_state_dict_has_the_plain_layouts_and_loads_back():
    layer = megamoe.MoELayer(**sizes(), bias_update_rate=0.01)
    state = layer.state_dict()
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == {
        "gate_up": (8, 2 * expert_dim(), 64),
        "down": (8, 64, expert_dim()),
        "router.weight": (8, 64),
        "router.selection_bias": (8,),
    }
    other = megamoe.MoELayer(**sizes(), bias_update_rate=0.01)
    other.load_state_dict(state)
    x = torch.randn(5, 64).bfloat16()
    assert torch.equal(layer(x), other(x))


def test_main_grad_of_the_parameters_is_used():
    layer = megamoe.MoELayer(**sizes())
    x = torch.randn(30, 64).bfloat16()
    layer(x).sum().backward()
    gradients = {name: getattr(layer, name).grad.float() for name in ("gate_up", "down")}
    layer.zero_grad()
    for name in gradients:
        getattr(layer, name).main_grad = torch.zeros(getattr(layer, name).shape)
    layer(x).sum().backward()
    for name, gradient in gradients.items():
        assert getattr(layer, name).grad is None
        assert torch.equal(getattr(layer, name).main_grad.bfloat16().float(), gradient)
    layer.down.main_grad = None
    with pytest.raises(RuntimeError, match="main_grads must be given for gate_up and for down"):
        layer(x)


@pytest.mark.parametrize("frozen", [("gate_up",), ("down",), ("gate_up", "down")])
def test_the_main_grad_of_a_frozen_parameter_is_not_touched(frozen):
    layer = megamoe.MoELayer(**sizes())
    x = torch.randn(30, 64).bfloat16()
    for name in ("gate_up", "down"):
        getattr(layer, name).main_grad = torch.zeros(getattr(layer, name).shape)
        getattr(layer, name).requires_grad_(name not in frozen)
    layer(x).sum().backward()
    for name in ("gate_up", "down"):
        assert getattr(layer, name).grad is None
        assert (getattr(layer, name).main_grad.norm() > 0) == (name not in frozen)
    for name in frozen:
        del getattr(layer, name).main_grad  # as an optimizer makes one for parameters of its own alone
    layer(x).sum().backward()


def copy_through_a_file(layer):
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def made_without_memory(layer):
    other = megamoe.MoELayer(**sizes(), device="meta").to_empty(device=layer.down.device)
    other.load_state_dict(layer.state_dict())
    return other


def loaded_by_assignment(layer):
    other = megamoe.MoELayer(**sizes(), device="meta")
    other.load_state_dict(layer.state_dict(), assign=True)
    return other


@pytest.mark.parametrize(
    "make",
    [
        copy.deepcopy,
        lambda layer: pickle.loads(pickle.dumps(layer)),
        copy_through_a_file,
        made_without_memory,
        loaded_by_assignment,
        lambda layer: torch.optim.swa_utils.AveragedModel(layer).module,
        lambda layer: copy.deepcopy(layer).float().bfloat16(),
    ],
)
def test_copies_of_a_used_layer_give_its_bits_and_know_their_experts(make):
    layer = megamoe.MoELayer(**sizes())
    x = torch.randn(20, 64).bfloat16()
    y = layer(x)
    other = make(layer)
    assert torch.equal(other(x), y)
    experts = {name for name, parameter in other.named_parameters() if megamoe.is_expert_parameter(parameter)}
    assert experts == {"gate_up", "down"}
    y.sum().backward()
    assert other.gate_up.grad is None and layer.gate_up.grad is not None


def test_the_compiled_layer_is_the_eager_layer():
    layer = megamoe.MoELayer(**sizes())
    x = torch.randn(33, 64).bfloat16()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    expected, actual = layer(x), compiled(x)
    # The router's own operations may be ordered otherwise; the experts that it chooses must not change.
    assert error(actual, expected) <= 2**-8 * expected.norm()
    actual.sum().backward()
    assert layer.gate_up.grad.norm() > 0


@pytest.mark.parametrize(
    "change, message",
    [
        ({"score_function": "relu"}, "score_function is 'relu'"),
        ({"top_k": 9}, "top_k is 9"),
        ({"num_groups": 3}, "num_groups = 3 must divide"),
        ({"num_groups": 4, "top_k": 4}, "top_k = 4 is more than the experts"),
        ({"num_groups": 0}, "num_groups is 0, must be at least 1"),
        ({"num_experts": 0}, "num_experts is 0, must be at least 1"),
        ({"hidden_dim": 0}, "hidden_dim is 0, must be at least 1"),
        ({"expert_dim": 0}, "expert_dim is 0, must be at least 1"),
        ({"activation": "silu"}, "activation is 'silu', must be one of swiglu, clamped_swiglu, gelu_erf"),
        ({"activation_limit": float("nan")}, "activation_limit is nan, must be finite"),
        ({"scale": float("inf")}, "scale is inf, must be finite"),
        ({"scale": 0.0}, "scale is 0, must be above it"),
        ({"bias_update_rate": -0.1}, "bias_update_rate is -0.1, must be finite and at least 0"),
        ({"aux_loss_alpha": float("nan")}, "aux_loss_alpha is nan, must be finite and at least 0"),
        ({"row_capacity": -1}, "row_capacity is -1, must be at least 0"),
    ],
)
def test_wrong_options_are_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        megamoe.MoELayer(**{**sizes(), **change})


@pytest.mark.parametrize(
    "change, message",
    [
        ({"num_experts": 8.0}, "num_experts must be an int, is float"),
        ({"top_k": "2"}, "top_k must be an int, is str"),
        ({"top_groups": 1.0}, "top_groups must be an int, is float"),
        ({"aux_loss_alpha": "0"}, "aux_loss_alpha must be a float, is str"),
        ({"activation_limit": None}, "activation_limit must be a float, is NoneType"),
        ({"max_tokens": 2.5}, "max_tokens must be an int, is float"),
        ({"dtype": torch.float32}, "MoELayer takes no dtype: its parameters are bf16"),
        ({"group": "world"}, "group must be a torch.distributed.ProcessGroup, is str"),
    ],
)
def test_options_of_other_types_are_refused_by_name(change, message):
    with pytest.raises(TypeError, match=message):
        megamoe.MoELayer(**{**sizes(), **change})


def test_inputs_that_do_not_fit_are_refused_by_name():
    layer = megamoe.MoELayer(**sizes())
    for wrong, error, message in (
        (torch.zeros(5, 32), RuntimeError, r"x has shape \[5, 32\]; its last dimension must be hidden_dim = 64"),
        (torch.tensor(1.0), RuntimeError, r"x has shape \[\]; its last dimension must be hidden_dim = 64"),
        ([1.0], TypeError, "x must be a torch.Tensor, is list"),
        (None, TypeError, "x must be a torch.Tensor, is NoneType"),
    ):
        with pytest.raises(error, match=message):
            layer(wrong)
    assert "Router(hidden_dim=64, num_experts=8, top_k=2, score_function='softmax')" in repr(layer).replace("\n", "")
    weights, ids = torch.zeros(8, 64, 32).bfloat16(), torch.zeros(5, 2).int()
    for name, arguments in {
        "hidden_states": ([1.0], weights, ids),
        "weights": (torch.zeros(5, 64).bfloat16(), [1.0], ids),
        "router_indices": (torch.zeros(5, 64).bfloat16(), weights, None),
    }.items():
        with pytest.raises(TypeError, match=f"{name} must be a torch.Tensor"):
            moe_overlapping_backward_op(*arguments)


def test_a_layer_without_memory_is_refused_by_name():
    layer = megamoe.MoELayer(**sizes(), device="meta")
    x = torch.randn(4, 64).bfloat16()
    with pytest.raises(RuntimeError, match="the router's weight is on device meta"):
        layer(x)
    for call in (layer, lambda x: megamoe.moe(x, x, x, x, x)):
        with pytest.raises(RuntimeError, match="x is on device meta"):
            call(x.to("meta"))


@pytest.mark.parametrize("convert", [lambda layer: layer.bfloat16(), lambda layer: layer.float().to(torch.bfloat16)])
def test_a_converted_layer_with_a_bias_runs(convert):
    layer = megamoe.MoELayer(**sizes(), bias_update_rate=0.1)
    layer.router.update_bias(torch.arange(8))
    x = torch.randn(20, 64).bfloat16()
    y = layer(x)
    assert torch.equal(convert(layer)(x), y)


# ---- Initial parameters ----------------------------------------------------------------------------------


def test_initial_parameters_follow_torchs_seed_and_have_unit_gain(device):
    torch.manual_seed(5)
    layer = megamoe.MoELayer(8, 256, 128, 2)
    torch.manual_seed(5)
    same, other = (megamoe.MoELayer(8, 256, 128, 2) for _ in range(2))
    torch.manual_seed(5)
    with torch.device("meta"):
        late = megamoe.MoELayer(8, 256, 128, 2, bias_update_rate=0.1)
    late.to_empty(device=device)
    torch.manual_seed(5)
    late.reset_parameters()
    assert (late.router.selection_bias == 0).all()
    for name, parameter in layer.named_parameters():
        assert torch.equal(parameter, same.get_parameter(name)), name
        assert torch.equal(parameter, late.get_parameter(name)), name
        assert not torch.equal(parameter, other.get_parameter(name)), name
        assert parameter.float().std().item() == pytest.approx(parameter.shape[-1] ** -0.5, rel=0.05)
        for first in range(8):
            assert all(not torch.equal(parameter[first], parameter[second]) for second in range(first))


# ---- The auxiliary loss under checkpointing --------------------------------------------------------------


def router_gradient(run):
    torch.manual_seed(0)
    layer = megamoe.MoELayer(**sizes(), aux_loss_alpha=1.0)
    x = torch.randn(20, 64).bfloat16().requires_grad_()
    y, loss = run(layer, x)
    (0 * y.float().sum() + loss).backward()
    return layer.router.weight.grad


def with_attribute(use_reentrant):
    def run(layer, x):
        return checkpoint(layer, x, use_reentrant=use_reentrant), layer.auxiliary_loss

    return run


def returned(use_reentrant):
    return lambda layer, x: checkpoint(lambda x: (layer(x), layer.auxiliary_loss), x, use_reentrant=use_reentrant)


def test_reentrant_checkpointing_warns_that_the_auxiliary_loss_has_no_gradient():
    with pytest.warns(UserWarning, match="auxiliary_loss has no gradient in reentrant checkpointing"):
        assert (router_gradient(with_attribute(True)) == 0).all()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("run", [with_attribute(False), returned(False), returned(True)])
def test_other_ways_of_checkpointing_keep_the_auxiliary_loss(run):
    expected = router_gradient(lambda layer, x: (layer(x), layer.auxiliary_loss))
    assert expected.norm() > 0 and torch.equal(router_gradient(run), expected)


def test_a_compiled_function_may_checkpoint_the_layer():
    def run(layer, x):
        compiled = torch.compile(with_attribute(False), fullgraph=True, backend="aot_eager")
        with torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True):
            return compiled(layer, x)

    expected = router_gradient(lambda layer, x: (layer(x), layer.auxiliary_loss))
    assert error(router_gradient(run), expected) <= 2**-16 * expected.norm()


# ---- Short form ------------------------------------------------------------------------------------------


class PrimeMoELayer(nn.Module):
    def __init__(self, num_experts: int, hidden_dim: int, expert_dim: int):
        super().__init__()
        self.weights = nn.Parameter(torch.empty(num_experts, hidden_dim, expert_dim, dtype=torch.bfloat16))
        nn.init.xavier_uniform_(self.weights)

    def forward(self, hidden_states: torch.Tensor, router_indices: torch.Tensor):
        return moe_overlapping_backward_op(hidden_states, self.weights, router_indices, overlap_comm=True)


@pytest.mark.parametrize("expert_dim", [32, 64, 80])
def test_short_form_is_the_mean_of_linear_maps(expert_dim):
    module = PrimeMoELayer(num_experts=8, hidden_dim=64, expert_dim=expert_dim)
    x = torch.randn(2, 40, 64).bfloat16().requires_grad_()
    ids = torch.randint(0, 8, (2, 40, 3))
    dy = torch.randn(2, 40, expert_dim).bfloat16()

    def run(dtype):
        weights, tokens = module.weights.detach().to(dtype).requires_grad_(), x.detach().to(dtype).requires_grad_()
        outputs = torch.einsum("bth,btkhd->btkd", tokens, weights[ids]).mean(2)
        outputs.backward(dy.to(dtype))
        return outputs.detach(), tokens.grad, weights.grad

    y = module(x, ids)
    assert y.shape == (2, 40, expert_dim)
    y.backward(dy)
    exact, baseline = run(torch.float64), run(torch.bfloat16)
    for actual, base, expected in zip((y.detach(), x.grad, module.weights.grad), baseline, exact):
        assert error(actual, expected) <= 2 * error(base, expected)


def test_short_form_refuses_other_shapes():
    with pytest.raises(ValueError, match=r"weights must have shape \[E, H, D\] with H = 32"):
        PrimeMoELayer(8, 64, 16)(torch.randn(4, 32).bfloat16(), torch.zeros(4, 1, dtype=torch.int32))


def test_short_form_refuses_no_slots():
    with pytest.raises(
        ValueError, match=r"router_indices must have shape \[..., K\] with K of at least 1, is \[4, 0\]"
    ):
        PrimeMoELayer(8, 64, 16)(torch.randn(4, 64).bfloat16(), torch.zeros(4, 0, dtype=torch.int32))
