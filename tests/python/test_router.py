"""The router: the library's on each backend, against torch operations in fp64."""

import megamoe
import pytest
import torch
from torch import nn

pytestmark = pytest.mark.usefixtures("device")

CASES = {
    "softmax": {},
    "softmax, not renormalised": {"renormalise": False, "scale": 2.5},
    "sigmoid": {"score_function": "sigmoid", "scale": 0.5},
    "sigmoid, not renormalised": {"score_function": "sigmoid", "renormalise": False},
    "groups": {"score_function": "sigmoid", "num_groups": 4, "top_groups": 2, "bias_update_rate": 0.1},
    "loss": {"aux_loss_alpha": 0.1},
    "sigmoid, loss": {"score_function": "sigmoid", "aux_loss_alpha": 0.1},
}


def make_router(**options):
    router = megamoe.Router(16, 16, 3, **options)
    if router.selection_bias is not None:
        router.selection_bias.normal_()
    return router


def routing_and_gradients(route, logits):
    """What route(logits) gives, and the gradient of a sum in which every weight and the loss count differently."""
    logits = logits.detach().clone().requires_grad_()
    routing = route(logits)
    factors = torch.linspace(-1, 2, routing.weights.numel()).view(routing.weights.shape)
    ((routing.weights * factors).sum() + 3 * routing.auxiliary_loss).backward()
    return routing, logits.grad


# ---- Against torch operations ----------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [0, 1, 50])
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_those_of_torch_operations(case, num_tokens):
    router = make_router(**CASES[case])
    logits = torch.randn(num_tokens, 16)
    actual, gradient = routing_and_gradients(router._route_in_library, logits)
    exact, exact_gradient = routing_and_gradients(router._route, logits.double())
    assert torch.equal(actual.expert_ids, exact.expert_ids) and torch.equal(actual.load, exact.load)
    assert actual.expert_ids.dtype == torch.int32 and actual.weights.dtype == torch.float32
    for found, expected in ((actual.weights, exact.weights), (gradient, exact_gradient)):
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=2e-7)
    torch.testing.assert_close(actual.auxiliary_loss.double(), exact.auxiliary_loss, rtol=1e-5, atol=1e-7)


def test_a_second_run_gives_the_same_bits():
    router = make_router(**CASES["sigmoid, loss"])
    logits = torch.randn(3000, 16)
    (first, first_gradient), (second, second_gradient) = (
        routing_and_gradients(router._route_in_library, logits) for _ in range(2)
    )
    for name in first._fields:
        assert torch.equal(getattr(first, name), getattr(second, name)), name
    assert torch.equal(first_gradient, second_gradient)


def test_leading_dimensions_are_kept():
    router = make_router()
    x = torch.randn(2, 3, 5, 16)
    batched, flat = router(x), router(x.view(30, 16))
    assert batched.expert_ids.shape == batched.weights.shape == (2, 3, 5, 3)
    assert torch.equal(batched.weights.view(30, 3), flat.weights)


def test_more_experts_than_the_library_takes_use_torch_operations():
    router = megamoe.Router(16, 600, 2)
    routing = router(torch.randn(40, 16))
    assert routing.expert_ids.shape == (40, 2) and routing.load.sum() == 80


def test_logits_that_are_not_finite_are_an_error(device):
    router = make_router()
    x = torch.randn(6, 16)
    x[4] = float("nan")
    message = "logits of token 4"
    if device == "cpu":
        with pytest.raises(RuntimeError, match="logit"):
            router(x)
    else:
        # By whichever call comes after the device has found it: one of the router's own, perhaps, before check().
        errors = []
        for call in (lambda: router(x), megamoe.check):
            try:
                call()
            except RuntimeError as error:
                errors.append(str(error))
        assert errors and all(message in error for error in errors)
        megamoe.check()  # which takes it away
    router(torch.randn(6, 16))


def test_second_derivatives_are_refused():
    """Left out, they would make a gradient penalty silently wrong."""
    router = make_router(aux_loss_alpha=0.1)
    x = torch.randn(5, 16, requires_grad=True)
    for output in (router(x).weights.square().sum(), router(x).auxiliary_loss):
        with pytest.raises(RuntimeError, match="megamoe has no second derivatives"):
            torch.autograd.grad(output, x, create_graph=True)


def test_second_derivatives_of_torch_operations_are_right():
    router = megamoe.Router(4, 600, 2, dtype=torch.float64)
    torch.autograd.gradgradcheck(
        lambda logits: router._route(logits).weights, torch.randn(3, 600).double().requires_grad_()
    )


# ---- The operators as torch sees them --------------------------------------------------------------------

OPTIONS = (3, "sigmoid", True, 1.5, 4, 2, 0.1)


def test_opcheck():
    logits, bias = torch.randn(20, 16, requires_grad=True), torch.randn(16)
    torch.library.opcheck(torch.ops.megamoe.route, (logits, bias, *OPTIONS))
    torch.library.opcheck(torch.ops.megamoe.route, (logits, None, *OPTIONS))
    with torch.no_grad():
        weights, ids, load, loss = torch.ops.megamoe.route(logits, bias, *OPTIONS)
        gradients = (torch.randn_like(weights), load, torch.ones_like(loss))
        torch.library.opcheck(torch.ops.megamoe.route_backward, (logits.detach(), ids, *gradients, *OPTIONS))


def test_compiled_is_eager_for_every_number_of_tokens():
    router = make_router(**CASES["sigmoid, loss"])
    compiled = torch.compile(router._route_in_library, fullgraph=True, dynamic=True, backend="aot_eager")
    for num_tokens in (5, 64, 1, 0, 17):
        logits = torch.randn(num_tokens, 16)
        (actual, gradient), (expected, expected_gradient) = (
            routing_and_gradients(route, logits) for route in (compiled, router._route_in_library)
        )
        for name in actual._fields:
            assert torch.equal(getattr(actual, name), getattr(expected, name)), name
        assert torch.equal(gradient, expected_gradient)


@pytest.mark.parametrize(
    "logits, options, message",
    [
        ((4,), OPTIONS, "logits has shape"),
        ((4, 16), (3, "relu", *OPTIONS[2:]), 'score_function is "relu", must be softmax or sigmoid'),
        ((4, 16), (17, *OPTIONS[1:]), "top_k"),
    ],
)
def test_the_operators_refuse_by_name(logits, options, message):
    with pytest.raises(RuntimeError, match=message):
        torch.ops.megamoe.route(torch.zeros(logits), None, *options)


# ---- Meaning ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_router_values(score, renormalise, dtype):
    router = megamoe.Router(16, 8, 3, score_function=score, renormalise=renormalise, scale=2.5, dtype=dtype)
    x = torch.randn(50, 16, dtype=dtype)
    routing = router(x)
    logits = x.double() @ router.weight.double().T
    scores = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
    weights, ids = scores.topk(3)
    if renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    assert torch.equal(routing.expert_ids.long(), ids)
    torch.testing.assert_close(routing.weights.double(), 2.5 * weights, rtol=1e-5, atol=1e-6)
    assert routing.expert_ids.dtype == torch.int32 and routing.weights.dtype == torch.float32


def test_ties_go_to_the_lower_id():
    router = megamoe.Router(16, 64, 4)
    nn.init.zeros_(router.weight)
    assert (router(torch.randn(10, 16)).expert_ids == torch.arange(4)).all()


def test_experts_of_other_groups_are_never_chosen_also_below_zero():
    router = megamoe.Router(16, 8, 2, score_function="sigmoid", num_groups=4, top_groups=1, bias_update_rate=0.1)
    router.selection_bias -= 5  # all selection scores are negative: a mask of 0 would win
    expert_ids = router(torch.randn(200, 16)).expert_ids
    assert (expert_ids[:, 0] // 2 == expert_ids[:, 1] // 2).all()


def test_the_bias_moves_against_the_load():
    router = megamoe.Router(16, 4, 1, score_function="sigmoid", bias_update_rate=0.5)
    router.update_bias(torch.tensor([10, 0, 5, 5]))
    assert router.selection_bias.tolist() == [-0.5, 0.5, 0, 0]


@pytest.mark.parametrize(
    "convert",
    [
        lambda router: router.bfloat16(),
        lambda router: router.half().float(),
        lambda router: router.double(),
        lambda router: router.to(torch.bfloat16),
        lambda router: nn.Sequential(router).bfloat16()[0],
    ],
)
def test_the_bias_stays_fp32_in_other_dtypes(convert):
    router = make_router(bias_update_rate=0.1)
    x, bias = torch.randn(20, 16), router.selection_bias.clone()
    converted = convert(router)
    assert converted.selection_bias.dtype == torch.float32 and torch.equal(converted.selection_bias, bias)
    assert "selection_bias" in converted.state_dict()
    assert converted(x).expert_ids.shape == (20, 3)


def test_the_bias_is_fp32_whatever_the_default_dtype():
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert make_router(bias_update_rate=0.1).selection_bias.dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_reset_parameters_draws_by_torchs_seed_and_takes_the_bias_back():
    router = make_router(bias_update_rate=0.1)
    torch.manual_seed(7)
    router.reset_parameters()
    first = router.weight.detach().clone()
    assert (router.selection_bias == 0).all()
    router.reset_parameters()
    assert not torch.equal(router.weight, first)
    torch.manual_seed(7)
    assert torch.equal(megamoe.Router(16, 16, 3).weight, first)
    # Rows are drawn one by one: they differ, and have the variance of all.
    wide = megamoe.Router(1024, 64, 1).weight
    assert wide.std().item() == pytest.approx(1 / 32, rel=0.02) and wide.std(0).mean().item() == pytest.approx(
        1 / 32, rel=0.02
    )


def test_the_auxiliary_loss_is_alpha_when_balanced_and_more_otherwise():
    router = megamoe.Router(16, 8, 2, aux_loss_alpha=0.1)
    x = torch.randn(4000, 16)
    nn.init.normal_(router.weight, std=0.5)
    assert router(x).auxiliary_loss.item() == pytest.approx(0.1, rel=0.1)
    with torch.no_grad():
        router.weight[:2] += 0.5
    skewed = router(x.abs()).auxiliary_loss
    assert skewed.item() > 0.3
    skewed.backward()
    assert router.weight.grad[:2].sum() > 0  # going down the gradient takes load from the first two
