"""The row-wise ops against torch's own or the textbook formula."""

import math

import torch

from kernels import ops


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
