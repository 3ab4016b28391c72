// Global memory: the caller's arrays at made-up addresses. Anything else is out of range.
#pragma once
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "lds.h"

namespace gfx950 {

inline std::string hex(u64 x) { char text[32]; std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(x)); return text; }

class Memory {
 public:
  void add(u64 base, u64 size, u8* data) { buffers_.push_back({base, size, data}); }

  // Bytes past an array's end but in its last aligned dword can be read (no allocator separates them) and are poison.
  void read(u64 addr, int n, u8* out) const {
    const Buffer& b = find(addr, n, true);
    const u64 at = addr - b.base, inside = at < b.size ? std::min<u64>(u64(n), b.size - at) : 0;
    std::memcpy(out, b.data + at, inside);
    std::memset(out + inside, Lds::kPoison, u64(n) - inside);
  }
  void write(u64 addr, int n, const u8* in) {
    const Buffer& b = find(addr, n, false);
    std::memcpy(b.data + (addr - b.base), in, u64(n));
  }

 private:
  struct Buffer {
    u64 base, size;
    u8* data;
  };
  const Buffer& find(u64 addr, int n, bool slack) const {
    for (const Buffer& b : buffers_) {
      const u64 end = slack ? (b.base + b.size + 3) / 4 * 4 : b.base + b.size;
      if (addr >= b.base && addr + u64(n) <= end) return b;
    }
    std::string where = "no array";
    for (size_t i = 0; i < buffers_.size(); ++i) {
      const Buffer& b = buffers_[i];
      if (addr + (1u << 24) >= b.base && addr <= b.base + b.size + (1u << 24))
        where = "array " + std::to_string(i) + " of " + std::to_string(b.size) + " bytes, at byte " + std::to_string(i64(addr - b.base));
    }
    throw Hazard{"out-of-range", std::to_string(n) + " bytes at " + hex(addr) + " (" + where + ")"};
  }
  std::vector<Buffer> buffers_;
};

}  // namespace gfx950
