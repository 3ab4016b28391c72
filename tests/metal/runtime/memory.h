// Device and threadgroup memory: one reserved range of addresses in which only what a kernel may touch can be accessed.
#pragma once

#include <sys/mman.h>

#include <cstdint>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

namespace msl {

// Bytes of the host that arguments of a kernel are bound to, copied to where the kernel sees them.
struct Buffer {
  std::string name;
  char* host;
  size_t bytes;
  bool writable;
  char *begin = nullptr, *pages = nullptr, *pages_end = nullptr;  // the bytes end at pages_end, but for the alignment of begin
};

// A threadgroup variable at its place in the arena; what follows up to the next one is its red zone.
struct Variable {
  std::string name;
  size_t offset, bytes;
};
using Variables = std::vector<Variable>;

class Memory {
 public:
  static constexpr size_t kPage = 4096, kGap = 1 << 20, kRedZone = 256, kArena = 128 * 1024, kAlignment = 16;

  Memory() {
    void* memory = mmap(nullptr, kReserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    begin_ = static_cast<char*>(memory);
    arena_ = begin_ + kGap;
    mprotect(arena_, kArena, PROT_READ | PROT_WRITE);
  }
  Memory(const Memory&) = delete;
  ~Memory() { munmap(begin_, kReserved); }

  char* begin() const { return begin_; }
  char* end() const { return begin_ + kReserved; }
  char* arena() const { return arena_; }
  bool in_arena(const char* address) const { return address >= arena_ && address < arena_ + kArena; }
  bool near_arena(const char* address) const { return address >= begin_ && address < arena_ + kArena + kGap / 2; }
  const std::vector<Buffer>& buffers() const { return buffers_; }

  // Pages that fault lie before and behind a buffer.
  const Buffer& map(Buffer buffer) {
    buffer.pages = (buffers_.empty() ? arena_ + kArena : buffers_.back().pages_end) + kGap;
    const size_t size = (buffer.bytes + kPage - 1) / kPage * kPage;
    buffer.pages_end = buffer.pages + size;
    if (buffer.pages_end + kGap > end()) throw std::runtime_error("the tensors of one call exceed the emulator's memory");
    if (size) mprotect(buffer.pages, size, PROT_READ | PROT_WRITE);
    buffer.begin = buffer.pages + (size - buffer.bytes) / kAlignment * kAlignment;
    std::memset(buffer.pages, kCanary, buffer.begin - buffer.pages);
    std::memcpy(buffer.begin, buffer.host, buffer.bytes);
    std::memset(buffer.begin + buffer.bytes, kCanary, buffer.pages_end - (buffer.begin + buffer.bytes));
    buffers_.push_back(std::move(buffer));
    return buffers_.back();
  }
  void copy_back() const {
    for (const Buffer& b : buffers_)
      if (b.writable) std::memcpy(b.host, b.begin, b.bytes);
  }
  void unmap() {
    for (const Buffer& b : buffers_) {
      if (b.pages == b.pages_end) continue;
      madvise(b.pages, b.pages_end - b.pages, MADV_DONTNEED);
      mprotect(b.pages, b.pages_end - b.pages, PROT_NONE);
    }
    buffers_.clear();
  }

  // The index of the buffer that an address belongs to or lies nearest to, or -1.
  int nearest(const char* address) const {
    for (size_t i = 0; i < buffers_.size(); i++)
      if (address < buffers_[i].pages_end + kGap / 2) return int(i);
    return int(buffers_.size()) - 1;
  }
  // The first buffer beside which a kernel wrote, or null.
  const Buffer* damaged() const {
    for (const Buffer& b : buffers_)
      if (!is_canary(b.pages, b.begin) || !is_canary(b.begin + b.bytes, b.pages_end)) return &b;
    return nullptr;
  }

  void fill_arena(const Variables& variables, int poison) const {
    std::memset(arena_, poison, arena_used(variables));
    for (const Variable& v : variables) std::memset(arena_ + v.offset + v.bytes, kCanary, kRedZone);
  }
  const Variable* damaged(const Variables& variables) const {
    for (const Variable& v : variables)
      if (!is_canary(arena_ + v.offset + v.bytes, arena_ + v.offset + v.bytes + kRedZone)) return &v;
    return nullptr;
  }
  static size_t arena_used(const Variables& variables) {
    return variables.empty() ? 0 : variables.back().offset + variables.back().bytes + kRedZone;
  }

 private:
  static constexpr size_t kReserved = size_t(1) << 36;
  static constexpr int kCanary = 0xA5;

  static bool is_canary(const char* begin, const char* end) {
    for (; begin < end; begin++)
      if (static_cast<unsigned char>(*begin) != kCanary) return false;
    return true;
  }

  char *begin_, *arena_;
  std::vector<Buffer> buffers_;
};

}  // namespace msl
