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
    ],
)
def test_wrong_router_options_are_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        megamoe.MoELayer(**{**sizes(), **change})


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
