"""Products of 16-bit operands with fp32 sums: the numbers, and how a vendor's library is called for them."""

import pytest
import torch
from helpers import NAN, normal

from bapo_kernels.head import products
from bapo_kernels.head.products import gradient_dtype, multiply, multiply_add, operand_dtype

F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16


def test_operands():
    assert operand_dtype(True, F32, BF16, [BF16, BF16]) == BF16
    assert operand_dtype(True, F32, F16, [F16]) == F16
    for narrow, hidden, weight in [
        (False, BF16, [BF16]),
        (True, BF16, [F32]),
        (True, BF16, [BF16, F16]),
        (True, F32, [BF16]),
    ]:
        assert operand_dtype(narrow, F32, hidden, weight) == F32
    assert operand_dtype(True, F64, F64, [F64]) == F64
    assert operand_dtype(True, F64, BF16, [BF16]) == F64  # beside a bias in fp64: results of narrow products are fp32
    assert gradient_dtype(BF16, F32) == BF16
    assert gradient_dtype(F16, F32) == F32  # fp16 has not the range
    assert gradient_dtype(F32, F32) == F32


@pytest.fixture(params=["emulated", "vendor", "vendor that cannot add"])
def library(request, monkeypatch):
    """The fallback, and PyTorch's two ways to call a vendor, with its own rules on dtypes."""
    calls = []
    if request.param == "emulated":
        yield calls
        return
    mm, addmm = torch.mm, torch.addmm

    def narrow_mm(a, b, out_dtype=None, *, out):
        if out_dtype is None:
            return mm(a, b, out=out)
        with pytest.raises(NotImplementedError, match=r"mm\.dtype_out"):  # so is the call spelled where there is a GPU
            mm(a, b, out_dtype, out=out)
        calls.append("mm")
        assert a.dtype == b.dtype and out.dtype == out_dtype == F32
        return mm(a.float(), b.float(), out=out)

    def narrow_addmm(c, a, b, out_dtype=None, *, beta=1.0, out):
        if out_dtype is None:
            return addmm(c, a, b, beta=beta, out=out)
        with pytest.raises(NotImplementedError, match=r"addmm\.dtype_out"):
            addmm(c, a, b, out_dtype, beta=beta, out=out)
        if request.param == "vendor that cannot add":
            raise RuntimeError("self and mat2 must have the same dtype")
        calls.append("addmm")
        assert a.dtype == b.dtype and c.dtype == out.dtype == out_dtype == F32
        return addmm(c, a.float(), b.float(), beta=beta, out=out)

    monkeypatch.setattr(torch, "mm", narrow_mm)
    monkeypatch.setattr(torch, "addmm", narrow_addmm)
    monkeypatch.setattr(products, "multiplies_narrow", lambda device: True)
    products._adds_to_fp32.cache_clear()
    yield calls
    products._adds_to_fp32.cache_clear()


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_numbers(library, dtype):
    a, b = normal(33, 65, seed=1).to(dtype), normal(65, 40, seed=2).to(dtype)
    exact = a.double() @ b.double()
    out = torch.full((33, 40), NAN)
    multiply(a, b, out)
    torch.testing.assert_close(out.double(), exact, rtol=0.0, atol=3e-5)
    multiply_add(out, a, b)
    torch.testing.assert_close(out.double(), 2 * exact, rtol=0.0, atol=3e-5)
    multiply_add(out, a, b, beta=0.5)
    torch.testing.assert_close(out.double(), 2 * exact, rtol=0.0, atol=3e-5)
    out.fill_(NAN)
    multiply_add(out, a, b, beta=0.0)
    torch.testing.assert_close(out.double(), exact, rtol=0.0, atol=3e-5)


def test_the_vendor_adds_where_it_can(library, request):
    a, b, out = normal(3, 4).to(BF16), normal(4, 5).to(BF16), torch.zeros(3, 5)
    multiply_add(out, a, b)
    ways = {"emulated": [], "vendor": ["addmm", "addmm"], "vendor that cannot add": ["mm"]}  # the first one asks
    assert library == ways[request.node.callspec.params["library"]]


def test_other_errors_of_the_vendor_show(monkeypatch):
    def fails(*_, **__):
        raise RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED")

    monkeypatch.setattr(torch, "addmm", fails)
    monkeypatch.setattr(products, "multiplies_narrow", lambda device: True)
    products._adds_to_fp32.cache_clear()
    with pytest.raises(RuntimeError, match="EXECUTION_FAILED"):
        multiply_add(torch.zeros(3, 5), normal(3, 4).to(BF16), normal(4, 5).to(BF16))
