import pytest
import torch


@pytest.fixture(autouse=True)
def fresh_state():
    """Tests neither inherit a seed nor leave contexts of calls behind."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    yield
    torch._dynamo.reset()
