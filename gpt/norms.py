"""Normalization layers, written by hand. Each acts on the last axis, one token at a time."""

import torch
from torch import nn


class _LayerNormFunction(torch.autograd.Function):
    """y = gamma * n + beta with n = (x - mu) * r and r = 1/sqrt(sigma^2 + eps), over the last axis of width d.

    Under autograd each elementary operation would keep its own input. The derivative needs only n and r.

    Backward. Let g = dL/dy and h = g * gamma = dL/dn.
        dL/dbeta  = sum of g over all tokens
        dL/dgamma = sum of g * n over all tokens
    mu and sigma^2 depend on every x_j of the row. With d(mu)/dx_j = 1/d and d(sigma^2)/dx_j = 2 (x_j - mu)/d,
        dn_i/dx_j = r * (delta_ij - 1/d - n_i n_j/d)
    and so
        dL/dx = r * (h - mean(h) - n * mean(h * n)).
    In words: the parts of the gradient that would shift the row (mean(h)) or stretch it (mean(h * n)) are removed,
    because the norm undoes both. The rest is divided by the row's standard deviation.

    Second derivatives. n and r are outputs too, so autograd knows that what backward computes from them depends on x.
    Their own gradients g_n and g_r arrive when that is differentiated: h = g * gamma + g_n, and by dr/dx = -r^2 n/d
    the gradient g_r adds g_r r/d to mean(h * n).
    """

    @staticmethod
    def forward(ctx, x, gamma, beta, eps):
        x_float = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        # Two passes, the mean first: E[x^2] - E[x]^2 would cancel for rows far from zero. Their mean itself is rounded,
        # by more than the deviations in a flat row, so the mean of the differences is subtracted as well.
        n = x_float - x_float.mean(-1, keepdim=True)
        n -= n.mean(-1, keepdim=True)
        r = (n.square().mean(-1, keepdim=True) + eps).rsqrt_()
        n = n.mul_(r)
        ctx.save_for_backward(n, r, gamma)
        ctx.dtypes = x.dtype, gamma.dtype, None if beta is None else beta.dtype
        gamma = gamma.to(n.dtype)
        y = n * gamma if beta is None else torch.addcmul(beta.to(n.dtype), n, gamma)
        if torch.compiler.is_compiling():  # compiled code refuses second derivatives
            return (y.to(x.dtype),)
        ctx.set_materialize_grads(False)
        return y.to(x.dtype), n, r

    @staticmethod
    def backward(ctx, g, g_n=None, g_r=None):
        n, r, gamma = ctx.saved_tensors
        x_dtype, gamma_dtype, beta_dtype = ctx.dtypes
        g = torch.zeros_like(n) if g is None else g
        g, gamma = g.to(n.dtype), gamma.to(n.dtype)
        d = n.size(-1)
        h, gn = g * gamma, g * n
        # Not by the matrix products g @ gamma and gn @ gamma: autocast would round those to half precision.
        mean_h, mean_hn = h.mean(-1, keepdim=True), (gn * gamma).mean(-1, keepdim=True)
        if g_n is not None:
            h, mean_h = h + g_n, mean_h + g_n.mean(-1, keepdim=True)
            mean_hn = mean_hn + (g_n * n).mean(-1, keepdim=True)
        if g_r is not None:
            mean_hn = mean_hn + g_r * r / d
        dx = h.sub_(mean_h).addcmul_(n, mean_hn, value=-1).mul_(r)
        dgamma = gn.reshape(-1, d).sum(0).to(gamma_dtype)
        dbeta = g.reshape(-1, d).sum(0).to(beta_dtype) if beta_dtype else None
        return dx.to(x_dtype), dgamma, dbeta, None


class LayerNorm(nn.Module):
    """y = gamma * (x - mu) / sqrt(sigma^2 + eps) + beta (Ba et al. 2016, arXiv 1607.06450).

    mu and the biased variance sigma^2 are those of one token's `width` numbers: x of any shape (..., width) gives y
    of the same shape and dtype. gamma (`weight`) starts at 1 and beta (`bias`) at 0. For half-precision inputs mu and
    sigma^2 are computed in float32. A row of equal numbers gives beta. torch.autograd differentiates it any number of
    times; torch.func does not take it: that would cost time in every call.
    """

    def __init__(self, width: int, eps: float = 1e-5, bias: bool = True):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x):
        return _LayerNormFunction.apply(x, self.weight, self.bias, self.eps)[0]

    def extra_repr(self):
        return f"{self.weight.numel()}, eps={self.eps}, bias={self.bias is not None}"


class LayerNormGain(LayerNorm):
    """LayerNorm with a gain gamma and without a shift beta, whatever `bias` is."""

    def __init__(self, width: int, eps: float = 1e-5, bias: bool = True):
        super().__init__(width, eps, bias=False)


class RMS(nn.Module):
    """y = x / sqrt(mean(x^2) + eps): RMSNorm without a gain. It has no parameters: `width` and `bias` have no effect.
    Shapes and dtypes as LayerNorm's."""

    def __init__(self, width: int, eps: float = 1e-5, bias: bool = True):
        super().__init__()
        self.eps = eps

    def forward(self, x):
        return self.normalized(x).to(x.dtype)

    def normalized(self, x):
        x_float = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        return x_float * (x_float.square().mean(-1, keepdim=True) + self.eps).rsqrt()


class RMSNorm(RMS):
    """y = gamma * x / sqrt(mean(x^2) + eps): LayerNorm without the mean and the shift (Zhang and Sennrich 2019,
    arXiv 1910.07467). It never has a bias: `bias` has no effect."""

    def __init__(self, width: int, eps: float = 1e-5, bias: bool = True):
        super().__init__(width, eps)
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return (self.normalized(x) * self.weight).to(x.dtype)


class RMSNorm1p(RMS):
    """y = (1 + w) * x / sqrt(mean(x^2) + eps), w = 0 at the start: RMSNorm that learns its gain's difference from 1
    (Gemma, arXiv 2403.08295)."""

    def __init__(self, width: int, eps: float = 1e-5, bias: bool = True):
        super().__init__(width, eps)
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x):
        return (self.normalized(x) * (1 + self.weight)).to(x.dtype)


class DyT(nn.Module):
    """y = gamma * tanh(alpha x) + beta, alpha one learned number, 0.5 at the start (Zhu et al. 2025, arXiv 2503.10622).
    It squashes each number by itself and needs no statistics: `eps` has no effect. A small x stays small, so the model
    multiplies its token embeddings by a learned number. Their language models have no beta, and alpha starts by role
    and width: from 1.0 in rows of 1,024 to 0.2 before attention and 0.05 elsewhere in rows of 8,192."""

    pointwise = True

    def __init__(self, width: int, eps: float = 1e-5, bias: bool = True):
        super().__init__()
        self.alpha = nn.Parameter(torch.full((1,), 0.5))
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x):
        y = self.weight * self.squashed(x)
        return (y if self.bias is None else y + self.bias).to(x.dtype)

    def squashed(self, x):
        return torch.tanh(self.alpha * x)


class Derf(DyT):
    """y = gamma * erf(alpha x + s) + beta: as DyT, with another squashing function, and s one learned number, 0 at the
    start (Chen et al. 2025, arXiv 2512.10938)."""

    def __init__(self, width: int, eps: float = 1e-5, bias: bool = True):
        super().__init__(width, eps, bias)
        self.shift = nn.Parameter(torch.zeros(1))

    def squashed(self, x):
        return torch.erf(self.alpha * x + self.shift)


NORMS = {
    "layernorm": LayerNorm,
    "layernorm_gain": LayerNormGain,
    "rmsnorm": RMSNorm,
    "rmsnorm1p": RMSNorm1p,
    "rms": RMS,
    "dyt": DyT,
    "derf": Derf,
}
