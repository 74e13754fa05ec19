"""Linear layers on packed weights: against the unpacked weights in float64, and their promise of equal bits."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.cpu import _kernels
from kernels.packing import (
    GROUP,
    OUTS,
    Format,
    interleave,
    pack_f32,
    pack_q4,
    pack_q8,
    packed_bytes,
    quantise_q8,
)

STORE, ADD, SILU_MUL, GELU_MUL = 0, 1, 2, 3
SIZES = [(16, 32), (1, 32), (7, 64), (48, 96), (40, 40), (33, 7), (192, 576)]


def make_weights(fmt: Format, outputs: int, inputs: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Packed, and the float64 matrix that the packed bytes mean."""
    rng = np.random.default_rng(seed)
    groups = -(-inputs // GROUP)
    if fmt == Format.F32:
        dense = rng.standard_normal((outputs, inputs)).astype(np.float32)
        return pack_f32(dense), dense.astype(np.float64)
    scale = rng.standard_normal((outputs, groups)).astype(np.float16)
    wide = np.repeat(scale.astype(np.float64), GROUP, axis=1)[:, :inputs]
    if fmt == Format.Q8:
        q = rng.integers(-128, 128, (outputs, inputs)).astype(np.int8)
        return pack_q8(q, scale), q * wide
    q, minimum = rng.integers(0, 16, (outputs, inputs)).astype(np.uint8), rng.standard_normal((outputs, groups))
    minimum = minimum.astype(np.float16)
    return pack_q4(q, scale, minimum), q * wide + np.repeat(minimum.astype(np.float64), GROUP, axis=1)[:, :inputs]


def make_matrix(fmt: Format, outputs: int, inputs: int, packed: np.ndarray) -> _kernels.Matrix:
    assert packed.nbytes == packed_bytes(fmt, outputs, inputs)
    return _kernels.Matrix(int(fmt), outputs, inputs, packed)


def linear(w: _kernels.Matrix, x: np.ndarray, width: int, *, finish=STORE, threads=1, simd=True, out=None):
    out = np.full((len(x), width), np.nan, np.float32) if out is None else out
    _kernels.linear(w, x, out, finish, threads, simd)
    return out


def quantised(x: np.ndarray) -> np.ndarray:
    """What the activations mean after their rounding to 8 bits, group by group, in float64."""
    padded = np.pad(x, ((0, 0), (0, -x.shape[1] % GROUP))).reshape(len(x), -1, GROUP)
    most = np.abs(padded).max(axis=-1, keepdims=True)
    inverse = np.divide(np.float32(127), most, out=np.zeros_like(most), where=most > 0)
    q = np.rint(padded * inverse)
    return (q * (most / np.float32(127)).astype(np.float64)).reshape(len(x), -1)[:, : x.shape[1]]


@pytest.mark.parametrize("simd", [True, False], ids=["simd", "scalar"])
@pytest.mark.parametrize("fmt", list(Format))
@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_product_equals_the_unpacked_weights(fmt: Format, outputs: int, inputs: int, simd: bool):
    """Odd sizes included; nothing behind the last column is written, and no stray byte is read into it."""
    packed, dense = make_weights(fmt, outputs, inputs)
    w = make_matrix(fmt, outputs, inputs, packed)
    x = np.random.default_rng(1).standard_normal((13, inputs)).astype(np.float32)
    meant = x.astype(np.float64) if fmt == Format.F32 else quantised(x)
    want = meant @ dense.T
    tolerance = 1e-6 * (np.abs(meant) @ np.abs(dense).T).max()
    np.testing.assert_allclose(linear(w, x, outputs, simd=simd), want, rtol=0, atol=tolerance)
    base = np.random.default_rng(2).standard_normal((13, outputs)).astype(np.float32)
    got = linear(w, x, outputs, finish=ADD, simd=simd, out=base.copy())
    np.testing.assert_allclose(got, base + want, rtol=0, atol=2 * tolerance + 1e-6)


@pytest.mark.parametrize("simd", [True, False], ids=["simd", "scalar"])
@pytest.mark.parametrize("fmt", list(Format))
@pytest.mark.parametrize("width", [16, 24, 96])
def test_gate_and_up_in_one_product(fmt: Format, width: int, simd: bool):
    """Blocks of gate and up in turns give silu(gate) * up, or gelu(gate) * up, whatever the width."""
    gate, dense_gate = make_weights(fmt, width, 64, seed=3)
    up, dense_up = make_weights(fmt, width, 64, seed=4)
    both = interleave(gate, up, packed_bytes(fmt, OUTS, 64))
    w = make_matrix(fmt, 2 * -(-width // OUTS) * OUTS, 64, both)
    x = np.random.default_rng(5).standard_normal((9, 64)).astype(np.float32) / 20
    meant = x.astype(np.float64) if fmt == Format.F32 else quantised(x)
    g, u = meant @ dense_gate.T, meant @ dense_up.T
    got = linear(w, x, width, finish=SILU_MUL, simd=simd)
    np.testing.assert_allclose(got, g / (1 + np.exp(-g)) * u, rtol=1e-4, atol=1e-4)
    got = linear(w, x, width, finish=GELU_MUL, simd=simd)
    tanh = np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3))
    np.testing.assert_allclose(got, g / 2 * (1 + tanh) * u, rtol=1e-4, atol=1e-4)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_row_has_the_same_bits_alone_and_in_any_batch(data):
    """Other rows, their number, its place among them, and threads change no bit; in every format."""
    fmt, simd = data.draw(st.sampled_from(list(Format))), data.draw(st.booleans())
    packed, _ = make_weights(fmt, 80, 96)
    w = make_matrix(fmt, 80, 96, packed)
    rows = data.draw(st.integers(1, 40 if not simd else 230))
    x = np.random.default_rng(rows).standard_normal((rows, 96)).astype(np.float32)
    together = linear(w, x, 80, threads=data.draw(st.integers(1, 3)), simd=simd)
    for at in {0, rows - 1, data.draw(st.integers(0, rows - 1))}:
        assert np.array_equal(linear(w, x[at : at + 1].copy(), 80, simd=simd)[0], together[at])


@pytest.mark.parametrize("simd", [True, False], ids=["simd", "scalar"])
@pytest.mark.parametrize("fmt", list(Format))
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_reaches_every_output(fmt: Format, bad: float, simd: bool):
    """A broken activation must not be rounded into a number."""
    packed, _ = make_weights(fmt, 32, 64)
    x = np.ones((3, 64), np.float32)
    x[1, 40] = bad
    out = linear(make_matrix(fmt, 32, 64, packed), x, 32, simd=simd)
    assert not np.isfinite(out[1]).any()
    assert np.isfinite(out[[0, 2]]).all()


@pytest.mark.parametrize("fmt", list(Format))
def test_rows_of_the_matrix_can_be_read_back(fmt: Format):
    """Embedding lookup from the packed table."""
    packed, dense = make_weights(fmt, 37, 70)
    w = make_matrix(fmt, 37, 70, packed)
    rows = np.array([[5, 5, 5, 5, 5, 5], [0, 7, 8, 15, 16, 36]], np.int32)  # two passes: the last one's stay
    out = np.full((6, 70), np.nan, np.float32)
    _kernels.read_rows(w, rows, out, 2)
    np.testing.assert_allclose(out, dense[rows[1]], rtol=1e-6, atol=1e-6)
    for row in (37, -1):
        with pytest.raises(IndexError):
            _kernels.read_rows(w, np.array([[row]], np.int32), np.zeros((1, 70), np.float32), 1)


def test_eight_bit_weights_are_near_the_floats():
    """Each group's largest weight is met, the others within half a step; zeros stay zeros."""
    dense = np.random.default_rng(0).standard_normal((20, 70)).astype(np.float32)
    dense[3] = 0
    q, scale = quantise_q8(dense)
    back = q * np.repeat(scale.astype(np.float32), GROUP, axis=1)[:, :70]
    assert np.abs(back - dense).max() <= 0.51 * scale.max() + 127 * scale.max() * 2**-11
    assert not back[3].any()


def test_wrong_sizes_are_refused():
    """A matrix of another size than its data, and rows that do not fit it."""
    packed, _ = make_weights(Format.Q4, 32, 64)
    with pytest.raises(ValueError, match="another size"):
        _kernels.Matrix(int(Format.Q4), 48, 64, packed)
    w = make_matrix(Format.Q4, 32, 64, packed)
    with pytest.raises(ValueError, match="do not fit"):
        linear(w, np.zeros((2, 32), np.float32), 32)
    with pytest.raises(ValueError, match="do not fit"):
        linear(w, np.zeros((2, 64), np.float32), 33)
