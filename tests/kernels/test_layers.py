"""The row-wise ops against torch's own or the textbook formula."""

import math

import numpy as np
import pytest
import torch

from kernels import ops
from kernels.cpu import _kernels
from kernels.packing import Format


def test_gelu_mul_is_the_tanh_form():
    """g/2 (1 + tanh(sqrt(2/pi) (g + 0.044715 g^3))) * up, gate first."""
    gate_up = torch.randn(3, 20) * 3
    out = torch.empty(3, 10)
    ops.gelu_mul(out, gate_up)
    gate, up = gate_up[:, :10].double(), gate_up[:, 10:].double()
    want = gate / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up
    torch.testing.assert_close(out, want.float())


def test_rms_norm_equals_torch():
    """Same as `torch.nn.functional.rms_norm`."""
    x, weight = torch.randn(5, 48), torch.randn(48)
    out = torch.empty_like(x)
    ops.rms_norm(out, x, weight, 1e-5)
    torch.testing.assert_close(out, torch.nn.functional.rms_norm(x, (48,), weight, 1e-5))


def test_rope_rotates_pairs_as_complex_numbers():
    """Pair (i, i + half) of a head is multiplied by e^(i angle)."""
    x = torch.randn(4, 3, 16)
    angles = torch.rand(4, 8) * 2 * math.pi
    want = torch.complex(x[..., :8], x[..., 8:]) * torch.polar(torch.ones(4, 8), angles)[:, None]
    ops.rope(x, angles.cos(), angles.sin())
    torch.testing.assert_close(x, torch.cat([want.real, want.imag], dim=-1))


def test_silu_mul_gates_the_second_half():
    """silu(gate) * up, gate first."""
    gate_up = torch.randn(3, 20)
    out = torch.empty(3, 10)
    ops.silu_mul(out, gate_up)
    gate, up = gate_up[:, :10], gate_up[:, 10:]
    torch.testing.assert_close(out, gate / (1 + (-gate).exp()) * up)


BODIES = pytest.mark.parametrize("simd", [True, False], ids=["simd", "scalar"])
ROWS, WIDTH = 19, 52  # more than two threads' pieces, and no multiple of a register


def floats(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape, np.float32)


@BODIES
def test_compiled_rms_norm_equals_the_reference(simd: bool):
    """Row by row, on two threads, as often as asked."""
    x, weight, out = floats(ROWS, WIDTH), floats(WIDTH), np.full((ROWS, WIDTH), np.nan, np.float32)
    want = torch.empty(ROWS, WIDTH)
    ops.rms_norm(want, torch.from_numpy(x), torch.from_numpy(weight), 1e-5)
    _kernels.rms_norm(x, weight, 1e-5, out, 2, 2, simd)
    torch.testing.assert_close(torch.from_numpy(out), want)


@BODIES
@pytest.mark.parametrize("gelu", [False, True])
def test_compiled_gates_equal_the_reference(gelu: bool, simd: bool):
    """SiLU and GELU by tanh."""
    both, out = 3 * floats(2, ROWS, WIDTH), np.full((ROWS, WIDTH), np.nan, np.float32)
    want = torch.empty(ROWS, WIDTH)
    (ops.gelu_mul if gelu else ops.silu_mul)(want, torch.from_numpy(np.concatenate(list(both), axis=1)))
    _kernels.gate_mul(both[0], both[1], gelu, out, 2, 2, simd)
    torch.testing.assert_close(torch.from_numpy(out), want, rtol=1e-5, atol=1e-5)


@BODIES
def test_compiled_rope_equals_the_reference(simd: bool):
    """Every head of a row by the row's angles; two passes turn twice."""
    x, angles = floats(ROWS, 3 * 20), floats(ROWS, 10)
    cos, sin = np.cos(angles), np.sin(angles)
    want = torch.from_numpy(x.copy()).view(ROWS, 3, 20)
    for _ in range(2):
        ops.rope(want, torch.from_numpy(cos), torch.from_numpy(sin))
    _kernels.rope(x, cos, sin, 2, 2, simd)
    torch.testing.assert_close(torch.from_numpy(x).view(ROWS, 3, 20), want)


@BODIES
def test_rows_are_quantised_in_groups(simd: bool):
    """Each group: its largest / 127, the sum of what is kept, and the rounded numbers; zeros behind the row's end."""
    x, out = floats(ROWS, WIDTH), np.empty((ROWS, 2 * 40), np.uint8)
    _kernels.prepare_rows(Format.Q4, x, None, 0.0, out, 1, 2, simd)
    groups = out.reshape(ROWS, 2, 40)
    scale, total = groups[..., :4].copy().view(np.float32)[..., 0], groups[..., 4:8].copy().view(np.float32)[..., 0]
    numbers = groups[..., 8:].view(np.int8)
    padded = np.pad(x, ((0, 0), (0, 64 - WIDTH))).reshape(ROWS, 2, 32)
    np.testing.assert_allclose(scale, np.abs(padded).max(-1) / 127, rtol=1e-6)
    assert (np.abs(numbers * scale[..., None] - padded) <= 0.5001 * scale[..., None]).all()
    np.testing.assert_allclose(total, scale * numbers.sum(-1), rtol=1e-5, atol=1e-6)
    assert not numbers[:, 1, WIDTH - 32 :].any()


@BODIES
@pytest.mark.parametrize("fmt", list(Format))
def test_a_norm_before_preparation_is_the_same_as_one_by_itself(fmt: Format, simd: bool):
    """Bit for bit."""
    x, weight = floats(ROWS, WIDTH), floats(WIDTH)
    normed = np.empty_like(x)
    _kernels.rms_norm(x, weight, 1e-5, normed, 1, 1, simd)
    row_bytes = {Format.F32: 4 * WIDTH, Format.Q8: 2 * 72, Format.Q4: 2 * 40}[fmt]
    one, two = np.zeros((ROWS, row_bytes), np.uint8), np.ones((ROWS, row_bytes), np.uint8)
    _kernels.prepare_rows(fmt, normed, None, 0.0, one, 1, 1, simd)
    _kernels.prepare_rows(fmt, x, weight, 1e-5, two, 1, 2, simd)
    np.testing.assert_array_equal(one, two)


def test_rowwise_ops_refuse_what_does_not_fit():
    """Another number of rows, columns, or angles."""
    x, y = floats(4, 8), floats(4, 6)
    with pytest.raises(ValueError, match="rms_norm"):
        _kernels.rms_norm(x, floats(8), 1e-5, y, 1, 1, True)
    with pytest.raises(ValueError, match="gate_mul"):
        _kernels.gate_mul(x, x, False, y, 1, 1, True)
    with pytest.raises(ValueError, match="rope"):
        _kernels.rope(x, y, y, 1, 1, True)
    with pytest.raises(ValueError, match="prepare_rows"):
        _kernels.prepare_rows(Format.Q8, x, None, 0.0, np.empty((4, 8), np.uint8), 1, 1, True)
    with pytest.raises(ValueError, match="no such format"):
        _kernels.prepare_rows(3, x, None, 0.0, np.empty((4, 8), np.uint8), 1, 1, True)
