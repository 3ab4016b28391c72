// One scaled MFMA on one tile, operands straight from memory. CONTIGUOUS gives each lane 32 consecutive bytes of K instead of the
// two runs of 16 that the instruction takes: right as long as all scales of a row are equal.
#define __global__ __attribute__((global))
typedef int i32x4 __attribute__((ext_vector_type(4)));
typedef int i32x8 __attribute__((ext_vector_type(8)));
#if SIZE == 16
constexpr int kK = 128;
#define MFMA __builtin_amdgcn_mfma_scale_f32_16x16x128_f8f6f4
#else
constexpr int kK = 64;
#define MFMA __builtin_amdgcn_mfma_scale_f32_32x32x64_f8f6f4
#endif
constexpr int kSums = SIZE * SIZE / 64, kGroups = 64 / SIZE;
typedef float Sums __attribute__((ext_vector_type(kSums)));

__attribute__((device)) i32x8 operand(const unsigned char* row, int group) {
#ifdef CONTIGUOUS
  const int low = 32 * group, high = low + 16;
#else
  const int low = 16 * group, high = 16 * kGroups + low;
#endif
  return __builtin_shufflevector(*(const i32x4*)(row + low), *(const i32x4*)(row + high), 0, 1, 2, 3, 4, 5, 6, 7);
}

extern "C" __global__ void tile(const unsigned char* a, const unsigned char* b, const unsigned char* a_scale,
                                const unsigned char* b_scale, float* c) {
  const int lane = __builtin_amdgcn_workitem_id_x(), r = lane % SIZE, group = lane / SIZE;
  const Sums zero = {};
  const Sums sums = MFMA(operand(a + r * kK, group), operand(b + r * kK, group), zero, 0, 0, 0, a_scale[r * (kK / 32) + group], 0,
                         b_scale[r * (kK / 32) + group]);
  for (int q = 0; q < kSums; ++q) c[(q / 4 * 4 * kGroups + 4 * group + q % 4) * SIZE + r] = sums[q];
}
