"""Logits at recorded ids: one program for each row and block of ids reads just those rows of the weight."""

import triton
import triton.language as tl

from bapo_kernels.head.triton.shared import column_of, logits


@triton.jit(do_not_specialize=["w", "first", "P"])
def gather_logits(
    hidden,  # (n, D)
    weight,  # (w, D)
    bias,  # (w,) or None
    inv_temperature,  # (n,) or None
    ids,  # (n, P); column 0 is left to `fold_tile`
    picked,  # (n, P) x at ids; written where the id is in the slice
    w,
    D,
    P,
    first,  # vocabulary id of column 0
    scale,  # or None
    softcap,  # or None
    stride_hn,
    stride_hd,
    stride_wv,
    stride_wd,
    BK: tl.constexpr,
    BD: tl.constexpr,
):
    ACC: tl.constexpr = picked.dtype.element_ty
    blocks = tl.cdiv(P - 1, BK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    o_p = 1 + tl.program_id(0) % blocks * BK + tl.arange(0, BK)
    column = column_of(tl.load(ids + row * P + o_p, o_p < P, other=-1), first, w)
    here = column >= 0
    if tl.max(column, 0) >= 0:
        o_d = tl.arange(0, BD)
        p_h = hidden + row * stride_hn + o_d * stride_hd
        p_w = weight + column.to(tl.int64)[:, None] * stride_wv + o_d[None, :].to(tl.int64) * stride_wd
        z = tl.zeros([BK, BD], ACC)
        for d in range(0, D, BD):
            m_d = o_d < D - d
            b_h = tl.load(p_h, m_d, other=0.0).to(ACC)
            b_w = tl.load(p_w, here[:, None] & m_d[None, :], other=0.0).to(ACC)
            z += b_h[None, :] * b_w
            p_h += BD * stride_hd
            p_w += BD * stride_wd
        b_bias = None if bias is None else tl.load(bias + column, here, other=0.0)
        b_inv_t = None if inv_temperature is None else tl.load(inv_temperature + row)
        x, _ = logits(tl.sum(z, 1), b_bias, b_inv_t, scale, softcap)
        tl.store(picked + row * P + o_p, x, here)
