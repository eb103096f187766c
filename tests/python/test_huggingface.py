"""Models of transformers with experts_implementation="megamoe", against the implementations that it ships.

The oracle runs the experts in fp64 between the same bf16 model code; one MoE layer a model, so that all implementations
route alike.
"""

import random

import megamoe
import megamoe.huggingface
import pytest
import reference
import torch
import transformers
from ranks import run_ranks
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

COMMON = {
    "vocab_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "max_position_embeddings": 64,
}
#: Name: its configuration, of hidden_size, num_experts_per_tok, experts and the width of an expert.
CONFIGS = {
    "qwen3_moe": lambda experts, width, **sizes: transformers.Qwen3MoeConfig(
        **COMMON,
        **sizes,
        head_dim=16,
        moe_intermediate_size=width,
        intermediate_size=96,
        num_experts=experts,
        norm_topk_prob=True,
        decoder_sparse_step=1,
    ),
    "mixtral": lambda experts, width, **sizes: transformers.MixtralConfig(
        **COMMON, **sizes, intermediate_size=width, num_local_experts=experts
    ),
    "deepseek_v3": lambda experts, width, **sizes: transformers.DeepseekV3Config(
        **{**COMMON, "num_hidden_layers": 2, "num_key_value_heads": 4},
        **sizes,
        intermediate_size=96,
        moe_intermediate_size=width,
        n_routed_experts=experts,
        n_shared_experts=1,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
        q_lora_rank=32,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
    ),
}


def make_config(name, seed=0):
    """Seed 0 is the same small model every time; others draw their sizes."""
    pick = random.Random(seed).choice
    sizes = {"hidden_size": 64, "num_experts_per_tok": 2, "experts": 8, "width": 64}
    if seed != 0:
        choices = {"hidden_size": [64, 128, 192], "num_experts_per_tok": [1, 2, 3, 4], "experts": [8, 16, 24], "width": [64, 128, 192]}
        sizes = {size: pick(values) for size, values in choices.items()}
    return CONFIGS[name](**sizes)


def oracle_forward(experts, hidden_states, top_k_index, top_k_weights):
    y = reference.moe(
        hidden_states.double(),
        top_k_index,
        top_k_weights.double(),
        experts.gate_up_proj.double(),
        experts.down_proj.double(),
    )
    return y.to(hidden_states.dtype)


ALL_EXPERTS_FUNCTIONS.register("oracle", oracle_forward)


def make_model(name, seed=0):
    torch.manual_seed(seed)
    config = make_config(name, seed)
    config.initializer_range = 0.1
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()


def make_batch(num_sequences=4):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 128, (num_sequences, 24), generator=generator, device="cpu").to(torch.get_default_device())


def step(model, tokens):
    """{"loss": ..., name of parameter: gradient}"""
    model.zero_grad()
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return {"loss": loss.detach()} | {
        name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None
    }


def step_of(model, tokens, implementation):
    model.set_experts_implementation(implementation)
    return step(model, tokens)


def assert_within_twice_the_baselines_error(found, baseline, exact):
    assert any("gate_up_proj" in key for key in exact) and found.keys() == exact.keys()
    for key, gradient in found.items():
        # One rounding to bf16 where the baseline happens to be nearer than that.
        limit = 2 * reference.error(baseline[key], exact[key]) + 2**-9 * exact[key].double().norm().item()
        assert reference.error(gradient, exact[key]) <= limit, key


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("baseline", ["grouped_mm", "eager"])
def test_loss_and_gradients_are_within_twice_the_baselines_error(name, baseline, seed, device):
    model, tokens = make_model(name, seed), make_batch()
    exact, expected, found = (step_of(model, tokens, implementation) for implementation in ("oracle", baseline, "megamoe"))
    assert_within_twice_the_baselines_error(found, expected, exact)


def test_it_is_chosen_by_name_at_construction_and_learns(device):
    config = make_config("qwen3_moe")
    config.num_hidden_layers = 2
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.bfloat16, experts_implementation="megamoe"
    )
    assert model.config._experts_implementation == "megamoe"
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    tokens = make_batch()
    losses = []
    for _ in range(15):
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


def test_the_compiled_model_is_the_eager_model():
    model = make_model("qwen3_moe")
    model.set_experts_implementation("megamoe")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for num_tokens in (24, 9):
        tokens = make_batch()[:, :num_tokens]
        assert torch.equal(compiled(input_ids=tokens).logits, model(input_ids=tokens).logits)


def test_gradient_checkpointing_of_the_model(device):
    model, tokens = make_model("qwen3_moe"), make_batch()
    model.set_experts_implementation("megamoe")
    expected = step(model, tokens)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    reference.assert_equal(step(model, tokens), expected)


def test_other_experts_are_refused_by_name():
    model, tokens = make_model("mixtral"), make_batch()
    model.set_experts_implementation("megamoe")
    experts = model.model.layers[0].mlp.experts
    experts.act_fn = torch.nn.Tanh()
    with pytest.raises(NotImplementedError, match="MixtralExperts uses Tanh"):
        model(input_ids=tokens)
    experts.act_fn = torch.nn.SiLU()
    experts.has_bias = True
    with pytest.raises(NotImplementedError, match="has_bias=True"):
        model(input_ids=tokens)
    with pytest.raises(ValueError, match="Linear has no experts module"):
        megamoe.parallelize_experts(torch.nn.Linear(2, 2))


def parallel_step(rank, name, seed):
    """Gradients of the mean over all ranks' losses: experts' of this rank, and the others' summed over the ranks."""
    model = megamoe.parallelize_experts(make_model(name, seed))
    tokens = make_batch()[2 * rank : 2 * rank + 2]
    loss = model(input_ids=tokens, labels=tokens).loss / 2
    loss.backward()
    found = {"loss": loss.detach()}
    experts = megamoe.expert_parameters(model)
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        assert megamoe.is_expert_parameter(parameter) == (name in experts)
        if name not in experts:
            gradient = parameter.grad.float()
            torch.distributed.all_reduce(gradient)
            parameter.grad.copy_(gradient)
        found[name] = parameter.grad
    return found


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", CONFIGS)
def test_experts_spread_over_two_ranks(name, seed, tmp_path, device_of_ranks):
    ranks = run_ranks(parallel_step, 2, tmp_path, name, seed, device=device_of_ranks)
    found = {"loss": ranks[0]["loss"] + ranks[1]["loss"]}
    for parameter, gradient in ranks[0].items():
        if ".experts." in parameter and "shared" not in parameter:
            found[parameter] = torch.cat([rank[parameter] for rank in ranks])
        elif parameter != "loss":
            found[parameter] = gradient
            assert torch.equal(gradient, ranks[1][parameter])
    model, tokens = make_model(name, seed), make_batch()
    exact, expected = (step_of(model, tokens, implementation) for implementation in ("oracle", "grouped_mm"))
    assert_within_twice_the_baselines_error(found, expected, exact)
