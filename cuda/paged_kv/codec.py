"""The encoding of stored K and V values, in numpy: the oracle for every conversion.

fp8 is E4M3 "fn" (448 largest, no infinity); bf16 and fp8 round to nearest even. Quantised rows store `value /
scale` with `scale = largest finite magnitude / max_magnitude`, one per (token, head). A scale is stored as
fp16 in units of 2**-8, which centres its range on typical keys and values: rows whose largest magnitude is
below about 1e-4 (fp8) or 3e-5 (int8) use the smallest normal scale, so that their largest value is rounded
like any other (by at most 1.2e-7, or in fp8 a sixteenth of the value); beyond about 114,000 or 32,000 they
saturate. Rows are divided by the scale as stored, so its rounding affects no reader.

Invariant: quantised rows are finite. NaN becomes 0 and infinity the largest value, because one bad row must
not turn the results of every sequence that later shares its block into NaN. Plain types store values
unchanged.
"""

import numpy as np
import numpy.typing as npt

from paged_kv.layout import KVDtype

SCALE_UNIT = np.float32(2**-8)
MIN_STORED_SCALE = np.float32(2**-14)  # the smallest normal fp16: above zero for an all-zero row
MAX_STORED_SCALE = np.float32(65504)  # the largest finite fp16

FloatArray = npt.NDArray[np.float32]
HalfArray = npt.NDArray[np.float16]
ByteArray = npt.NDArray[np.uint8]


def _fp8_table() -> FloatArray:
    """Decode all 256 codes: sign, 4 exponent bits (bias 7), 3 fraction bits; S.1111.111 is NaN."""
    code = np.arange(256)
    exponent, fraction = (code >> 3) & 15, code & 7
    magnitude = np.where(exponent == 0, fraction * 2.0**-9, (8 + fraction) * 2.0 ** (exponent - 10.0))
    magnitude[(code & 127) == 127] = np.nan
    return np.where(code < 128, magnitude, -magnitude).astype(np.float32)


FP8_VALUES = _fp8_table()
_FP8_POSITIVE = FP8_VALUES[:127].astype(np.float64)
_FP8_MIDPOINTS = (_FP8_POSITIVE[:-1] + _FP8_POSITIVE[1:]) / 2


def encode_fp8(values: npt.NDArray[np.floating]) -> ByteArray:
    """Round to the nearest E4M3 code, ties to the even code, saturating at 448; NaN stays NaN."""
    magnitude = np.abs(values).astype(np.float64)
    below = np.searchsorted(_FP8_MIDPOINTS, magnitude, side="left")
    tie = (below < len(_FP8_MIDPOINTS)) & (
        magnitude == _FP8_MIDPOINTS[np.minimum(below, len(_FP8_MIDPOINTS) - 1)]
    )
    code = below + (tie & (below % 2 == 1))
    code = np.where(np.isnan(values), 127, code) | (np.signbit(values).astype(np.int64) << 7)
    return np.asarray(code, np.uint8)


def encode_bf16(values: FloatArray) -> npt.NDArray[np.uint16]:
    """Round float32 to bf16, ties to even; NaN stays NaN, with an unspecified payload."""
    bits = values.astype(np.float32).view(np.uint32)
    rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def decode_bf16(bits: npt.NDArray[np.uint16]) -> FloatArray:
    """Widen bf16 bits to float32, exactly."""
    return np.left_shift(bits, 16, dtype=np.uint32).view(np.float32)


def row_scales(values: FloatArray, dtype: KVDtype) -> HalfArray:
    """Return the stored scale of each row: values (..., head_dim) -> (...), in SCALE_UNIT."""
    finite = np.where(np.isfinite(values), np.abs(values), np.float32(0))
    with np.errstate(over="ignore"):
        scales = finite.max(axis=-1) / np.float32(dtype.max_magnitude) / SCALE_UNIT
    stored: HalfArray = np.clip(scales, MIN_STORED_SCALE, MAX_STORED_SCALE).astype(np.float16)
    return stored


def widen_scales(stored: HalfArray) -> FloatArray:
    """Return the factors of rows, exactly: stored (...) -> (..., 1)."""
    return (stored.astype(np.float32) * SCALE_UNIT)[..., None]


def encode_rows(values: FloatArray, dtype: KVDtype) -> tuple[ByteArray, HalfArray | None]:
    """Return the stored bytes (..., head_dim * item_bytes) of float32 rows, and their scales, if any."""
    values = np.ascontiguousarray(values, np.float32)
    if dtype is KVDtype.FLOAT32:
        return values.view(np.uint8), None
    if dtype is KVDtype.BFLOAT16:
        return encode_bf16(values).view(np.uint8), None
    if dtype is KVDtype.FLOAT16:
        with np.errstate(over="ignore"):
            return values.astype(np.float16).view(np.uint8), None
    scales = row_scales(values, dtype)
    limit = np.float32(dtype.max_magnitude)
    clean = np.where(np.isnan(values), np.float32(0), values)
    scaled = np.clip(clean / widen_scales(scales), -limit, limit)
    if dtype is KVDtype.FP8_E4M3:
        return encode_fp8(scaled), scales
    return np.rint(scaled).astype(np.int8).view(np.uint8), scales


def decode_rows(stored: ByteArray, scales: HalfArray | None, dtype: KVDtype) -> FloatArray:
    """Invert encode_rows up to rounding: stored (..., head_dim * item_bytes) -> float32 (..., head_dim)."""
    stored = np.ascontiguousarray(stored)
    if dtype is KVDtype.FLOAT32:
        return stored.view(np.float32)
    if dtype is KVDtype.BFLOAT16:
        return decode_bf16(stored.view(np.uint16))
    if dtype is KVDtype.FLOAT16:
        return stored.view(np.float16).astype(np.float32)
    assert scales is not None, "quantised rows carry scales"
    values = FP8_VALUES[stored] if dtype is KVDtype.FP8_E4M3 else stored.view(np.int8).astype(np.float32)
    return values * widen_scales(scales)
