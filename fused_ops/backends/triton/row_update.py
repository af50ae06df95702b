"""What a row's summed gradient does to it: an optimizer's step, with FBGEMM's semantics, or a dense gradient."""

from __future__ import annotations

import triton
import triton.language as tl

from fused_ops.backends.triton.features import DIM, FIRST_ROW, WORDS
from fused_ops.backends.triton.link import aligned

OPTIMIZERS = ("none", "sgd", "adagrad", "rowwise_adagrad", "adam")  # by code
NONE, SGD, ADAGRAD, ROWWISE_ADAGRAD, ADAM = (tl.constexpr(code) for code in range(len(OPTIMIZERS)))

# A row a feature: addresses of what is updated (0 = leave it alone) and of its states.
TARGET, STATE, SECOND_STATE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
TARGET_WORDS = tl.constexpr(4)


@triton.jit
def moved(
    value, gradient, at, row, dim, words, live, mask, learning_rate, corrections, eps, beta1, beta2,
    OPTIMIZER: tl.constexpr, STATE_BYTES: tl.constexpr,
):  # fmt: skip
    """Rows [n, BLOCK_D] in fp32 after the optimizer's step; their states are updated."""
    rate = tl.load(learning_rate)
    if OPTIMIZER == SGD:
        value -= rate * gradient
    else:
        state = tl.load(words + STATE, mask=live, other=0).to(tl.pointer_type(tl.float32))
        state = tl.multiple_of(state, STATE_BYTES)
        if OPTIMIZER == ROWWISE_ADAGRAD:
            mean = tl.div_rn(tl.sum(gradient * gradient, 1), tl.maximum(dim, 1).to(tl.float32))
            squares = tl.load(state + row, mask=live, other=0.0) + mean
            tl.store(state + row, squares, mask=live)
            value -= tl.div_rn(rate + squares * 0, tl.sqrt_rn(squares) + eps)[:, None] * gradient
        elif OPTIMIZER == ADAGRAD:
            squares = tl.load(state[:, None] + at, mask=mask, other=0.0) + gradient * gradient
            tl.store(state[:, None] + at, squares, mask=mask)
            value -= tl.div_rn(rate * gradient, tl.sqrt_rn(squares) + eps)
        else:
            second = tl.load(words + SECOND_STATE, mask=live, other=0).to(tl.pointer_type(tl.float32))
            second = tl.multiple_of(second, STATE_BYTES)
            m = tl.load(state[:, None] + at, mask=mask, other=0.0)
            v = tl.load(second[:, None] + at, mask=mask, other=0.0)
            m = beta1 * m + (1.0 - beta1) * gradient
            v = beta2 * v + (1.0 - beta2) * gradient * gradient
            tl.store(state[:, None] + at, m, mask=mask)
            tl.store(second[:, None] + at, v, mask=mask)
            m = tl.div_rn(m, m * 0 + tl.load(corrections))
            v = tl.div_rn(v, v * 0 + tl.load(corrections + 1))
            value -= tl.div_rn(rate * m, tl.sqrt_rn(v) + eps)
    return value


@triton.jit
def update_row(
    targets, features, feature, row, live, gradient, column, learning_rate, corrections, eps, beta1, beta2,
    DTYPE: tl.constexpr, OPTIMIZER: tl.constexpr, ALIGN: tl.constexpr, TARGET_BYTES: tl.constexpr, STATE_BYTES: tl.constexpr,
):  # fmt: skip
    """Rows [n], each counted over all tables and seen by a feature [n]: updated by gradient [n, BLOCK_D] in fp32."""
    dim = aligned(tl.load(features + feature * WORDS + DIM, mask=live, other=0), ALIGN)
    row -= tl.load(features + feature * WORDS + FIRST_ROW, mask=live, other=0)
    words = targets + feature * TARGET_WORDS
    target = tl.load(words + TARGET, mask=live, other=0)
    live &= target != 0
    mask = live[:, None] & (column[None, :] < dim[:, None])
    at = (row * dim)[:, None] + column[None, :]
    place = tl.multiple_of(target.to(tl.pointer_type(DTYPE)), TARGET_BYTES)[:, None] + at
    if OPTIMIZER == NONE:
        tl.store(place, gradient.to(DTYPE), mask=mask)
    else:
        value = tl.load(place, mask=mask, other=0.0).to(tl.float32)
        value = moved(
            value, gradient, at, row, dim, words, live, mask, learning_rate, corrections, eps, beta1, beta2,
            OPTIMIZER, STATE_BYTES,
        )  # fmt: skip
        tl.store(place, value.to(DTYPE), mask=mask)
