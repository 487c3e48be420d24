"""What a stored K or V value means, in numpy: the oracle for every conversion.

fp8 is E4M3 "fn" (448 largest, no infinity); bf16 and fp8 round to nearest even. Quantised rows store
`value / scale` with `scale = largest finite magnitude / max_magnitude`, one per (token, head).
Invariant: what a quantised row stores is finite. NaN becomes 0 and infinity the largest value, because one
bad row must not turn the sums of everybody who later shares its block into NaN. Plain types keep what they
get.
"""

import numpy as np
import numpy.typing as npt

from paged_kv.layout import KVDtype

MIN_AMAX = np.float32(1e-8)  # keeps an all-zero row's scale above zero
MAX_AMAX = np.float32(3e38)  # keeps the largest value finite when it is multiplied back

FloatArray = npt.NDArray[np.float32]
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


def row_scales(values: FloatArray, dtype: KVDtype) -> FloatArray:
    """Return the scale of each row: values (..., head_dim) -> (...)."""
    finite = np.where(np.isfinite(values), np.abs(values), np.float32(0))
    scales: FloatArray = np.clip(finite.max(axis=-1), MIN_AMAX, MAX_AMAX) / np.float32(dtype.max_magnitude)
    return scales


def encode_rows(values: FloatArray, dtype: KVDtype) -> tuple[ByteArray, FloatArray | None]:
    """Return the stored bytes (..., head_dim * item_bytes) of float32 rows, and their scales if any."""
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
    scaled = np.clip(clean / scales[..., None], -limit, limit)
    if dtype is KVDtype.FP8_E4M3:
        return encode_fp8(scaled), scales
    return np.rint(scaled).astype(np.int8).view(np.uint8), scales


def decode_rows(stored: ByteArray, scales: FloatArray | None, dtype: KVDtype) -> FloatArray:
    """Undo encode_rows up to rounding: stored (..., head_dim * item_bytes) -> float32 (..., head_dim)."""
    stored = np.ascontiguousarray(stored)
    if dtype is KVDtype.FLOAT32:
        return stored.view(np.float32)
    if dtype is KVDtype.BFLOAT16:
        return decode_bf16(stored.view(np.uint16))
    if dtype is KVDtype.FLOAT16:
        return stored.view(np.float16).astype(np.float32)
    assert scales is not None, "quantised rows carry scales"
    values = FP8_VALUES[stored] if dtype is KVDtype.FP8_E4M3 else stored.view(np.int8).astype(np.float32)
    return values * scales[..., None]
