"""Modules that hold quantised weights and call the ops: drop-in replacements for layers of a PyTorch model."""

from collections.abc import Collection

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from mori_ops import distributed


class Mxfp8Linear(nn.Module):
    """nn.Linear with its weight in MXFP8: y = x @ W.T + bias.

    x [.., K] fp32/bf16/fp16 -> [.., N] of the same dtype (under autocast: of its dtype); x is quantised on the fly, one
    scale per 1x32 along K, and products are summed in fp32. K must be a multiple of 32.

    Buffers: `codes` [N, K], the bytes of float8_e4m3fn; `scale` [ceil(N/32), K/32], the bytes of float8_e8m0fnu, one per
    32x32 block; `bias` [N] or None. Codes and scales are kept as uint8 so that `module.to(dtype)` does not convert them.
    """

    codes: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, codes: Tensor, scale: Tensor, bias: Tensor | None = None, *, rounding: str = "rceil"):
        super().__init__()
        self.register_buffer("codes", codes.view(torch.uint8))
        self.register_buffer("scale", scale.view(torch.uint8))
        self.register_buffer("bias", bias)
        self.rounding = rounding
        self.out_features, self.in_features = codes.shape

    @classmethod
    def from_linear(cls, linear: nn.Linear, *, rounding: str = "rceil") -> "Mxfp8Linear":
        """Quantises the layer's weight; `rounding` ("rceil" or "floor", see mxfp8_quantize) serves weight and activations."""
        codes, scale = torch.ops.mori.mxfp8_quantize_weight(linear.weight.detach(), rounding=rounding)
        return cls(codes, scale, None if linear.bias is None else linear.bias.detach().clone(), rounding=rounding)

    def dequantize(self) -> Tensor:
        """The weight that the layer multiplies with, fp32 [N, K]."""
        return torch.ops.mori.mxfp8_dequantize(self.codes.view(torch.float8_e4m3fn), self.scale, out_dtype=torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mori.mxfp8_linear(x, self.codes.view(torch.float8_e4m3fn), self.scale, bias=self.bias, rounding=self.rounding)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def quantize_linears_(model: nn.Module, *, skip: Collection[str] = (), rounding: str = "rceil") -> list[str]:
    """Replaces, in place, every nn.Linear below `model` by Mxfp8Linear and returns their names.

    Left alone: layers with a part of their dotted name in `skip` (say ("lm_head",)), subclasses of nn.Linear (their owners
    read the weight directly), and layers whose in_features is not a multiple of 32, which MXFP8 cannot hold.
    """
    replaced: dict[nn.Linear, Mxfp8Linear] = {}  # a layer that stands in two places stays one layer
    names = []
    for name, layer in list(model.named_modules(remove_duplicate=False)):
        if type(layer) is not nn.Linear or layer.in_features % 32 or not set(skip).isdisjoint(name.split(".")):
            continue
        if layer not in replaced:
            replaced[layer] = Mxfp8Linear.from_linear(layer, rounding=rounding)
        model.set_submodule(name, replaced[layer])
        names.append(name)
    return names


class GatedResidualRead(nn.Module):
    """What a half layer reads from a residual stream of hc copies of a hidden state (Qwen's gated residual).

        xn     = RMSNorm over each of the hc groups of x, times norm_weight
        y      = W xn,  W = the rows of down and inject in Q8_0: one gr_down call with its fused norm
        mixed  = mean over the hc groups of sigmoid(up(silu(y_down / hc))) * xn
        inject = 2 * sigmoid(y_inject / hc): how strongly the half layer's output is added to each copy

    x [.., hc * H] fp32/bf16/fp16 -> mixed [.., H] of the same dtype, inject [.., hc] (None when built without inject rows).
    gr_down is made for the 1..8 tokens of a speculative-decoding verify window; a prompt works too.

    Buffers: `weight` uint8 [rank (+ hc), hc * H / 32 * 34] Q8_0; `norm_weight` [hc * H]. `up` maps [.., rank] to [.., hc * H].
    """

    weight: Tensor
    norm_weight: Tensor

    def __init__(self, down: Tensor, up: nn.Module, norm_weight: Tensor, *, inject: Tensor | None = None, hc: int = 4, eps: float = 1e-6):
        """down [rank, hc * H], inject [hc, hc * H] or None: float weights, quantised here."""
        super().__init__()
        rows = down if inject is None else torch.cat([down, inject])
        self.register_buffer("weight", torch.ops.mori.q8_0_quantize(rows.detach()))
        self.register_buffer("norm_weight", norm_weight.detach().clone())
        self.up = up
        self.rank, self.hc, self.eps = down.shape[0], hc, eps

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        y = torch.ops.mori.gr_down(x.reshape(-1, x.shape[-1]), self.weight, norm_weight=self.norm_weight, eps=self.eps, hc=self.hc)
        low, inject = (y / self.hc).view(*x.shape[:-1], y.shape[-1]).tensor_split([self.rank], dim=-1)
        groups = x.float().unflatten(-1, (self.hc, -1))
        xn = F.rms_norm(groups, groups.shape[-1:], eps=self.eps) * self.norm_weight.unflatten(0, (self.hc, -1))
        gate = torch.sigmoid(self.up(F.silu(low).to(x.dtype))).view_as(xn)
        mixed = (gate * xn).mean(-2).to(x.dtype)
        return mixed, 2 * torch.sigmoid(inject).to(x.dtype) if inject.shape[-1] else None

    def extra_repr(self) -> str:
        return f"rank={self.rank}, hc={self.hc}, width={self.norm_weight.numel()}, eps={self.eps}"


class RowParallelMxfp8Linear(Mxfp8Linear):
    """One rank's slice of a linear layer that is split along K: y = sum over ranks of x_r @ W_r.T (+ bias once), on every rank.

    x [.., K_r], this rank's slice of the activations -> [.., N], in dtypes as Mxfp8Linear; one gemm_ar call. Buffers as
    there, of the slice; `bias` is the same on every rank. `group` is a process group, its name, or None: the default group
    at construction, or this process alone. `wire` is gemm_ar's.
    """

    def __init__(self, codes: Tensor, scale: Tensor, bias: Tensor | None = None, *, group: ProcessGroup | str | None = None,
                 rounding: str = "rceil", wire: str = "bf16"):
        super().__init__(codes, scale, bias, rounding=rounding)
        self.group_name, self.wire = distributed.group_name(group), wire

    @classmethod
    def from_linear(cls, linear: nn.Linear, *, group: ProcessGroup | str | None = None, rounding: str = "rceil",
                    wire: str = "bf16") -> "RowParallelMxfp8Linear":
        """Quantises this rank's slice, mori_ops.distributed.shard(K, group), of the whole layer's weight."""
        mine = distributed.shard(linear.in_features, group)
        codes, scale = torch.ops.mori.mxfp8_quantize_weight(linear.weight.detach()[:, mine], rounding=rounding)
        bias = None if linear.bias is None else linear.bias.detach().clone()
        return cls(codes, scale, bias, group=group, rounding=rounding, wire=wire)

    def forward(self, x: Tensor) -> Tensor:
        out_dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
        a, a_scale = torch.ops.mori.mxfp8_quantize(x, rounding=self.rounding)
        b = self.codes.view(torch.float8_e4m3fn)
        return torch.ops.mori.gemm_ar(a, b, a_scale, self.scale, "mxfp8_raw", self.group_name, bias=self.bias,
                                      out_dtype=out_dtype, wire=self.wire)
