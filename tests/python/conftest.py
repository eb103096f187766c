import megamoe
import pytest
import torch


@pytest.fixture(autouse=True)
def fresh_state():
    """Tests neither inherit a seed nor leave contexts of calls behind."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    yield
    torch._dynamo.reset()


def require_devices(count):
    """Skips where the CUDA backend cannot run on that many devices, and says why."""
    refusal = torch.ops.megamoe.backend_refusal("cuda")
    if refusal:
        pytest.skip(refusal)
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} CUDA devices")


@pytest.fixture(params=["cpu", "cuda"])
def device(request):
    """Where torch makes tensors in the test: it runs once on each backend."""
    if request.param == "cpu":
        yield "cpu"
        return
    require_devices(1)
    torch.set_default_device("cuda")
    yield "cuda"
    torch.set_default_device(None)
    try:
        megamoe.check()  # what a failed test has left on the device
    except RuntimeError:
        pass


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.two_devices)])
def device_of_ranks(request):
    """The same for tests of two ranks, which have a CUDA device each; where there is one, they are hosts that share it
    (ranks.py)."""
    if request.param == "cpu":
        yield "cpu"
        return
    require_devices(1)
    torch.set_default_device("cuda")
    yield "cuda"
    torch.set_default_device(None)
