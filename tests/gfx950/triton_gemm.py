"""A plain scaled-dot GEMM in Triton, compiled for gfx950 by Triton's own backend: a kernel that nobody here scheduled."""

import warnings

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def scaled_gemm(a_ptr, b_ptr, a_scale_ptr, b_scale_ptr, c_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    rows = tl.program_id(1) * BM + tl.arange(0, BM)
    columns = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    block = tl.arange(0, BK // 32)
    a = a_ptr + rows[:, None] * K + k[None, :]
    b = b_ptr + columns[None, :] * K + k[:, None]
    a_scale = a_scale_ptr + rows[:, None] * (K // 32) + block[None, :]
    b_scale = b_scale_ptr + columns[:, None] * (K // 32) + block[None, :]
    total = tl.zeros((BM, BN), tl.float32)
    for _ in tl.range(0, tl.cdiv(K, BK)):
        total = tl.dot_scaled(tl.load(a), tl.load(a_scale), "e4m3", tl.load(b), tl.load(b_scale), "e4m3", total)
        a += BK
        b += BK
        a_scale += BK // 32
        b_scale += BK // 32
    tl.store(c_ptr + rows[:, None] * N + columns[None, :], total.to(tl.bfloat16))


def assembly(gemm) -> str:
    """The LDS bytes on the first line, then the assembly."""
    types = (
        dict.fromkeys(("a_ptr", "b_ptr"), "*fp8e4nv")
        | dict.fromkeys(("a_scale_ptr", "b_scale_ptr"), "*u8")
        | {"c_ptr": "*bf16"}
    )
    constants = {"BM": gemm.block_m, "BN": gemm.block_n, "BK": gemm.block_k}
    signature = types | dict.fromkeys("MNK", "i32") | dict.fromkeys(constants, "constexpr")
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(8)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kernel = triton.compile(
            ASTSource(scaled_gemm, signature, constexprs=constants, attrs=aligned),
            target=GPUTarget("hip", "gfx950", 64),
            options={
                "num_warps": gemm.warps,
                "num_stages": gemm.stages,
                "matrix_instr_nonkdim": gemm.matrix,
                "waves_per_eu": 2,
            },
        )
    return f"{kernel.metadata.shared}\n{kernel.asm['amdgcn']}"
