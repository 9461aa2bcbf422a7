import pytest
import torch
from toys import toy_model, toy_tokens

from gpt import BLOCKS
from gpt.layers import linear
from gpt.training import device as devices
from gpt.training.device import Compute, Machine, choose
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
        ("cuda", "auto", CPU, r"the device is not there \(cuda; this machine has 0 CUDA GPUs\)\. Use --device auto"),
        ("cuda:2", "auto", AMPERE, r"not there \(cuda:2; this machine has 2"),
        ("mps", "auto", AMPERE, "not there"),
        ("cuda", "auto", APPLE, "0 CUDA GPUs and an Apple GPU"),
        ("gpu", "auto", AMPERE, r"unknown device \(gpu\)"),
        ("cpu:1", "auto", CPU, "unknown device"),
        ("cpu:", "auto", CPU, "unknown device"),
        ("cuda:", "auto", AMPERE, "unknown device"),
        ("cuda:01", "auto", AMPERE, "unknown device"),
        ("cuda:x", "auto", AMPERE, "unknown device"),
        ("cuda", "bfloat16", OLD, r"no such number format on cuda \(bfloat16\)\. Use auto, float16, float32"),
        ("cpu", "float16", CPU, "no such number format on cpu"),
        ("cpu", "fp32", CPU, "no such number format"),
    ],
)
def test_what_is_refused(device, dtype, machine, message):
    with pytest.raises(ValueError, match=message):
        choose(device, dtype, "off", machine)


def test_a_cpu_samples_in_float16_and_does_not_train_in_it():
    assert choose("cpu", "float16", "off", CPU, training=False) == Compute("cpu", "float16", "off")
    assert choose("auto", "auto", "off", CPU, training=False) == Compute("cpu", "float32", "off")


def test_the_scaler_is_on_for_float16_alone():
    for dtype in devices.DTYPES:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("torch.cuda.amp.common.amp_definitely_not_available", lambda: False)
            assert Compute("cuda", dtype, "off").scaler().is_enabled() == (dtype == "float16")


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


def fails_when_made(model):
    raise RuntimeError("no compiler here\nand more")


def fails_when_called(model):
    return lambda tokens, targets: fails_when_made(model)


@pytest.mark.parametrize("fault", [fails_when_made, fails_when_called])
def test_a_compiler_that_fails_is_a_warning_or_an_error(monkeypatch, fault):
    monkeypatch.setattr(torch, "compile", fault)
    model, tokens = toy_model(), toy_tokens()
    net, warning = devices.compiled(model, tokens, Compute("cpu", "float32", "auto"))
    assert net is model and warning == "warning: torch.compile failed (no compiler here). Going on without it."
    with pytest.raises(ValueError, match=r"torch.compile failed \(no compiler here\)\. Use --compile off"):
        devices.compiled(model, tokens, Compute("cpu", "float32", "on"))
    assert devices.compiled(model, tokens, Compute("cpu", "float32", "off")) == (model, None)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute")  # the compiler's own
def test_compiling_leaves_no_gradient_and_no_prefix(monkeypatch):
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model: compile(model, backend="eager"))
    model, tokens = toy_model(), toy_tokens()
    net, warning = devices.compiled(model, tokens, Compute("cpu", "float32", "on"))
    assert warning is None and net is not model and torch.equal(net(tokens), model(tokens))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    assert torch.equal(net(inputs, targets), model(inputs, targets))
    assert all(p.grad is None for p in model.parameters())
    assert not any(name.startswith("_orig_mod") for name in model.state_dict())


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
        ("cuda:1", AMPERE, r"several processes cannot share a GPU \(cuda:1\)\. Use --device auto, cpu or cuda"),
        ("mps", APPLE, r"several processes cannot share a GPU \(mps\)"),
        ("auto", AMPERE, r"more processes than GPUs \(3 on this machine, 2 GPUs\)\. Use --nproc_per_node 2"),
    ],
)
def test_processes_that_would_share_a_gpu_are_refused(device, machine, message):
    with pytest.raises(ValueError, match=message):
        choose(device, "auto", "auto", machine, processes(0, 3))


@pytest.mark.parametrize("norm", BLOCKS)
def test_a_model_made_ready_for_sampling_is_the_same_and_as_large(norm):
    model, tokens = toy_model(norm=norm), toy_tokens()
    expected, shapes = model(tokens), {name: tensor.shape for name, tensor in model.state_dict().items()}
    ready = devices.for_sampling(model, Compute("cpu", "float32", "off"))
    assert ready is model and torch.allclose(model(tokens), expected, atol=1e-5)
    assert torch.allclose(model(tokens[:1, :5]), expected[:1, :5], atol=1e-5)
    assert {name: tensor.shape for name, tensor in model.state_dict().items()} == shapes
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in model.parameters())
    by_columns = torch.backends.cpu.get_cpu_capability().startswith("AVX")
    assert model.blocks[0].mlp.up.weight.is_contiguous() != by_columns
    half = devices.for_sampling(model, Compute("cpu", "bfloat16", "off"))(tokens)
    assert half.dtype == torch.bfloat16 and torch.allclose(half.float(), expected, atol=0.3)


@pytest.mark.parametrize("dtype, tolerance", [("float64", 1e-12), ("float32", 1e-5), ("bfloat16", 0.05)])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_product_by_columns_is_the_product(dtype, tolerance, threads, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    called, bag = [], torch.nn.functional.embedding_bag
    monkeypatch.setattr(torch.nn.functional, "embedding_bag", lambda *a, **k: called.append(1) or bag(*a, **k))
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, dtype)
    for shape in ((0, 1, 6), (1, 1, 6), (1, 2, 7), (2, 1, 6), (3, 1, 6), (1, 7, 6)):
        x = torch.randn(shape, generator=generator).to(dtype)
        weight = torch.randn(5, shape[-1], generator=generator).to(dtype)
        for bias in (None, torch.randn(5, generator=generator).to(dtype)):
            expected = torch.nn.functional.linear(x, weight, bias)
            called.clear()
            got = linear(x, weight.t().contiguous().t(), bias)
            assert len(called) == (1 <= x.numel() // x.size(-1) <= 2)  # else torch's own product
            assert got.shape == expected.shape and torch.allclose(got, expected, atol=tolerance, rtol=tolerance)
