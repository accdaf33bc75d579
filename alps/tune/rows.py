"""A linear layer of which only some rows (or columns) train."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D


def _assemble(weight: torch.Tensor, trained: torch.Tensor, index_S: torch.Tensor, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """The dense weight in force: `weight` with its slices `index_S` along `dim` replaced by `trained`."""
    return weight.to(dtype).index_copy(dim, index_S, trained.to(dtype))


class _SliceLinear(torch.autograd.Function):
    """Linear with the gradient of the trained slices only.

    Forward is one dense product. Backward is the dense gradient of the input, and the weight gradient of the S trained rows
    (or columns): S/O of the arithmetic that a masked dense gradient costs. The dense weight is put together again in backward
    instead of being kept: a copy of one projection costs little beside its products, keeping one per layer would not.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        trained: torch.Tensor,
        index_S: torch.Tensor,
        dim: int,
        bias: torch.Tensor | None,
        trained_bias_S: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight, trained, index_S)
        ctx.dim = dim
        if bias is not None:
            bias = bias.to(x.dtype)
            if trained_bias_S is not None:
                bias = bias.index_copy(0, index_S, trained_bias_S.to(x.dtype))
        return functional.linear(x, _assemble(weight, trained, index_S, dim, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad_y,) = grads
        x, weight, trained, index_S = ctx.saved_tensors
        grad_x = grad_trained = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = grad_y @ _assemble(weight, trained, index_S, ctx.dim, x.dtype)
        grad_y_NO, x_ND = grad_y.flatten(0, -2), x.flatten(0, -2)
        if ctx.dim == 0:
            grad_y_NO = grad_y_NO.index_select(1, index_S)
        else:
            x_ND = x_ND.index_select(1, index_S)
        if ctx.needs_input_grad[2]:
            grad_trained = (grad_y_NO.T @ x_ND).to(trained.dtype)
        if ctx.needs_input_grad[6]:
            grad_bias = grad_y_NO.sum(0, dtype=trained.dtype)
        return grad_x, None, grad_trained, None, None, None, grad_bias


class SliceTrainableLinear(nn.Module):
    """Stands in for a `nn.Linear`, or transformers' `Conv1D`, and trains only the slices `indices` of its weight.

    dim="rows" opens weight rows, and the bias entries with them; dim="columns" opens weight columns and no bias. Rows are of the
    output and columns of the input, also over a Conv1D, which stores [in, out] (`transposed`). The trained slices are parameters
    of their own, `trained` [S, D] (or [O, S]) and `trained_bias` [S], in float32 (float64 over a float64 base) whatever the
    base's dtype; `weight` and `bias` are the original's own tensors, as stored there, frozen and never written to.
    """

    def __init__(self, linear: nn.Linear | Conv1D, indices: list[int], dim: Literal["rows", "columns"] = "rows") -> None:
        super().__init__()
        self.transposed = isinstance(linear, Conv1D)
        weight_OD = linear.weight.detach().T if self.transposed else linear.weight.detach()
        size = weight_OD.shape[0 if dim == "rows" else 1]
        assert indices == sorted(set(indices)), "slices must be sorted and unique"
        assert indices, "slices must be at least one"
        assert set(indices) <= set(range(size)), f"slices must be in 0..{size - 1}"
        self.dim = 0 if dim == "rows" else 1
        self.weight = linear.weight
        self.bias = linear.bias
        self.register_buffer("index", torch.tensor(indices, device=linear.weight.device), persistent=False)
        dtype = torch.promote_types(linear.weight.dtype, torch.float32)
        self.trained = nn.Parameter(weight_OD.index_select(self.dim, self.index).to(dtype).contiguous())
        self.trained_bias: nn.Parameter | None = None
        if self.bias is not None and self.dim == 0:
            self.trained_bias = nn.Parameter(linear.bias.detach()[self.index].to(dtype))
        for frozen in (self.weight, self.bias):
            if frozen is not None:
                frozen.requires_grad_(False)

    index: torch.Tensor

    @property
    def weight_out_in(self) -> torch.Tensor:
        """The frozen weight [out, in], as a view."""
        return self.weight.T if self.transposed else self.weight

    @property
    def in_features(self) -> int:
        return self.weight_out_in.shape[1]

    @property
    def out_features(self) -> int:
        return self.weight_out_in.shape[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., D] -> [..., O], in the autocast dtype if autocast is on, else in x's dtype."""
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            # Inside autocast the products would be cast again; the function below does its own casts.
            with torch.autocast(kind, enabled=False):
                return self._linear(x.to(dtype))
        return self._linear(x)

    def _linear(self, x: torch.Tensor) -> torch.Tensor:
        parameters = (self.weight_out_in, self.trained, self.index, self.dim, self.bias, self.trained_bias)
        y: torch.Tensor = _SliceLinear.apply(x, *parameters)  # type: ignore[no-untyped-call]
        return y

    @torch.no_grad()
    def merged(self) -> nn.Linear | Conv1D:
        """A plain module, of the kind this one stands in for, with the trained slices written in, in the base's dtype.

        The base tensors stay as they were.
        """
        weight = _assemble(self.weight_out_in, self.trained, self.index, self.dim, self.weight.dtype)
        bias: torch.Tensor | None = self.bias
        if bias is not None and self.trained_bias is not None:
            bias = bias.index_copy(0, self.index, self.trained_bias.to(bias.dtype))
        return self._plain(
            nn.Parameter((weight.T if self.transposed else weight).contiguous(), requires_grad=False),
            None if bias is None else nn.Parameter(bias.clone(), requires_grad=False),
        )

    @torch.no_grad()
    def original(self) -> nn.Linear | Conv1D:
        """The module as it was before training."""
        return self._plain(self.weight, self.bias)  # type: ignore[arg-type]

    def _plain(self, weight: nn.Parameter, bias: nn.Parameter | None) -> nn.Linear | Conv1D:
        with torch.device("meta"):
            plain = (
                Conv1D(self.out_features, self.in_features)
                if self.transposed
                else nn.Linear(self.in_features, self.out_features, bias=bias is not None)
            )
        plain.weight = weight
        if bias is not None:
            plain.bias = bias
        return plain

    def extra_repr(self) -> str:
        what = "rows" if self.dim == 0 else "columns"
        return f"in={self.in_features}, out={self.out_features}, trained {what}={len(self.index)}"
