"""The experts of a Hugging Face model on one GPU: transformers' own `grouped_mm` implementation, all experts local."""

import torch
import transformers
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts


class Layer:
    """gate_up: [E, 2I, H]; down: [E, H, I]. Routing (top-k ids and scores) is an input."""

    def __init__(self, gate_up, down, compiled):
        num_experts, hidden_dim, expert_dim = down.shape
        config = transformers.Qwen3MoeConfig(
            hidden_size=hidden_dim, moe_intermediate_size=expert_dim, num_experts=num_experts
        )
        with torch.device("meta"):
            self.experts = Qwen3MoeExperts(config)
        # As leaves of the caller's, not as parameters.
        del self.experts.gate_up_proj, self.experts.down_proj
        self.experts.gate_up_proj, self.experts.down_proj = gate_up, down
        function = ALL_EXPERTS_FUNCTIONS["grouped_mm"]
        self.function = torch.compile(function, dynamic=True) if compiled else function

    def __call__(self, x, ids, scores):
        return self.function(self.experts, x, ids, scores)
