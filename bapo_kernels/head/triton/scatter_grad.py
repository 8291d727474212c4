"""Add the gradients at recorded ids to a finished tile of dz. An id that comes twice in a row gets the sum, in their order."""

import triton
import triton.language as tl

from bapo_kernels.head.triton.shared import column_of


@triton.jit(do_not_specialize=["w", "first", "P"])
def scatter_grad(
    ids,  # (n, P); column 0 is in `out` already
    picked_grad,  # (n, P)
    out,  # (n, w)
    w,
    P,
    first,  # vocabulary id of column 0
    stride_on,
    BK: tl.constexpr,
):
    blocks = tl.cdiv(P - 1, BK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    o_p = 1 + tl.program_id(0) % blocks * BK + tl.arange(0, BK)
    p_ids = ids + row * P
    p_grad = picked_grad + row * P
    column = column_of(tl.load(p_ids + o_p, o_p < P, other=-1), first, w)
    if tl.max(column, 0) >= 0:
        # The first of equal ids writes the sum of all: nothing is written twice, so nothing depends on who comes first.
        total = tl.zeros([BK], out.dtype.element_ty)
        writes = column >= 0
        for p in range(1, P):
            same = column == column_of(tl.load(p_ids + p), first, w)
            total += tl.where(same, tl.load(p_grad + p), 0.0)
            writes = writes & ~(same & (o_p > p))
        p_out = out + row * stride_on + column
        tl.store(p_out, tl.load(p_out, writes, other=0.0) + total, writes)
