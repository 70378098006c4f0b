"""The example on several devices: the same tokens, two lanes, a profile that leaves no trace."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.flax_moe import checkpoint, decode, generate, profile, serving
from examples.flax_moe.config import TINY
from examples.flax_moe.decode import Generator
from jax_b12x import workspace


def make_generator(folder, count, recipe="nvfp4", **options):
    model, _ = checkpoint.load_quantized(folder, recipe=recipe, **options)
    return Generator(*serving.serve(model, jax.devices()[:count]))


@pytest.fixture
def make(request):
    """Makes generators whose pools are closed in the end."""

    def made(*args, **options):
        generator = make_generator(*args, **options)
        if generator.pool is not None:
            request.addfinalizer(generator.pool.close)
        return generator

    return made


@pytest.fixture(scope="module")
def pair(nvfp4_folder):
    """A generator on two devices, for tests that leave it as it was."""
    generator = make_generator(nvfp4_folder, 2)
    yield generator
    generator.pool.close()


def logits_after(generator, text, positions):
    """Returns ``[positions, vocab]``: what a generator says after each of these prefixes."""
    steps = (
        generator.advance(
            generator.prefill(text[:position]),
            speculative=False,
            temperature=0.0,
            key=jax.random.key(0),
        )[1]
        for position in positions
    )
    return np.stack([step.logits[0] for step in steps])


# Each layer adds its experts' columns in another order on two devices, which in fp32 moves a sum by
# a few units in the last place of its largest terms; six layers pass that on. 256 units in the last
# place of the largest logit is more than all of it, and far less than what tells bytes apart.
UNITS = 256 * 2.0**-24


def test_two_devices_give_the_tokens_and_the_logits_of_one(make, text):
    one, two = (make(checkpoint.SHIPPED, count) for count in (1, 2))
    for start in (0, 90_000):
        prompt = text.held_out[start : start + 24]
        tokens = one.generate(prompt, 60)
        written = np.concatenate([prompt, tokens])
        expected, got = (logits_after(each, written, range(24, 80, 8)) for each in (one, two))
        bound = UNITS * np.abs(expected).max()
        assert np.abs(got - expected).max() <= bound
        # So where the likeliest byte leads by more than twice that, both must write it.
        likeliest = np.sort(expected, axis=-1)
        assert np.all(likeliest[:, -1] - likeliest[:, -2] > 2 * bound)
        np.testing.assert_array_equal(two.generate(prompt, 60), tokens)


@pytest.mark.parametrize("recipe", ["nvfp4", "w4a16"])
def test_four_devices_give_the_logits_of_one(make, nvfp4_folder, text, recipe):
    one, four = (make(nvfp4_folder, count, recipe) for count in (1, 4))
    expected, got = (logits_after(each, text.held_out, range(5, 40, 5)) for each in (one, four))
    np.testing.assert_allclose(got, expected, rtol=0, atol=UNITS * np.abs(expected).max())


def test_target_and_draft_are_executables_in_lanes_of_their_own(pair, text):
    pair.generate(text.held_out[:20], 12)
    by_program = {}
    for record in pair.pool.records():
        by_program.setdefault((record.program, record.lane), set()).add(record.site)
    assert {key: len(sites) for key, sites in by_program.items()} == {
        ("jit__read", "target"): TINY.layers,
        ("jit__verify", "target"): TINY.layers,
        ("jit__draft", "draft"): TINY.drafts,
    }


def test_decoding_on_two_devices_compiles_once(make, nvfp4_folder, text):
    generator = make(nvfp4_folder, 2)
    functions = (decode._read, decode._draft, decode._verify)
    before = [function._cache_size() for function in functions]
    for size in (3, 9, 20):
        generator.generate(text.held_out[:size], 9, temperature=0.5)
        generator.generate(text.held_out[:size], 9, speculative=False)
    assert [function._cache_size() for function in functions] == [n + 1 for n in before]


def test_a_profile_measures_memory_and_leaves_no_channel_and_no_workspace(pair, text):
    expected = pair.generate(text.held_out[:20], 12)
    channels = pair.pool.records()
    workspaces = workspace.default().records()
    measured = profile.profile(pair)
    assert [(one.name, one.lane) for one in measured] == [
        ("read", "target"),
        ("draft", "draft"),
        ("verify", "target"),
    ]
    cache_bytes = sum(array.nbytes for array in jax.tree.leaves(decode.KVCache.zeros(TINY)))
    for one in measured:
        assert one.arguments > (0 if one.name == "draft" else cache_bytes)
        assert one.temporary >= 0
        assert one.channels > 0
        assert one.live > one.arguments
    assert pair.pool.records() == channels
    assert workspace.default().records() == workspaces
    np.testing.assert_array_equal(pair.generate(text.held_out[:20], 12), expected)


def test_in_bfloat16_as_on_gpus_the_model_decodes_the_same_with_and_without_drafts(
    make, nvfp4_folder, text
):
    generator = make(nvfp4_folder, 2, dtype=jnp.bfloat16)
    prompt = text.held_out[:20]
    plain = generator.generate(prompt, 20, speculative=False)
    np.testing.assert_array_equal(generator.generate(prompt, 20), plain)


def test_generate_on_two_devices_shows_a_profile_and_the_text(capsys):
    generate.main(["--tokens", "12", "--devices", "2", "--profile"])
    out = capsys.readouterr().out
    for what in ("KB on each device", "verify", "target", "draft", "Ruth1:1", "tokens/s"):
        assert what in out


def test_more_devices_than_there_are_is_an_error(capsys):
    with pytest.raises(SystemExit):
        generate.main(["--devices", "99"])
    assert "--devices is 99; JAX sees 8 devices" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        generate.main(["--devices", "0"])
    assert "--devices is 0; it must be 1 or more" in capsys.readouterr().err


def test_devices_that_the_model_does_not_split_over_are_an_error_that_says_which_would_do(capsys):
    with pytest.raises(SystemExit):
        generate.main(["--devices", "3"])
    error = capsys.readouterr().err
    assert "--devices is 3; the model's columns split over 1, 2, 4, 8 devices (routed ex" in error
