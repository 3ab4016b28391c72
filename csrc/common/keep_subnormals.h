// Makes subnormals count while in scope, whatever the calling thread asked for (torch.set_flush_denormal).
#pragma once

#include <cstdint>

#if defined(__x86_64__) || defined(_M_X64)
#include <xmmintrin.h>
#endif

namespace mori {

class KeepSubnormals {
 public:
  KeepSubnormals() : saved_(get()) { set(saved_ & ~kFlushBits); }
  ~KeepSubnormals() { set(saved_); }
  KeepSubnormals(const KeepSubnormals&) = delete;
  KeepSubnormals& operator=(const KeepSubnormals&) = delete;

 private:
#if defined(__x86_64__) || defined(_M_X64)
  static constexpr uint64_t kFlushBits = 0x8040;  // MXCSR: flush to zero, denormals are zero
  static uint64_t get() { return _mm_getcsr(); }
  static void set(uint64_t bits) { _mm_setcsr(static_cast<unsigned>(bits)); }
#elif defined(__aarch64__)
  static constexpr uint64_t kFlushBits = 1 << 24;  // FPCR: flush to zero
  static uint64_t get() {
    uint64_t bits;
    __asm__ volatile("mrs %0, fpcr" : "=r"(bits));
    return bits;
  }
  static void set(uint64_t bits) { __asm__ volatile("msr fpcr, %0" : : "r"(bits)); }
#else
  static constexpr uint64_t kFlushBits = 0;
  static uint64_t get() { return 0; }
  static void set(uint64_t) {}
#endif
  uint64_t saved_;
};

}  // namespace mori
