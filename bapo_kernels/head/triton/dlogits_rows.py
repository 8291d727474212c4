"""Backward epilogue of a tile of products that a vendor GEMM wrote: the gradient of the products, in their place or in fewer bits."""

import triton
import triton.language as tl

from bapo_kernels.head.triton.shared import column_of, logit_gradient, logits


@triton.jit(do_not_specialize=["n", "P", "first"])  # a w that 16 divides is known to keep loads of 16 bytes whole
def dlogits_rows(
    z,  # (n, w) products
    bias,  # (w,) or None
    inv_temperature,  # (n,) or None
    ids,  # (n, P): column 0, the target; or None
    maximum,  # (n,)
    log_sum,  # (n,)
    entropy,  # (n,) H, or None
    probability,  # (n,) coefficient of -p
    entropy_coef,  # (n,) or None
    picked,  # (n, P) coefficients of the logits at ids, or None
    out,  # (n, w) dz; may be z
    n,
    w,
    P,
    first,  # vocabulary id of column 0
    scale,  # or None
    softcap,  # or None
    stride_zn,
    stride_on,
    BN: tl.constexpr,
    BV: tl.constexpr,
):
    blocks = tl.cdiv(w, BV)
    o_n = tl.program_id(0) // blocks * BN + tl.arange(0, BN)
    o_v = tl.program_id(0) % blocks * BV + tl.arange(0, BV)
    m_v = (o_v < w)[None, :]
    m_out = (o_n < n)[:, None] & m_v
    row = tl.minimum(o_n, n - 1).to(tl.int64)

    b_z = tl.load(z + row[:, None] * stride_zn + o_v[None, :], m_out)
    b_bias = None if bias is None else tl.load(bias + o_v[None, :], m_v)
    b_inv_t = None if inv_temperature is None else tl.load(inv_temperature + row)[:, None]
    x, t = logits(b_z, b_bias, b_inv_t, scale, softcap)

    at_target = None
    b_picked = None
    if ids is not None:
        at_target = o_v[None, :] == column_of(tl.load(ids + row * P), first, w)[:, None]
        b_picked = tl.load(picked + row * P)
    # fmt: off
    g = logit_gradient(
        x, t, row, maximum, log_sum, entropy, probability, entropy_coef, at_target, b_picked, b_inv_t, scale,
        softcap,
    )
    # fmt: on
    tl.store(out + row[:, None] * stride_on + o_v[None, :], g, m_out)
