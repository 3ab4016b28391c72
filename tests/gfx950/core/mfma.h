// Matrix instructions: the operand layouts in one table, products and sums exact in fp64, one rounding to fp32 at the end.
// (What the hardware rounds inside one instruction is not published; kernels must not depend on it.)
// Layouts: AMD's matrix-core introduction (32x32x64), AMD's emulator rocjitsu, and the code that Triton and FlyDSL emit agree.
#pragma once
#include "alu.h"

namespace gfx950 {

enum Element { kE4m3, kE5m2, kBf16, kF16 };
struct MfmaOp {
  const char* name;
  int size, k;   // D is size x size
  int run;       // consecutive K values that a lane holds; its next run lies (64 / size) * run further
  bool scaled;   // two more operands: a scale byte per lane for its block of 32
  int element;   // -1: cbsz and blgp say which
};
inline const MfmaOp kMfma[] = {
    {"v_mfma_scale_f32_16x16x128_f8f6f4", 16, 128, 16, true, -1},
    {"v_mfma_scale_f32_32x32x64_f8f6f4", 32, 64, 16, true, -1},
    {"v_mfma_f32_16x16x128_f8f6f4", 16, 128, 16, false, -1},
    {"v_mfma_f32_32x32x64_f8f6f4", 32, 64, 16, false, -1},
    {"v_mfma_f32_16x16x32_fp8_fp8", 16, 32, 8, false, kE4m3},
    {"v_mfma_f32_32x32x16_fp8_fp8", 32, 16, 8, false, kE4m3},
    {"v_mfma_f32_16x16x32_bf16", 16, 32, 8, false, kBf16},
    {"v_mfma_f32_32x32x16_bf16", 32, 16, 8, false, kBf16},
    {"v_mfma_f32_16x16x16_bf16", 16, 16, 4, false, kBf16},
    {"v_mfma_f32_32x32x8_bf16", 32, 8, 4, false, kBf16},
    {"v_mfma_f32_16x16x32_f16", 16, 32, 8, false, kF16},
    {"v_mfma_f32_32x32x16_f16", 32, 16, 8, false, kF16},
    {"v_mfma_f32_16x16x16_f16", 16, 16, 4, false, kF16},
    {"v_mfma_f32_32x32x8_f16", 32, 8, 4, false, kF16},
};
inline int mfma_registers(const MfmaOp& op) { return op.size * op.k / kLanes / (op.element < kBf16 ? 4 : 2); }

struct Decoder {
  double value[4][65536], scale[256];
  Decoder() {
    for (u32 v = 0; v < 65536; ++v) {
      value[kE4m3][v] = from_e4m3(v), value[kE5m2][v] = from_e5m2(v);
      value[kBf16][v] = from_bf16(v), value[kF16][v] = from_f16(v);
    }
    for (int e = 0; e < 255; ++e) scale[e] = std::ldexp(1.0, e - 127);
    scale[255] = NAN;
  }
};

// One operand as a [k][size] matrix. regs: its registers, 64 lanes each; scales: 64 bytes or null.
inline void mfma_operand(const MfmaOp& op, int element, const u32 (*regs)[kLanes], const u8* scales, double (*out)[32]) {
  static const Decoder decoder;
  const int groups = kLanes / op.size, per_lane = op.k / groups;
  for (int lane = 0; lane < kLanes; ++lane) {
    const int group = lane / op.size, row = lane % op.size;
    for (int e = 0; e < per_lane; ++e) {
      const int k = e / op.run * groups * op.run + group * op.run + e % op.run;
      const u32 code = element < kBf16 ? regs[e / 4][lane] >> (8 * (e % 4)) & 0xff : regs[e / 2][lane] >> (16 * (e % 2)) & 0xffff;
      out[k][row] = decoder.value[element][code] * (scales ? decoder.scale[scales[k / 32 * op.size + row]] : 1.0);
    }
  }
}

// d, c: size * size / 64 registers of 64 lanes.
inline void mfma(const MfmaOp& op, const double (*a)[32], const double (*b)[32], const u32 (*c)[kLanes], u32 (*d)[kLanes]) {
  double sum[32][32] = {};
  for (int k = 0; k < op.k; ++k)
    for (int m = 0; m < op.size; ++m)
      for (int n = 0; n < op.size; ++n) sum[m][n] += a[k][m] * b[k][n];
  const int groups = kLanes / op.size;
  for (int q = 0; q < op.size * op.size / kLanes; ++q)
    for (int lane = 0; lane < kLanes; ++lane) {
      const int m = q / 4 * 4 * groups + 4 * (lane / op.size) + q % 4;
      d[q][lane] = u32(bits(float(sum[m][lane % op.size] + f32(c[q][lane]))));
    }
}

}  // namespace gfx950
