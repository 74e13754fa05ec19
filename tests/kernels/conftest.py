"""Every body of the paged ops, so that each test runs on all of them."""

from collections.abc import Callable
from functools import partial

import pytest
import torch

from kernels.cpu import body as cpu
from kernels.kv_rows import CACHE_DTYPES
from kernels.reference import body as reference

STORE: dict[str, Callable[..., None]] = {
    "simd": cpu.store_kv,
    "scalar": partial(cpu.store_kv, simd=False),
    "reference": reference.store_kv,
}
ATTEND: dict[str, Callable[..., None]] = {
    "simd": cpu.paged_attention,
    "scalar": partial(cpu.paged_attention, simd=False),
    "reference": reference.paged_attention,
}


@pytest.fixture(params=sorted(STORE))
def store(request: pytest.FixtureRequest) -> Callable[..., None]:
    return STORE[request.param]


@pytest.fixture(params=sorted(ATTEND))
def attend(request: pytest.FixtureRequest) -> Callable[..., None]:
    return ATTEND[request.param]


@pytest.fixture(params=["simd", "scalar"])
def attend_cpp(request: pytest.FixtureRequest) -> Callable[..., None]:
    return ATTEND[request.param]


@pytest.fixture(params=CACHE_DTYPES, ids=lambda d: str(d).removeprefix("torch."))
def cache_dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param
