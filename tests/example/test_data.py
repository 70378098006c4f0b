import numpy as np
import pytest

from examples.flax_moe import data


def test_no_book_is_in_two_parts_of_the_split(text):
    def books(part):
        lines = bytes(part).splitlines()
        return {line.split(b":")[0].rstrip(b"0123456789").decode() for line in lines}

    train, validation, held_out = map(books, text)
    assert held_out == set(data.HELD_OUT_BOOKS)
    assert validation == set(data.VALIDATION_BOOKS)
    assert not train & (held_out | validation)
    assert len(train) + len(validation) + len(held_out) == 66


@pytest.mark.parametrize("size", [2, 9, 64, 65, 66, 200])
def test_windows_predict_every_byte_after_the_first_once(size):
    text = np.random.default_rng(size).integers(0, 128, size).astype(np.uint8)
    windows = data.windows(text, context=16, stride=8)
    predicted = np.concatenate([row[1:][counted] for row, counted in zip(*windows, strict=True)])
    np.testing.assert_array_equal(predicted, text[1:])


def test_windows_refuse_a_stride_that_skips_bytes():
    with pytest.raises(ValueError, match=r"stride is 17; it must be from 1 to context \(16\)"):
        data.windows(np.zeros(40, np.uint8), context=16, stride=17)


def test_text_that_is_not_ascii_is_refused():
    with pytest.raises(ValueError, match="byte 1 is 0xc3; the model knows ASCII only"):
        data.encode("aé".encode())
