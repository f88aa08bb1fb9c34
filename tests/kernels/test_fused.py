"""The fused row-local ops: a row's bits are batch-independent, null rows change nothing, and
roundings stay in place.

Every test runs on the CPU's backends, on Triton under its interpreter and on Triton on a GPU;
equality is bit for bit.
"""

import pytest
import torch
import torch.nn.functional as F

from lockstep.kernels.activations import silu, silu_mul
from lockstep.kernels.linear import tree_sum
from lockstep.kernels.norm import add_rms_norm, rms_norm
from lockstep.kernels.rotary import rope_and_cache
from lockstep.kernels.rotary.cases import PAGE_SIZE, rope
from tests.kernels.backends import Backend, backends, same_bits

BACKENDS = backends()
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
SLICES = (slice(0, 1), slice(3, 4), slice(5, 12))
LAYERS = [(4, 2, 32, 8, True, 1.0), (3, 1, 80, 40, False, 0.0), (24, 4, 256, 64, True, 1.0)]
"""(heads, KV heads, head dim, rotary width, gated, offset)."""


def numbers(backend: Backend, *shape: int, seed: int = 0) -> torch.Tensor:
    """Return normal numbers times 2^-6 .. 2^6 in the backend's dtype on its device."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-6, 7, shape, generator=generator)
    x = torch.randn(shape, generator=generator) * torch.exp2(exponents.float())
    return x.to(backend.dtype).to(backend.device)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("width", [48, 1000, 5120])
def test_add_rms_norm_row_is_batch_independent(backend, width):
    x = numbers(backend, 12, width)
    delta = numbers(backend, 12, width, seed=1)
    weight = numbers(backend, width, seed=2)
    full = backend.run(add_rms_norm, dict(x=x, delta=delta, weight=weight, eps=1e-6))
    for s in SLICES:
        part = backend.run(add_rms_norm, dict(x=x[s], delta=delta[s], weight=weight, eps=1e-6))
        assert all(same_bits(a, b[s]) for a, b in zip(part, full, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_add_rms_norm_equals_add_then_norm(backend):
    x = numbers(backend, 12, 1000)
    delta = numbers(backend, 12, 1000, seed=1)
    norm = dict(weight=numbers(backend, 1000, seed=2), eps=1e-6, offset=1.0)
    total, out = backend.run(add_rms_norm, dict(x=x, delta=delta, **norm))
    assert same_bits(total, x + delta)
    assert same_bits(out, backend.run(rms_norm, dict(x=x + delta, **norm)))


@pytest.mark.covering(strength=2)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("width", [40, 1000, 5120])
@pytest.mark.parametrize("count", [2, 4])
def test_add_rms_norm_of_partials_equals_their_rounded_sum(backend, width, count):
    """Also with single rows, and with rows that are not aligned for vector loads."""
    x = numbers(backend, 12, width)
    parts = numbers(backend, count, 12, width, seed=1).float()
    parts *= 1 + torch.rand(parts.shape, generator=torch.Generator().manual_seed(3)).to(parts)
    norm = dict(weight=numbers(backend, width, seed=2), eps=1e-6, offset=1.0)
    delta = tree_sum(parts).to(backend.dtype)
    full = backend.run(add_rms_norm, dict(x=x, delta=delta, **norm))
    for s in (slice(0, 12), *SLICES):
        part = dict(x=x[s], delta=parts[:, s].contiguous())
        odd = dict(x=F.pad(x, (1, 2))[s, 1:-2], delta=F.pad(delta, (1, 2))[s, 1:-2])
        for arguments in (part, odd):
            actual = backend.run(add_rms_norm, dict(**arguments, **norm))
            assert all(same_bits(a, b[s]) for a, b in zip(actual, full, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("inner", [33, 2500])
def test_silu_mul_row_is_batch_independent(backend, inner):
    gate_up = numbers(backend, 12, 2 * inner)
    full = backend.run(silu_mul, dict(gate_up=gate_up))
    for s in SLICES:
        assert same_bits(backend.run(silu_mul, dict(gate_up=gate_up[s])), full[s])


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_rope_and_cache_row_is_batch_independent(backend, layer):
    batch = backend.place(rope(12, *layer, backend.dtype))
    full = backend.run(rope_and_cache, batch)
    for s in SLICES:
        alone = backend.place(rope(12, *layer, backend.dtype))
        for name in ("qkv", "positions", "slot_mapping"):
            alone[name] = alone[name][s]
        assert same_bits(backend.run(rope_and_cache, alone), full[s])
        slots = alone["slot_mapping"]
        for name in ("k_cache", "v_cache"):
            written = alone[name].flatten(0, 1)
            assert same_bits(written[slots], batch[name].flatten(0, 1)[slots])
            assert len(written.isfinite().flatten(1).all(1).nonzero()) == len(slots)


@pytest.mark.parametrize("backend", BACKENDS)
def test_null_rows_change_no_other_row(backend):
    """Null rows of NaN, several to one slot, leave the other rows' bits and pages unchanged."""
    clean = backend.place(rope(12, *LAYERS[0], backend.dtype))
    expected = backend.run(rope_and_cache, clean)
    padded = backend.place(rope(12, *LAYERS[0], backend.dtype))
    padded["qkv"] = F.pad(padded["qkv"], (0, 0, 0, 5), value=float("nan"))
    for name in ("positions", "slot_mapping"):
        padded[name] = F.pad(padded[name], (0, 5))
    assert same_bits(backend.run(rope_and_cache, padded)[:12], expected)
    for name in ("k_cache", "v_cache"):
        assert same_bits(padded[name][1:], clean[name][1:])
        assert same_bits(padded[name][0, 1:], clean[name][0, 1:])


@pytest.mark.parametrize("backend", BACKENDS)
def test_strided_caches(backend):
    """Keys and values interleaved in one tensor: strides are respected, neighbours unchanged."""
    plain = backend.place(rope(5, *LAYERS[0], backend.dtype))
    expected = backend.run(rope_and_cache, plain)
    both = torch.full(
        (*plain["k_cache"].shape[:3], 70), 7.0, dtype=backend.dtype, device=backend.device
    )
    k = both[..., :32]
    v = both[..., 35:67]
    views = dict(backend.place(rope(5, *LAYERS[0], backend.dtype)), k_cache=k, v_cache=v)
    assert same_bits(backend.run(rope_and_cache, views), expected)
    slots = plain["slot_mapping"]
    page = slots // PAGE_SIZE
    index = slots % PAGE_SIZE
    for name, view in (("k_cache", k), ("v_cache", v)):
        assert same_bits(view[page, index], plain[name][page, index])
    assert int((both != 7.0).sum()) == 5 * 2 * 2 * 32


@pytest.mark.parametrize("layer", LAYERS[:2], ids=str)
def test_rope_and_cache_equals_norm_rotation_and_copy(layer):
    """In fp32 against complex multiplication in double precision."""
    heads, kv_heads, dim, width, gated, offset = layer
    batch = rope(6, *layer, torch.float32)
    q = rope_and_cache(**batch)
    slots = batch["slot_mapping"]
    pos = batch["positions"]
    qkv = batch["qkv"]
    q_end = heads * dim * (1 + gated)
    raw_q = qkv[:, :q_end].unflatten(1, (heads, -1))[..., :dim]
    raw_k, raw_v = (x.unflatten(1, (kv_heads, dim)) for x in qkv[:, q_end:].chunk(2, 1))
    turn = torch.complex(batch["cos"].double(), batch["sin"].double())[pos][:, None]
    k, v = (batch[n].flatten(0, 1)[slots] for n in ("k_cache", "v_cache"))
    for raw, weight, actual in ((raw_q, batch["q_weight"], q), (raw_k, batch["k_weight"], k)):
        x = F.rms_norm(raw.double(), (dim,), offset + weight.double(), 1e-6)
        pairs = torch.complex(x[..., : width // 2], x[..., width // 2 : width]) * turn
        expected = torch.cat([pairs.real, pairs.imag, x[..., width:]], -1).float()
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    assert same_bits(v, raw_v)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_rope_and_cache_without_norm_or_positions(backend, layer):
    """Norm alone, then positions alone, equals both at once; with neither, values are copied."""
    heads, kv_heads, dim, _, gated, offset = layer
    no_norm = dict.fromkeys(("q_weight", "k_weight"))
    no_positions = dict.fromkeys(("cos", "sin"))
    both = backend.place(rope(6, *layer, backend.dtype))
    slots = both["slot_mapping"]
    qkv = both["qkv"]
    q_end = heads * dim * (1 + gated)
    raw_q = qkv[:, :q_end].unflatten(1, (heads, -1))[..., :dim]
    raw_k = qkv[:, q_end:].chunk(2, 1)[0].unflatten(1, (kv_heads, dim))

    def run(**changes):
        batch = backend.place(rope(6, *layer, backend.dtype)) | changes
        q = backend.run(rope_and_cache, batch)
        return q, *(batch[name].flatten(0, 1)[slots] for name in ("k_cache", "v_cache"))

    full = run()
    copied = run(**no_norm, **no_positions)
    normed = run(**no_positions)
    norm = dict(eps=both["eps"], offset=offset)
    assert same_bits(copied[0], raw_q) and same_bits(copied[1], raw_k)
    assert same_bits(
        normed[0], backend.run(rms_norm, dict(x=raw_q, weight=both["q_weight"], **norm))
    )
    assert same_bits(
        normed[1], backend.run(rms_norm, dict(x=raw_k, weight=both["k_weight"], **norm))
    )
    arguments = qkv.clone()
    arguments[:, :q_end].unflatten(1, (heads, -1))[..., :dim] = normed[0]
    arguments[:, q_end:].chunk(2, 1)[0].copy_(normed[1].flatten(1))
    turned = run(**no_norm, qkv=arguments)
    assert all(same_bits(a, b) for a, b in zip(turned, full, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_silu_mul_rounds_as_two_ops(dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 2 * 48, generator=generator).to(dtype)
    assert same_bits(silu_mul(x), silu(x[:, :48]) * x[:, 48:])
    torch.testing.assert_close(silu_mul(x), F.silu(x[:, :48]) * x[:, 48:])
