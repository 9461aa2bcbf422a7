"""What is chosen on which machine, as pure data; compiling; the layout for sampling."""

import pytest
import torch
from toys import KINDS, toy_model, toy_tokens

from gpt.config import Mistake
from gpt.layers import Linear
from gpt.loss import NextToken
from gpt.training import device as devices
from gpt.training.device import Compute, Machine, by_columns, choose, compiled, for_sampling
from gpt.training.distributed import ALONE, World

CPU, AMPERE, OLD, APPLE = Machine(), Machine(cuda=2, bfloat16=True), Machine(cuda=1), Machine(mps=True)


@pytest.mark.parametrize(
    "device, dtype, compile, machine, expected",
    [
        ("auto", "auto", "auto", CPU, Compute("cpu", "float32", "off")),
        ("auto", "auto", "on", CPU, Compute("cpu", "float32", "on")),
        ("cpu", "bfloat16", "off", CPU, Compute("cpu", "bfloat16", "off")),
        ("auto", "auto", "auto", AMPERE, Compute("cuda", "bfloat16", "auto")),
        ("cuda:1", "float16", "off", AMPERE, Compute("cuda:1", "float16", "off")),
        ("cpu", "auto", "auto", AMPERE, Compute("cpu", "float32", "off")),
        ("auto", "auto", "auto", OLD, Compute("cuda", "float16", "auto")),
        ("cuda", "float32", "auto", OLD, Compute("cuda", "float32", "auto")),
        ("auto", "auto", "auto", APPLE, Compute("mps", "float32", "off")),
        ("mps", "float32", "on", APPLE, Compute("mps", "float32", "on")),
    ],
)
def test_what_is_chosen(device, dtype, compile, machine, expected):
    assert choose(device, dtype, compile, machine) == expected


@pytest.mark.parametrize(
    "device, dtype, machine, message",
    [
        ("cuda", "auto", CPU, r"\(cuda; .* 0 CUDA GPUs\).*--device auto"),
        ("cuda:2", "auto", AMPERE, r"\(cuda:2; .* 2 CUDA GPUs\).*--device auto"),
        ("mps", "auto", AMPERE, r"\(mps; .*--device auto"),
        ("cuda", "auto", APPLE, "0 CUDA GPUs and an Apple GPU.*--device auto"),
        *(
            (device, "auto", AMPERE, rf"\({device}\)\. Use .*cuda:N")
            for device in ("gpu", "cuda:", "cuda:01", "cuda:x")
        ),
        *((device, "auto", CPU, rf"\({device}\)\. Use .*cuda:N") for device in ("cpu:1", "cpu:")),
        ("cuda", "bfloat16", OLD, r"cuda \(bfloat16\)\. Use auto, float16, float32"),
        ("cpu", "float16", CPU, r"cpu \(float16\)\. Use auto, float32, bfloat16"),
        ("cpu", "fp32", CPU, r"cpu \(fp32\)"),
    ],
)
def test_what_is_refused(device, dtype, machine, message):
    with pytest.raises(Mistake, match=message):
        choose(device, dtype, "off", machine)


def test_a_cpu_samples_in_float16_and_does_not_train_in_it():
    assert choose("cpu", "float16", "off", CPU, training=False) == Compute("cpu", "float16", "off")
    assert choose("auto", "auto", "off", CPU, training=False) == Compute("cpu", "float32", "off")


def test_the_scaler_is_on_for_float16_alone():
    for dtype in devices.DTYPES:
        assert Compute("cpu", dtype, "off").scaler().is_enabled() == (dtype == "float16")


def test_autocast_changes_matrix_products_on_the_cpu_and_nothing_kept():
    model, tokens = toy_model(), toy_tokens()
    with Compute("cpu", "bfloat16", "off").autocast():
        assert model(tokens).dtype == torch.bfloat16
    with Compute("cpu", "float32", "off").autocast():
        assert model(tokens).dtype == torch.float32
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_the_cpu_asks_cuda_nothing(monkeypatch):
    def asked(*arguments):
        pytest.fail("CUDA was asked")

    for name in ("is_available", "device_count", "get_device_capability", "is_bf16_supported", "current_device"):
        monkeypatch.setattr(torch.cuda, name, asked)
    assert choose("cpu", "auto", "auto", devices.look("cpu")) == Compute("cpu", "float32", "off")


def fails_when_made(net):
    raise RuntimeError("no compiler here\nand more")


def fails_when_called(net):
    return lambda tokens: fails_when_made(net)


@pytest.mark.parametrize("fault", [fails_when_made, fails_when_called])
def test_a_compiler_that_fails_is_a_warning_or_a_mistake(monkeypatch, fault):
    monkeypatch.setattr(torch, "compile", fault)
    net, tokens = NextToken(toy_model()), toy_tokens()
    eager, warning = compiled(net, tokens, Compute("cpu", "float32", "auto"))
    assert eager is net and warning.startswith("warning: ") and "(no compiler here)" in warning
    with pytest.raises(Mistake, match=r"\(no compiler here\).*--compile off"):
        compiled(net, tokens, Compute("cpu", "float32", "on"))
    assert compiled(net, tokens, Compute("cpu", "float32", "off")) == (net, None)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute")  # the compiler's own
def test_compiling_leaves_no_gradient_and_no_prefix(monkeypatch):
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda net: compile(net, backend="eager"))
    net, tokens = NextToken(toy_model()), toy_tokens()
    fast, warning = compiled(net, tokens, Compute("cpu", "float32", "on"))
    assert warning is None and fast is not net and torch.equal(fast(tokens), net(tokens))
    assert all(p.grad is None for p in net.parameters())
    assert net.model.state_dict().keys() == toy_model().state_dict().keys()


def processes(local_rank, size, local_size=None):
    return World(rank=local_rank, size=size, local_rank=local_rank, local_size=local_size or size)


@pytest.mark.parametrize(
    "device, machine, world, expected",
    [
        ("auto", AMPERE, processes(1, 2), Compute("cuda:1", "bfloat16", "auto")),
        ("cuda", AMPERE, processes(0, 2), Compute("cuda:0", "bfloat16", "auto")),
        ("auto", OLD, processes(0, 2, 1), Compute("cuda:0", "float16", "auto")),  # one on each of two machines
        ("cpu", AMPERE, processes(1, 8), Compute("cpu", "float32", "off")),
        ("auto", APPLE, processes(1, 2), Compute("cpu", "float32", "off")),
        ("cuda:1", AMPERE, ALONE, Compute("cuda:1", "bfloat16", "auto")),
    ],
)
def test_each_process_has_a_gpu_of_its_own(device, machine, world, expected):
    assert choose(device, "auto", "auto", machine, world) == expected


@pytest.mark.parametrize(
    "device, machine, message",
    [
        ("cuda:1", AMPERE, r"\(cuda:1\).*--device auto, cpu or cuda"),
        ("mps", APPLE, r"\(mps\).*--device auto, cpu or cuda"),
        ("auto", AMPERE, r"\(3 on this machine, 2 GPUs\).*--nproc_per_node 2"),
    ],
)
def test_processes_that_would_share_a_gpu_are_refused(device, machine, message):
    with pytest.raises(Mistake, match=message):
        choose(device, "auto", "auto", machine, processes(0, 3))


@pytest.mark.parametrize("placement", KINDS)
def test_a_model_made_ready_for_sampling_is_the_same_and_as_large(placement):
    model, tokens = toy_model(norm=placement), toy_tokens()
    expected, shapes = model(tokens), {name: tensor.shape for name, tensor in model.state_dict().items()}
    ready = for_sampling(model, Compute("cpu", "float32", "off"))
    assert ready is model and torch.allclose(model(tokens), expected, atol=1e-5)
    for few in (tokens[:1, :1], tokens[:1, :2], tokens[:1, :3]):  # few rows go another way
        assert torch.allclose(model(few), expected[:1, : few.size(1)], atol=1e-5)
    assert {name: tensor.shape for name, tensor in model.state_dict().items()} == shapes
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in model.parameters())
    half = for_sampling(model, Compute("cpu", "bfloat16", "off"))(tokens)
    assert half.dtype == torch.bfloat16 and torch.allclose(half.float(), expected, atol=0.3)


@pytest.fixture(params=[1, 2, 5])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype, tolerance", [("float64", 1e-12), ("float32", 1e-5), ("bfloat16", 0.05)])
def test_a_product_by_columns_is_the_product(dtype, tolerance, threads):
    dtype = getattr(torch, dtype)
    for shape in ((0, 1, 6), (1, 1, 6), (1, 2, 7), (2, 1, 6), (3, 1, 6), (1, 7, 6)):
        x, weight, bias = (torch.randn(size).to(dtype) for size in (shape, (5, shape[-1]), (5,)))
        for b in (None, bias):
            expected, product = x @ weight.t() + (0 if b is None else b), by_columns(x, weight.t().contiguous().t(), b)
            assert product.shape == expected.shape
            assert torch.allclose(product, expected, atol=tolerance, rtol=tolerance)


def test_a_layer_of_ones_own_keeps_what_it_computes():
    """A subclass of Linear, whose forward does more, in a model that is made ready for sampling."""

    class Doubled(Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model, tokens = toy_model(), toy_tokens(1, 1)
    model.blocks[0].mlp.down.__class__ = Doubled
    expected = model(tokens)
    assert torch.allclose(for_sampling(model, Compute("cpu", "float32", "off"))(tokens), expected, atol=1e-5)
