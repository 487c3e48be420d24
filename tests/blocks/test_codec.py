"""Conversions of stored values, against torch's and against their own definition."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from paged_kv import codec
from paged_kv.backends.torch_backend import fp8_to_float, quantise_rows
from paged_kv.layout import KVDtype


def test_every_fp8_code_decodes_as_torch_does() -> None:
    """All 256 codes, NaN included."""
    codes = torch.arange(256, dtype=torch.uint8)
    expected = codes.view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(codec.FP8_VALUES, expected)


def test_the_fast_fp8_decoding_is_exact() -> None:
    """Every code but the two of NaN gives its value, whatever the memory's strides."""
    codes = torch.tensor([code for code in range(256) if code & 127 != 127], dtype=torch.uint8)
    np.testing.assert_array_equal(fp8_to_float(codes).numpy() * 256, codec.FP8_VALUES[codes.numpy()])
    strided = codes.repeat(2, 1)[:, 3:200]
    np.testing.assert_array_equal(
        fp8_to_float(strided)[1].numpy() * 256, codec.FP8_VALUES[codes[3:200].numpy()]
    )


def test_every_bf16_input_encodes_to_fp8_as_torch_does() -> None:
    """All finite bf16 values, saturated at 448 on both sides."""
    values = codec.decode_bf16(np.arange(1 << 16, dtype=np.uint32).astype(np.uint16))
    values = values[np.isfinite(values)]
    expected = torch.from_numpy(values).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    np.testing.assert_array_equal(codec.encode_fp8(values), expected)


@given(values=hnp.arrays(np.float32, 32, elements=st.floats(width=32, allow_nan=False)))
def test_bf16_rounds_as_torch_does(values: np.ndarray) -> None:
    """Nearest even, for any float32."""
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.uint16).numpy()
    np.testing.assert_array_equal(codec.encode_bf16(values), expected)


@pytest.mark.parametrize("dtype", [KVDtype.FP8_E4M3, KVDtype.INT8])
@given(values=hnp.arrays(np.float32, (3, 2, 16), elements=st.floats(width=32)))
def test_torch_quantises_any_row_as_the_oracle_does(dtype: KVDtype, values: np.ndarray) -> None:
    """Bytes and scales are equal for any input, NaN and infinities included, and decode to finite values."""
    stored, scales = codec.encode_rows(values, dtype)
    assert scales is not None
    got, got_scales = quantise_rows(torch.from_numpy(values), dtype)
    np.testing.assert_array_equal(got_scales.numpy(), scales)
    np.testing.assert_array_equal(got.numpy(), stored)
    assert np.isfinite(codec.decode_rows(stored, scales, dtype)).all()


@pytest.mark.parametrize(("dtype", "relative_error"), [(KVDtype.FP8_E4M3, 2**-4), (KVDtype.INT8, 2**-7.9)])
@given(values=hnp.arrays(np.float32, (2, 16), elements=st.floats(-1e4, 1e4, width=32)))
def test_quantising_loses_no_more_than_a_step(
    dtype: KVDtype, relative_error: float, values: np.ndarray
) -> None:
    """The error is within half a step of the row's largest value, or of the smallest scale for tiny rows."""
    stored, scales = codec.encode_rows(values, dtype)
    largest = np.abs(values).max(axis=-1, keepdims=True)
    error = np.abs(codec.decode_rows(stored, scales, dtype) - values)
    assert (error <= np.maximum(largest * relative_error, 1.2e-7)).all()


@pytest.mark.parametrize("dtype", [KVDtype.FP8_E4M3, KVDtype.INT8])
@given(values=hnp.arrays(np.float32, (4, 8), elements=st.floats(-3e4, 3e4, width=32)))
def test_the_largest_value_of_a_row_survives(dtype: KVDtype, values: np.ndarray) -> None:
    """It comes back to fp16's precision: outlier channels decide attention scores."""
    stored, scales = codec.encode_rows(values, dtype)
    largest = np.abs(values).max(axis=-1)
    back = np.abs(codec.decode_rows(stored, scales, dtype)).max(axis=-1)
    tolerance = np.maximum(largest * 2.0**-10.9, 1.2e-7)
    if dtype is KVDtype.FP8_E4M3:  # below the smallest scale, fp8 rounds the largest value like any other
        tolerance = np.where(scales == codec.MIN_STORED_SCALE, np.maximum(tolerance, largest / 16), tolerance)
    assert (np.abs(back - largest) <= tolerance).all()
