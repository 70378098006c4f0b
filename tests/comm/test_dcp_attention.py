"""Attention over a sharded cache is the attention of one device over the whole of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comm_testing import PLATFORMS, P, mesh_of

from jax_b12x import comm


def attention_oracle(q, k, v, kv_len):
    """Causal attention of the last tokens of each sequence, in fp64, on the whole cache."""
    q, k, v = (np.asarray(each).astype(np.float64) for each in (q, k, v))
    batch, num_tokens, heads, head_dim = q.shape
    group = heads // k.shape[2]
    out = np.zeros((batch, num_tokens, heads, v.shape[3]))
    for b in range(batch):
        for t in range(num_tokens):
            seen = int(kv_len[b]) - num_tokens + t + 1
            if seen <= 0:
                continue
            for h in range(heads):
                scores = k[b, :seen, h // group] @ q[b, t, h] * head_dim**-0.5
                shares = np.exp(scores - scores.max())
                out[b, t, h] = shares / shares.sum() @ v[b, :seen, h // group]
    return out


def deal(cache, world_size):
    """[batch, tokens, ...] to [world, batch, tokens of a rank, ...], the last ones made of NaN.

    Token t goes to rank t % world_size. Some slots more than are needed: nobody may read them.
    """
    cache = np.asarray(cache)
    tokens = -(-cache.shape[1] // world_size) + 3
    shape = (cache.shape[0], tokens * world_size, *cache.shape[2:])
    padded = np.full(shape, np.nan, cache.dtype)
    padded[:, : cache.shape[1]] = cache
    grid = padded.reshape(shape[0], tokens, world_size, *shape[2:])
    return np.moveaxis(grid, 2, 0)


def sharded(pool, q, k_shards, v_shards, kv_len, tables=None, **options):
    """Runs ``dcp_attention`` on arrays with a leading axis of ranks; returns all heads."""

    def body(q, k, v, lengths, *table):
        table = table[0][0] if table else None
        return comm.dcp_attention(q, k[0], v[0], lengths, pool, page_table=table, **options)

    all_heads = options.get("q_has_all_heads", False)
    step = jax.jit(
        jax.shard_map(
            body,
            mesh=pool.topology.mesh,
            in_specs=(
                P() if all_heads else P(None, None, "tp"),
                P("tp"),
                P("tp"),
                P(),
                *([P("tp")] if tables is not None else []),
            ),
            out_specs=P(None, None, "tp"),
        )
    )
    return step(q, k_shards, v_shards, kv_len, *([tables] if tables is not None else []))


def close(actual, exact, dtype):
    """Two roundings to the dtype (partial, combined) on values that average, and fp32 sums."""
    eps = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(
        np.asarray(actual).astype(np.float64), exact, rtol=eps, atol=2 * eps + 1e-5
    )


def random_case(seed, batch, num_tokens, heads, kv_heads, head_dim, v_dim, tokens, dtype):
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((batch, num_tokens, heads, head_dim)).astype(dtype)
    k = rng.standard_normal((batch, tokens, kv_heads, head_dim)).astype(dtype)
    v = rng.standard_normal((batch, tokens, kv_heads, v_dim)).astype(dtype)
    return q, k, v


@pytest.mark.parametrize(
    ("platform", "world_size"),
    [("cpu", 2), ("cpu", 3), ("cpu", 4), pytest.param("gpu", 2, marks=pytest.mark.multigpu)],
)
@pytest.mark.parametrize("num_tokens", [1, 3, 8])
def test_it_is_the_attention_of_one_device_at_every_length(platform, world_size, num_tokens):
    mesh = mesh_of(world_size, platform)
    lengths = np.array([0, 1, world_size - 1, world_size, world_size + 1, 4097], np.int32)
    heads = 2 * world_size
    q, k, v = random_case(0, len(lengths), num_tokens, heads, heads, 16, 16, 4097, np.float32)
    exact = attention_oracle(q, k, v, lengths)
    for b, length in enumerate(lengths):  # not written yet, so never read
        k[b, length:] = np.nan
        v[b, length:] = np.nan
    with comm.DcpPool(mesh, "tp", timeout=60) as pool:
        out = sharded(pool, q, deal(k, world_size), deal(v, world_size), lengths)
        assert {record.op for record in pool.records()} == {"dcp_gather", "dcp_combine"}
    assert not np.asarray(out)[0].any()
    close(out, exact, np.float32)


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=lambda dtype: dtype.__name__)
def test_grouped_queries_and_a_value_of_another_width(platform, dtype):
    """MLA's absorbed form: one key of 64 + 8 columns, a value of 64."""
    mesh = mesh_of(2, platform)
    lengths = np.array([5, 100], np.int32)
    q, k, v = random_case(0, 2, 2, 8, 2, 72, 64, 100, dtype)
    with comm.DcpPool(mesh, "tp", timeout=60) as pool:
        out = sharded(pool, q, deal(k, 2), deal(v, 2), lengths, scale=72**-0.5)
        again = sharded(pool, q, deal(k, 2), deal(v, 2), lengths, q_has_all_heads=True)
    close(out, attention_oracle(q, k, v, lengths), dtype)
    np.testing.assert_array_equal(np.asarray(out), np.asarray(again))


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("world_size", [2])
def test_pages_in_any_order_are_the_same_cache(platform, world_size):
    mesh = mesh_of(world_size, platform)
    rng = np.random.default_rng(0)
    lengths = np.array([0, 1, 37, 64], np.int32)
    batch, page_size = len(lengths), 8
    q, k, v = random_case(0, batch, 4, 4, 2, 16, 16, 64, np.float32)
    shards = deal(k, world_size)[:, :, :32], deal(v, world_size)[:, :, :32]
    pages_each = 32 // page_size
    num_pages = batch * pages_each + 5
    paged = [np.full((world_size, num_pages, page_size, 2, 16), np.nan, np.float32) for _ in "kv"]
    tables = np.full((world_size, batch, pages_each + 1), -1, np.int32)
    for rank in range(world_size):
        order = rng.permutation(num_pages)[: batch * pages_each].reshape(batch, pages_each)
        tables[rank, :, :pages_each] = order
        for pages, shard in zip(paged, shards, strict=True):
            cut = shard[rank].reshape(batch * pages_each, page_size, 2, 16)
            pages[rank, order.reshape(-1)] = cut
    tables[:, :, -1] = num_pages + 7  # behind the end: anything
    with comm.DcpPool(mesh, "tp", timeout=60) as pool:
        out = sharded(pool, q, *paged, lengths, tables)
    close(out, attention_oracle(q, k, v, lengths), np.float32)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_quarter_of_a_million_tokens(platform):
    world_size, tokens = 4 if platform == "cpu" else 2, 262_144
    mesh = mesh_of(world_size, platform)
    q, k, v = random_case(0, 1, 1, world_size, 1, 8, 8, tokens, np.float32)
    with comm.DcpPool(mesh, "tp", timeout=60) as pool:
        out = sharded(pool, q, deal(k, world_size), deal(v, world_size), np.int32(tokens))
    close(out, attention_oracle(q, k, v, [tokens]), np.float32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": (2, 9, 2, 8)}, "q must be .* with 1 to 8 tokens, not"),
        ({"q": (2, 2, 8)}, "q must be .batch, num_tokens, heads, head_dim."),
        ({"k": (2, 4, 2, 16)}, "k_shard and v_shard must be .* with q's head_dim 8"),
        ({"v": (2, 5, 2, 8)}, "k_shard and v_shard must be"),
        ({"k": (3, 4, 2, 8), "v": (3, 4, 2, 8)}, "k_shard has batch 3, q has 2"),
        ({"k": (2, 4, 3, 8), "v": (2, 4, 3, 8)}, "q has 4 heads, no multiple of the 3 kv_heads"),
        ({"kv_len": (3,)}, r"kv_len must be a scalar or \[batch\], not \(3,\)"),
        ({"dtypes": {"n": jnp.float32}}, "kv_len must be int32, not float32"),
        ({"dtypes": {"q": jnp.int8}}, "q must be bfloat16, float16, float32, not int8"),
        ({"dtypes": {"k": jnp.int8, "v": jnp.int8}}, "k_shard must be bfloat16, .*, not int8"),
        ({"dtypes": {"v": jnp.bfloat16}}, "v_shard must have the dtype of k_shard, float32, not b"),
        ({"scale": "x"}, "scale must be a number, not 'x'"),
        ({"scale": float("nan")}, "scale must be finite, not nan"),
        ({"table": (1, 2)}, r"page_table must be int32\[batch, shard_pages\] with batch 2"),
    ],
)
def test_arguments_are_refused_by_name(change, message):
    shapes = {
        "q": (2, 1, 2, 8),
        "k": (2, 4, 2, 8),
        "v": (2, 4, 2, 8),
        "kv_len": (2,),
        "table": None,
        "scale": None,
        "dtypes": {},
        **change,
    }
    dtypes, scale = shapes["dtypes"], shapes["scale"]
    q, k, v = (jnp.ones(shapes[name], dtypes.get(name)) for name in "qkv")
    table = shapes["table"] and jnp.zeros(shapes["table"], jnp.int32)
    with comm.DcpPool(mesh_of(2), "tp") as pool:
        step = jax.shard_map(
            lambda q, k, v, n: comm.dcp_attention(
                q, k, v, n, pool, page_table=table, **({"scale": scale} if scale else {})
            ),
            mesh=pool.topology.mesh,
            in_specs=P(),
            out_specs=P(None, None, "tp"),
            check_vma=False,
        )
        with pytest.raises((TypeError, ValueError), match=message):
            jax.jit(step).lower(q, k, v, jnp.ones(shapes["kv_len"], dtypes.get("n", jnp.int32)))
