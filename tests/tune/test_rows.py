"""SliceTrainableLinear against `nn.Linear`: the same values, and the same gradients where one is wanted at all."""

from __future__ import annotations

import copy
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from transformers.pytorch_utils import Conv1D

from alps.tune import SliceTrainableLinear

Dim = Literal["rows", "columns"]
CASES: list[tuple[Dim, bool]] = [("rows", False), ("rows", True), ("columns", False), ("columns", True)]
ROWS, COLUMNS = 6, 5
INDICES = [0, 2, 3]


def pair(dim: Dim, bias: bool, dtype: torch.dtype = torch.float64) -> tuple[nn.Linear, SliceTrainableLinear]:
    """A dense linear that trains whole, and one that trains slices, of the same weights but no shared memory."""
    dense = nn.Linear(COLUMNS, ROWS, bias=bias, dtype=dtype)
    return dense, SliceTrainableLinear(copy.deepcopy(dense), INDICES, dim)


def check_gradients(sliced: SliceTrainableLinear, dense: nn.Linear, **tolerance: float) -> None:
    """The trained slices hold the dense gradient's slices, element by element; nothing else has one."""
    assert dense.weight.grad is not None
    assert sliced.trained.grad is not None
    indices = sliced.index.tolist()
    for place, index in enumerate(indices):
        if sliced.dim == 0:
            expected, found = dense.weight.grad[index], sliced.trained.grad[place]
        else:
            expected, found = dense.weight.grad[:, index], sliced.trained.grad[:, place]
        torch.testing.assert_close(found, expected.to(found.dtype), **tolerance)
    assert sliced.weight.grad is None
    if sliced.bias is not None:
        assert sliced.bias.grad is None
    if sliced.trained_bias is not None:
        assert dense.bias.grad is not None
        assert sliced.trained_bias.grad is not None
        for place, index in enumerate(indices):
            torch.testing.assert_close(
                sliced.trained_bias.grad[place], dense.bias.grad[index].to(sliced.trained_bias.dtype), **tolerance
            )


@pytest.mark.parametrize(("dim", "bias"), CASES)
@pytest.mark.parametrize("shape", [(4,), (2, 3)])
def test_same_values_and_gradients_as_a_dense_linear(dim: Dim, bias: bool, shape: tuple[int, ...]) -> None:
    dense, sliced = pair(dim, bias)
    x_dense = torch.randn(*shape, COLUMNS, dtype=torch.float64, requires_grad=True)
    x_sliced = x_dense.detach().clone().requires_grad_()
    y_dense, y_sliced = dense(x_dense), sliced(x_sliced)
    torch.testing.assert_close(y_sliced, y_dense, rtol=0, atol=1e-14)
    downstream = torch.randn_like(y_dense)
    y_dense.backward(downstream)
    y_sliced.backward(downstream)
    torch.testing.assert_close(x_sliced.grad, x_dense.grad, rtol=0, atol=1e-13)
    check_gradients(sliced, dense, rtol=0, atol=1e-13)


@pytest.mark.parametrize(("dim", "bias"), CASES)
def test_trained_slices_are_in_force(dim: Dim, bias: bool) -> None:
    """After a change of the slices, as an optimizer makes it, all is as with the changed weight in a dense linear."""
    dense, sliced = pair(dim, bias)
    with torch.no_grad():
        sliced.trained.normal_()
        for place, index in enumerate(INDICES):
            if dim == "rows":
                dense.weight[index] = sliced.trained[place]
            else:
                dense.weight[:, index] = sliced.trained[:, place]
        if sliced.trained_bias is not None:
            sliced.trained_bias.normal_()
            for place, index in enumerate(INDICES):
                dense.bias[index] = sliced.trained_bias[place]
    x_dense = torch.randn(4, COLUMNS, dtype=torch.float64, requires_grad=True)
    x_sliced = x_dense.detach().clone().requires_grad_()
    torch.testing.assert_close(sliced(x_sliced), dense(x_dense), rtol=0, atol=1e-14)
    dense(x_dense).square().sum().backward()
    sliced(x_sliced).square().sum().backward()
    torch.testing.assert_close(x_sliced.grad, x_dense.grad, rtol=0, atol=1e-12)
    check_gradients(sliced, dense, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("dim", "bias"), CASES)
@pytest.mark.parametrize("shape", [(3,), (2, 2)])
def test_gradcheck(dim: Dim, bias: bool, shape: tuple[int, ...]) -> None:
    _, sliced = pair(dim, bias)
    x = torch.randn(*shape, COLUMNS, dtype=torch.float64, requires_grad=True)
    parameters = [p for p in (sliced.trained, sliced.trained_bias) if p is not None]

    def forward(x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        named = dict(zip(["trained", "trained_bias"], parameters, strict=False))
        return torch.func.functional_call(sliced, named, (x,))

    assert torch.autograd.gradcheck(forward, (x, *parameters))


@pytest.mark.parametrize("dim", ["rows", "columns"])
def test_only_the_slices_are_trainable_and_columns_open_no_bias(dim: Dim) -> None:
    _, sliced = pair(dim, bias=True)
    trainable = {name: tuple(p.shape) for name, p in sliced.named_parameters() if p.requires_grad}
    rows = {"trained": (3, COLUMNS), "trained_bias": (3,)}
    assert trainable == (rows if dim == "rows" else {"trained": (ROWS, 3)})


@pytest.mark.parametrize("dim", ["rows", "columns"])
@pytest.mark.parametrize("input_gradient", [False, True])
def test_backward_costs_the_slices_and_the_input_gradient_only(dim: Dim, input_gradient: bool) -> None:
    """Counted in arithmetic: S/O of the dense weight gradient, and no input gradient where nothing asks for one."""
    num_tokens = 7
    _, sliced = pair(dim, bias=True)
    y = sliced(torch.randn(num_tokens, COLUMNS, dtype=torch.float64, requires_grad=input_gradient))
    with FlopCounterMode(display=False) as counter:
        y.backward(torch.ones_like(y))
    of_slices = 2 * num_tokens * len(INDICES) * (COLUMNS if dim == "rows" else ROWS)
    of_input = 2 * num_tokens * ROWS * COLUMNS if input_gradient else 0
    assert counter.get_total_flops() == of_slices + of_input


def test_frozen_slices_need_no_backward_at_all() -> None:
    _, sliced = pair("rows", bias=True)
    sliced.requires_grad_(False)
    assert not sliced(torch.randn(4, COLUMNS, dtype=torch.float64)).requires_grad


@pytest.mark.parametrize(("dim", "bias"), CASES)
def test_inside_activation_checkpointing(dim: Dim, bias: bool) -> None:
    dense, sliced = pair(dim, bias)
    x_dense = torch.randn(2, 3, COLUMNS, dtype=torch.float64, requires_grad=True)
    x_sliced = x_dense.detach().clone().requires_grad_()
    calls = []
    sliced.register_forward_hook(lambda *_: calls.append(1))
    torch.tanh(dense(x_dense)).sum().backward()
    checkpoint(lambda x: torch.tanh(sliced(x)), x_sliced, use_reentrant=False).sum().backward()
    assert len(calls) == 2, "the forward was not computed again: nothing was checkpointed"
    torch.testing.assert_close(x_sliced.grad, x_dense.grad, rtol=0, atol=1e-13)
    check_gradients(sliced, dense, rtol=0, atol=1e-13)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("base", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("dim", "bias"), CASES)
def test_under_bf16_autocast(dim: Dim, bias: bool, base: torch.dtype, checkpointed: bool) -> None:
    """bf16 products, float32 trained slices and gradients, over a float32 or a bf16 base."""
    dense, sliced = pair(dim, bias, base)
    dense = dense.float()
    x_dense = torch.randn(2, 3, COLUMNS, requires_grad=True)
    x_sliced = x_dense.detach().clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y_dense = dense(x_dense)
        y_sliced = checkpoint(sliced, x_sliced, use_reentrant=False) if checkpointed else sliced(x_sliced)
    assert y_dense.dtype == y_sliced.dtype == torch.bfloat16
    torch.testing.assert_close(y_sliced, y_dense, rtol=1e-2, atol=1e-2)
    downstream = torch.randn_like(y_dense)
    y_dense.backward(downstream)
    y_sliced.backward(downstream)
    assert sliced.trained.dtype == torch.float32
    assert sliced.trained.grad is not None
    assert sliced.trained.grad.dtype == torch.float32
    assert sliced.weight.dtype == base
    assert x_sliced.grad is not None
    assert x_sliced.grad.dtype == torch.float32
    torch.testing.assert_close(x_sliced.grad, x_dense.grad, rtol=2e-2, atol=2e-2)
    check_gradients(sliced, dense, rtol=2e-2, atol=2e-2)


def test_a_bf16_base_without_autocast_computes_in_bf16_and_trains_float32() -> None:
    dense, sliced = pair("rows", True, torch.bfloat16)
    x = torch.randn(4, COLUMNS, dtype=torch.bfloat16, requires_grad=True)
    y = sliced(x)
    torch.testing.assert_close(y, dense(x), rtol=0, atol=0)
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.bfloat16
    assert sliced.trained_bias is not None
    for parameter in (sliced.trained, sliced.trained_bias):
        assert parameter.dtype == torch.float32
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.float32


@pytest.mark.parametrize("base", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("dim", "bias"), CASES)
def test_training_never_writes_to_the_frozen_tensors(dim: Dim, bias: bool, base: torch.dtype) -> None:
    linear = nn.Linear(COLUMNS, ROWS, bias=bias, dtype=base)
    weight, before = linear.weight, copy.deepcopy(linear)
    sliced = SliceTrainableLinear(linear, INDICES, dim)
    assert sliced.weight is weight, "a copy of the frozen weight would cost its memory again"
    optimizer = torch.optim.AdamW(sliced.parameters(), lr=0.1, weight_decay=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        sliced(torch.randn(4, COLUMNS, dtype=base)).square().mean().backward()
        optimizer.step()
    assert torch.equal(weight, before.weight)
    merged, original = sliced.merged(), sliced.original()
    assert torch.equal(weight, before.weight), "merging wrote into the base"
    assert type(merged) is type(original) is nn.Linear
    assert original.weight is weight
    assert torch.equal(original.weight, before.weight)
    assert merged.weight.dtype == base
    for index in range(ROWS if dim == "rows" else COLUMNS):
        here = (index,) if dim == "rows" else (slice(None), index)
        assert torch.equal(merged.weight[here], before.weight[here]) == (index not in INDICES)
        if index in INDICES:
            place = INDICES.index(index)
            trained = sliced.trained[place] if dim == "rows" else sliced.trained[:, place]
            assert torch.equal(merged.weight[here], trained.to(base))
    if bias:
        assert torch.equal(sliced.bias, before.bias)
        assert torch.equal(original.bias, before.bias)
        moved = [bool(merged.bias[index] != before.bias[index]) for index in range(ROWS)]
        assert moved == [dim == "rows" and index in INDICES for index in range(ROWS)]
    x = torch.randn(4, COLUMNS, dtype=base)
    torch.testing.assert_close(merged(x), sliced(x), rtol=0, atol=0)


def test_merged_shares_no_memory_with_the_base() -> None:
    linear = nn.Linear(COLUMNS, ROWS)
    for dim in ("rows", "columns"):
        merged = SliceTrainableLinear(linear, INDICES, dim).merged()  # type: ignore[arg-type]
        assert merged.weight.data_ptr() != linear.weight.data_ptr()
        assert merged.bias.data_ptr() != linear.bias.data_ptr()


# Over transformers' Conv1D, which stores [in, out] ------------------------------------------------------------------------


def conv1d_of(linear: nn.Linear) -> Conv1D:
    """The same function as a Conv1D, of no shared memory."""
    conv = Conv1D(linear.out_features, linear.in_features)
    conv.weight = nn.Parameter(linear.weight.detach().T.contiguous().clone())
    conv.bias = nn.Parameter(linear.bias.detach().clone())
    return conv


@pytest.mark.parametrize("dim", ["rows", "columns"])
def test_over_conv1d_values_gradients_and_merged_are_those_of_a_linear(dim: Dim) -> None:
    dense, over_linear = pair(dim, bias=True)
    conv = conv1d_of(dense)
    sliced = SliceTrainableLinear(conv, INDICES, dim)
    assert sliced.weight is conv.weight, "a copy of the frozen weight"
    assert (sliced.in_features, sliced.out_features) == (COLUMNS, ROWS)
    assert torch.equal(sliced.trained, over_linear.trained), "the trained slices are not those of [out, in]"
    assert sliced.trained.is_contiguous()
    with torch.no_grad():
        sliced.trained.normal_()
        for place, index in enumerate(INDICES):
            if dim == "rows":
                dense.weight[index] = sliced.trained[place]
            else:
                dense.weight[:, index] = sliced.trained[:, place]
    x_dense = torch.randn(2, 3, COLUMNS, dtype=torch.float64, requires_grad=True)
    x_sliced = x_dense.detach().clone().requires_grad_()
    torch.testing.assert_close(sliced(x_sliced), dense(x_dense), rtol=0, atol=1e-14)
    dense(x_dense).square().sum().backward()
    sliced(x_sliced).square().sum().backward()
    torch.testing.assert_close(x_sliced.grad, x_dense.grad, rtol=0, atol=1e-12)
    check_gradients(sliced, dense, rtol=0, atol=1e-12)
    merged = sliced.merged()
    assert type(merged) is Conv1D
    assert (merged.nf, merged.nx) == (ROWS, COLUMNS)
    assert torch.equal(merged.weight, dense.weight.T)
    assert merged.weight.is_contiguous()
    torch.testing.assert_close(merged(x_dense), dense(x_dense), rtol=0, atol=1e-14)


@pytest.mark.parametrize("base", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", ["rows", "columns"])
def test_over_conv1d_the_frozen_tensors_stay(dim: Dim, base: torch.dtype) -> None:
    conv = conv1d_of(nn.Linear(COLUMNS, ROWS, dtype=base))
    before = copy.deepcopy(conv)
    sliced = SliceTrainableLinear(conv, INDICES, dim)
    assert sliced.trained.dtype == torch.float32
    trained = [parameter for parameter in sliced.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.1, weight_decay=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=base == torch.bfloat16):
            loss = sliced(torch.randn(4, COLUMNS)).float().square().mean()
        loss.backward()
        optimizer.step()
    merged, original = sliced.merged(), sliced.original()
    assert torch.equal(conv.weight, before.weight)
    assert type(original) is Conv1D
    assert original.weight is conv.weight
    assert original.bias is conv.bias
    assert merged.weight.data_ptr() != conv.weight.data_ptr()
    assert merged.bias.data_ptr() != conv.bias.data_ptr()
    moved = merged.weight != before.weight  # [in, out]
    expected = torch.zeros_like(moved)
    if dim == "rows":
        expected[:, INDICES] = True
    else:
        expected[INDICES] = True
    assert torch.equal(moved, expected)
    assert (merged.bias != before.bias).tolist() == [dim == "rows" and index in INDICES for index in range(ROWS)]


@pytest.mark.parametrize("indices", [[], [1, 0], [1, 1], [-1, 0], [ROWS]])
def test_impossible_slices_are_refused(indices: list[int]) -> None:
    with pytest.raises(AssertionError, match="slices must be"):
        SliceTrainableLinear(nn.Linear(COLUMNS, ROWS), indices)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_shape_and_any_slices(data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(1, 9), "rows"), data.draw(st.integers(1, 9), "columns")
    dim: Dim = data.draw(st.sampled_from(["rows", "columns"]), "dim")
    size = rows if dim == "rows" else columns
    indices = sorted(data.draw(st.sets(st.integers(0, size - 1), min_size=1), "indices"))
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3), "shape")
    dense = nn.Linear(columns, rows, bias=data.draw(st.booleans(), "bias"), dtype=torch.float64)
    sliced = SliceTrainableLinear(copy.deepcopy(dense), indices, dim)
    x_dense = torch.randn(*shape, columns, dtype=torch.float64, requires_grad=True)
    x_sliced = x_dense.detach().clone().requires_grad_()
    y_dense, y_sliced = dense(x_dense), sliced(x_sliced)
    torch.testing.assert_close(y_sliced, y_dense, rtol=0, atol=1e-13)
    y_dense.square().sum().backward()
    y_sliced.square().sum().backward()
    torch.testing.assert_close(x_sliced.grad, x_dense.grad, rtol=0, atol=1e-11)
    check_gradients(sliced, dense, rtol=0, atol=1e-11)
    assert torch.equal(sliced.merged().weight, dense.weight)


@pytest.mark.slow
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dim", ["rows", "columns"])
def test_torch_compile(dim: Dim, autocast: bool) -> None:
    """Compiled, between other operations: the same values and gradients as not compiled."""
    _, sliced = pair(dim, True, torch.float32)
    plain = nn.Sequential(nn.Tanh(), sliced, nn.Tanh())
    compiled = torch.compile(copy.deepcopy(plain), fullgraph=False)
    x_plain = torch.randn(2, 3, COLUMNS, requires_grad=True)
    x_compiled = x_plain.detach().clone().requires_grad_()
    close = {"rtol": 2e-2, "atol": 2e-2} if autocast else {"rtol": 1e-5, "atol": 1e-6}
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        y_plain, y_compiled = plain(x_plain), compiled(x_compiled)
    assert y_compiled.dtype == y_plain.dtype
    torch.testing.assert_close(y_compiled, y_plain, **close)
    y_plain.float().sum().backward()
    y_compiled.float().sum().backward()
    torch.testing.assert_close(x_compiled.grad, x_plain.grad, **close)
    for (name, a), b in zip(plain.named_parameters(), compiled.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None) == (not a.requires_grad), name
        if a.grad is not None:
            torch.testing.assert_close(b.grad, a.grad, **close)
