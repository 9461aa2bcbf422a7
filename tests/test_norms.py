"""The hand-written norms: their values and gradients are the library's, in every number format and for every row."""

import pytest
import torch
import torch.nn.functional as F

from gpt import NORMS, LayerNorm

SHAPES = [(8,), (5, 8), (2, 3, 8), (2, 3, 768)]
EPS = 1e-2
# Each norm of rows of 8 numbers. The arguments are the names of its parameters; a bias may be missing.
EQUATIONS = {
    "layernorm": lambda x, weight, bias=None: F.layer_norm(x, (8,), weight, bias, EPS),
    "layernorm_gain": lambda x, weight: F.layer_norm(x, (8,), weight, None, EPS),
    "rmsnorm": lambda x, weight: F.rms_norm(x, (8,), weight, EPS),
    "rmsnorm1p": lambda x, weight: F.rms_norm(x, (8,), 1 + weight, EPS),
    "rms": lambda x: F.rms_norm(x, (8,), None, EPS),
    "dyt": lambda x, alpha, weight, bias=0: weight * torch.tanh(alpha * x) + bias,
    "derf": lambda x, alpha, weight, shift, bias=0: weight * torch.erf(alpha * x + shift) + bias,
}


def values_and_gradients(function, x, parameters, upstream):
    """(y, dx, dgamma, dbeta) of function(x, gamma, beta), or without beta."""
    leaves = [tensor.detach().to(upstream.dtype).requires_grad_() for tensor in (x, *parameters)]
    y = function(*leaves)
    return (y.detach(), *torch.autograd.grad(y, leaves, upstream))


def both(x, norm, upstream):
    """The values and gradients of the hand-written norm in x's dtype, and of the library's in float64."""

    def by_hand(x, *parameters):
        return torch.func.functional_call(norm, dict(zip(("weight", "bias"), parameters)), x)

    def library(x, *parameters):
        return F.layer_norm(x, x.shape[-1:], *parameters, eps=norm.eps)

    parameters = list(norm.parameters())
    return (
        values_and_gradients(by_hand, x, parameters, upstream),
        values_and_gradients(library, x, parameters, upstream.double()),
    )


def random_norm(width, dtype, bias=True):
    norm = LayerNorm(width, bias=bias).to(dtype)
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter, mean=1.0)
    return norm


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "dtype, tolerance",
    [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 2**-7), (torch.float16, 2**-10)],
)
def test_layer_norm_and_its_gradients_are_the_librarys(dtype, tolerance, shape, bias):
    norm = random_norm(shape[-1], dtype, bias)
    ours, library = both(torch.randn(shape).to(dtype) * 3 + 1, norm, torch.randn(shape).to(dtype))
    assert len(ours) == len(library) == (4 if bias else 3)
    for tensor, expected in zip(ours, library):
        assert tensor.dtype == dtype and tensor.shape == expected.shape
        scale = expected.abs().max().clamp(min=1)
        assert (tensor.double() - expected).abs().max() <= tolerance * scale


@pytest.mark.parametrize("bias", [True, False])
def test_gradcheck(bias):
    norm = random_norm(5, torch.float64, bias)
    inputs = [torch.randn(3, 5, dtype=torch.float64, requires_grad=True)]
    assert torch.autograd.gradcheck(lambda x, *parameters: norm(x), [*inputs, *norm.parameters()])


@pytest.mark.parametrize("variance", [1e-6, 1e-12, 0.0])
def test_rows_of_little_variance(variance):
    """eps stands inside the root: rows flatter than it come out small, not blown up, with a finite gradient."""
    norm = random_norm(64, torch.float32)
    x = torch.randn(4, 64) * variance**0.5
    ours, library = both(x, norm, torch.randn(4, 64))
    for tensor, expected in zip(ours, library):
        assert torch.allclose(tensor.double(), expected, rtol=1e-5, atol=1e-5)
    if variance == 0:
        assert torch.equal(ours[0], norm.bias.detach().expand(4, 64))


@pytest.mark.parametrize(
    "dtype, offset, tolerance", [(torch.float32, 1e4, 1e-3), (torch.bfloat16, 300, 1e-2), (torch.float16, 400, 1e-2)]
)
def test_rows_far_from_zero_keep_their_digits(dtype, offset, tolerance):
    """The mean of squares less the square of the mean would cancel, and a half-precision sum would overflow."""
    x = (torch.randn(8, 768) * 4 + offset).to(dtype)
    y = LayerNorm(768).to(dtype)(x).double()
    expected = F.layer_norm(x.double(), (768,))
    assert y.isfinite().all() and ((y - expected).norm() / expected.norm()) < tolerance


@pytest.mark.parametrize("value", [7.0, 0.1, 12345.678, -3e30])
def test_a_row_of_equal_numbers_gives_beta_whatever_their_size(value):
    norm = random_norm(768, torch.float32)
    assert torch.equal(norm(torch.full((4, 768), value)), norm.bias.expand(4, 768))


def test_the_backward_is_exact_under_autocast_too():
    """Autocast would do a matrix product in bfloat16, also within the backward, where the compiler traces it."""
    norm, x, upstream = random_norm(256, torch.float32), torch.randn(64, 256, requires_grad=True), torch.randn(64, 256)
    y = norm(x)
    (expected,) = torch.autograd.grad(y, x, upstream, retain_graph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(torch.autograd.grad(y, x, upstream)[0], expected)


def test_any_strides_and_an_expanded_gradient():
    norm = random_norm(6, torch.float64)
    x = torch.randn(6, 4, 3, dtype=torch.float64).transpose(0, 2).requires_grad_()
    y = norm(x)
    assert torch.allclose(y, F.layer_norm(x, (6,), norm.weight, norm.bias), atol=1e-12)
    y.sum().backward()
    expected = torch.autograd.grad(F.layer_norm(x, (6,), norm.weight, norm.bias).sum(), x)[0]
    assert torch.allclose(x.grad, expected, atol=1e-12)


def test_one_tensor_of_the_inputs_size_is_kept_for_the_backward():
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.numel()) or tensor, lambda t: t):
        LayerNorm(64)(torch.randn(32, 64, requires_grad=True))
    assert sum(count == 32 * 64 for count in kept) == 1 and sum(kept) < 1.2 * 32 * 64


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", NORMS)
def test_second_and_third_derivatives_are_right(name, bias):
    """Also where what comes back to the norm does not depend on anything."""
    norm = NORMS[name](5, bias=bias).double()
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(5, dtype=torch.float64)
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter)
    inputs = [x, *norm.parameters()]

    def gradient(*inputs):
        return torch.autograd.grad((norm(x) * weights).sum(), inputs[:2], create_graph=True)

    assert torch.autograd.gradgradcheck(lambda x, *parameters: norm(x), inputs)
    assert torch.autograd.gradcheck(gradient, inputs) and torch.autograd.gradgradcheck(gradient, inputs)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", NORMS)
def test_every_norm_is_its_equation(name, bias):
    """With its gradients, from any parameters and from those of the start."""
    norm, x = NORMS[name](8, eps=EPS, bias=bias).double(), torch.randn(3, 5, 8, dtype=torch.float64, requires_grad=True)
    assert ("bias" in dict(norm.named_parameters())) == (bias and name in ("layernorm", "dyt", "derf"))
    for start in (True, False):
        for role, parameter in norm.named_parameters():
            value = {"alpha": 0.5, "weight": float(name != "rmsnorm1p")}.get(role, 0.0)
            assert not start or torch.equal(parameter, torch.full_like(parameter, value))
            start or torch.nn.init.normal_(parameter, mean=1.0)
        y, expected = norm(x), EQUATIONS[name](x, **dict(norm.named_parameters()))
        assert torch.allclose(y, expected, atol=1e-12)
        ours, plain = (torch.autograd.grad(z.square().sum(), [x, *norm.parameters()]) for z in (y, expected))
        assert all(torch.allclose(one, other, atol=1e-10) for one, other in zip(ours, plain))


def test_rms_norm_forgets_the_scale_and_layer_norm_the_shift_too():
    x = torch.randn(9, 64, dtype=torch.float64)
    layer, rms = (NORMS[name](64, eps=0.0).double() for name in ("layernorm", "rmsnorm"))
    assert torch.allclose(layer(3 * x + 7), layer(x)) and torch.allclose(rms(3 * x), rms(x))
    assert not torch.allclose(rms(x + 7), rms(x), atol=0.1)
    centred = x - x.mean(-1, keepdim=True)
    assert torch.allclose(rms(centred), layer(centred))
    assert torch.allclose(layer(layer(x)), layer(x))


@pytest.mark.parametrize("name", NORMS)
def test_every_norm_acts_on_the_last_axis_alone_and_keeps_shape_and_dtype(name):
    """Also where the parameters have more digits than x, as under autocast."""
    norm = NORMS[name](8)
    exact = norm(x := torch.randn(2, 5, 8))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for parameters in (torch.float32, dtype):
            y = norm.to(parameters)(x.to(dtype))
            assert y.shape == x.shape and y.dtype == dtype and torch.allclose(y.float(), exact, atol=0.02)
            assert torch.equal(y.flatten(0, 1)[7], norm(x.to(dtype).flatten(0, 1)[7]))
