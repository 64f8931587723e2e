"""The references against torch itself, so that they are no second opinion of ours alone."""

from __future__ import annotations

import pytest
import torch

from nwor import reference

FORMATS = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def numbers_of(name: str) -> torch.Tensor:
    """All finite numbers of a format, sorted, as float64."""
    every = torch.arange(256, dtype=torch.uint8).view(FORMATS[name]).to(torch.float64)
    return every[every.isfinite()].unique()


def samples() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    spread = torch.randn(20000, generator=generator) * 2.0 ** torch.randint(
        -22, 18, (20000,), generator=generator
    )
    grid = torch.cat([numbers_of(name) for name in FORMATS]).to(torch.float32)
    between = (grid[1:] + grid[:-1]) / 2
    return torch.cat([spread, grid, between, torch.tensor([0.0, -0.0, 1e30, -1e30])])


@pytest.mark.parametrize("name", FORMATS)
def test_nearest_is_torchs_cast_saturated(name: str) -> None:
    x = samples()
    largest = numbers_of(name).max().item()
    want = x.clamp(-largest, largest).to(FORMATS[name]).view(torch.uint8)
    assert torch.equal(reference.quantize(x, torch.ones(()), name, "nearest"), want)


@pytest.mark.parametrize("name", FORMATS)
def test_truncate_is_the_neighbour_towards_zero(name: str) -> None:
    """Found by search among all numbers of the format; e4m3's small ones are cut from a rounded float32."""
    x = samples()
    if name == "fp8_e4m3":
        x = x[x.abs() >= 2.0**-6]
    grid = numbers_of(name)
    grid = grid[grid >= 0]
    index = torch.searchsorted(grid, x.abs().to(torch.float64), right=True) - 1
    want = torch.copysign(grid[index], x.to(torch.float64))
    got = reference.dequantize(reference.quantize(x, torch.ones(()), name, "truncate"), torch.ones(()), name)
    assert torch.equal(got, want)


def test_truncate_of_special_numbers() -> None:
    x = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan"), -1e-30])
    for name, largest in (("fp8_e4m3", 0x7E), ("fp8_e5m2", 0x7B)):
        got = reference.quantize(x, torch.ones(()), name, "truncate").tolist()
        assert got == [0, 0, largest, largest | 0x80, largest, 0x80]


def test_attention_is_torchs_for_one_chain() -> None:
    """A window with a context, causal, grouped heads: the last rows of scaled_dot_product_attention."""
    generator = torch.Generator().manual_seed(0)
    context, window, block_size = 37, 5, 16
    keys, values = (torch.randn(42, 2, 32, generator=generator, dtype=torch.float64) for _ in range(2))
    query = torch.randn(window, 6, 32, generator=generator, dtype=torch.float64)
    blocks = torch.tensor([[2, 0, 3]], dtype=torch.int32)
    caches = [torch.full((4, block_size, 2, 32), torch.nan, dtype=torch.float64) for _ in range(2)]
    for cache, source in zip(caches, (keys, values), strict=True):
        for t in range(context):
            cache[blocks[0, t // block_size], t % block_size] = source[t]
    got, lse = reference.verify_attention(
        query,
        keys[context:],
        values[context:],
        *caches,
        blocks,
        torch.tensor([0, window], dtype=torch.int32),
        torch.tensor([context + window], dtype=torch.int32),
        scale=0.2,
    )
    causal = torch.ones(window, context + window, dtype=torch.bool).tril(context)
    want = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1),
        keys.transpose(0, 1).repeat_interleave(3, dim=0),
        values.transpose(0, 1).repeat_interleave(3, dim=0),
        attn_mask=causal,
        scale=0.2,
    ).transpose(0, 1)
    torch.testing.assert_close(got, want)
    logits = torch.einsum("qhd,khd->hqk", query, keys.repeat_interleave(3, dim=1)) * 0.2
    torch.testing.assert_close(lse, logits.masked_fill(~causal, -torch.inf).logsumexp(2))
    # One more logit in the denominator scales the outputs down by its share.
    sinks = torch.linspace(-3, 3, 6, dtype=torch.float64)
    sunk, _ = reference.verify_attention(
        query,
        keys[context:],
        values[context:],
        *caches,
        blocks,
        torch.tensor([0, window], dtype=torch.int32),
        torch.tensor([context + window], dtype=torch.int32),
        scale=0.2,
        sinks=sinks,
    )
    share = torch.exp(lse) / (torch.exp(lse) + sinks.exp()[:, None])
    torch.testing.assert_close(sunk, want * share.t()[:, :, None])


def test_a_quantized_query_is_its_numbers_times_the_scale_of_its_kv_head() -> None:
    generator = torch.Generator().manual_seed(0)
    stored = torch.randn(3, 6, 32, generator=generator).to(torch.float8_e4m3fn)
    rows, cache = torch.randn(3, 2, 32, generator=generator), torch.zeros(1, 16, 2, 32, dtype=torch.uint8)
    rest = (rows, rows.flip(0), cache, cache, torch.zeros(1, 1, dtype=torch.int32))
    rest += (torch.tensor([0, 3], dtype=torch.int32), torch.tensor([8], dtype=torch.int32))
    names = {"scale": 0.2, "kv_cache_dtype": "fp8"}
    for scale, factors in ((None, [1.0] * 6), ([0.7], [0.7] * 6), ([0.7, 3.0], [0.7] * 3 + [3.0] * 3)):
        q_scale = None if scale is None else torch.tensor(scale)
        got = reference.verify_attention(stored, *rest, **names, q_scale=q_scale)
        query = stored.double() * torch.tensor(factors)[:, None].double()
        for one, other in zip(got, reference.verify_attention(query, *rest, **names), strict=True):
            torch.testing.assert_close(one, other)


def test_references_never_alias_their_arguments() -> None:
    cache = torch.zeros(2, 4, 1, 8)
    key = torch.ones(1, 1, 8)
    slots, starts = torch.tensor([5]), torch.tensor([0, 1], dtype=torch.int32)
    new, _ = reference.commit_window(
        key, key, cache, cache, slots, starts, commit_counts=torch.ones(1, dtype=torch.int32)
    )
    assert new[1, 1].eq(1).all()
    assert not cache.any()
    restored = reference.restore_slots(cache, new, slots, starts, torch.zeros(1, dtype=torch.int32))
    restored.fill_(3)
    assert not cache.any()
