// Stacks and the switch between them: a lane is a fiber, so that a barrier costs a few nanoseconds.
#pragma once

#include <sys/mman.h>

#include <cstdint>
#include <cstring>
#include <new>

namespace msl {

// Saves the callee-saved registers on the running stack, stores its pointer in *from, and continues on the stack `to`.
extern "C" void msl_switch_stack(void** from, void* to);

#if defined(__x86_64__)
asm(R"(
.text
.globl msl_switch_stack
.hidden msl_switch_stack
.type msl_switch_stack, @function
msl_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  retq
.size msl_switch_stack, . - msl_switch_stack
)");
inline void* new_stack(char* top, void (*entry)()) {
  auto* words = reinterpret_cast<uintptr_t*>(top);
  *--words = 0;  // return address of `entry`, which never returns; keeps the stack aligned as after a call
  *--words = reinterpret_cast<uintptr_t>(entry);
  words -= 6;
  std::memset(words, 0, 6 * sizeof *words);
  return words;
}
#elif defined(__aarch64__)
asm(R"(
.text
.globl msl_switch_stack
.hidden msl_switch_stack
.type msl_switch_stack, @function
msl_switch_stack:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size msl_switch_stack, . - msl_switch_stack
)");
inline void* new_stack(char* top, void (*entry)()) {
  char* frame = top - 160;
  std::memset(frame, 0, 160);
  std::memcpy(frame + 88, &entry, sizeof entry);  // x30
  return frame;
}
#else
#error "the emulator needs x86-64 or aarch64"
#endif

// One stack per lane, each above a page that faults.
class Stacks {
 public:
  static constexpr size_t kBytes = 256 * 1024, kGuard = 4096;

  explicit Stacks(unsigned count) : bytes_(count * kBytes) {
    void* memory = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    begin_ = static_cast<char*>(memory);
    for (unsigned i = 0; i < count; i++) mprotect(begin_ + i * kBytes, kGuard, PROT_NONE);
  }
  Stacks(const Stacks&) = delete;
  ~Stacks() { munmap(begin_, bytes_); }

  char* top(unsigned i) const { return begin_ + (i + 1) * kBytes; }
  bool contains(const char* address) const { return address >= begin_ && address < begin_ + bytes_; }

 private:
  size_t bytes_;
  char* begin_;
};

}  // namespace msl
