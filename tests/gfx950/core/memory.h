// Global memory: the caller's arrays at made-up addresses (anything else is out of range), and, when asked for, the caches between
// a workgroup and memory: L1 of its CU, L2 of its XCD, and what its device has not made visible to others. A store stays where its
// scope allows it to stay until a writeback; a load may hit any older copy that its scope allows it to hit until an invalidate.
#pragma once
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <unordered_map>
#include <vector>

#include "lds.h"

namespace gfx950 {

enum Scope : u8 { kWaveScope, kWorkgroupScope, kAgentScope, kSystemScope };  // sc0 + 2 * sc1

inline std::string hex(u64 x) {
  char text[32];
  std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(x));
  return text;
}

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
  void check(u64 addr, int n) const { find(addr, n, false); }

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
        where = "array " + std::to_string(i) + " of " + std::to_string(b.size) + " bytes, at byte " +
                std::to_string(i64(addr - b.base));
    }
    throw Hazard{"out-of-range", std::to_string(n) + " bytes at " + hex(addr) + " (" + where + ")"};
  }
  std::vector<Buffer> buffers_;
};

struct Cache {
  static constexpr u64 kLine = 64;
  struct Line {
    u8 data[kLine];
    u64 valid = 0, dirty = 0;  // one bit per byte; dirty implies valid
    u64 seen_drops = 0;
  };

  Line* find(u64 addr) {
    const auto it = lines_.find(addr / kLine);
    return it == lines_.end() ? nullptr : current(it->second);
  }
  void set(u64 addr, u8 byte, bool dirty) {
    Line& l = *current(lines_[addr / kLine]);
    const u64 bit = 1ull << addr % kLine;
    if (dirty && !l.dirty) dirty_.push_back(addr / kLine);
    l.data[addr % kLine] = byte, l.valid |= bit, l.dirty = dirty ? l.dirty | bit : l.dirty & ~bit;
  }
  void drop_clean() { ++drops_; }
  // Calls f(address, byte) for what is dirty, which then is no longer.
  template <class F>
  void clean(F f) {
    for (const u64 line : dirty_)
      for (Line& l = *current(lines_[line]); l.dirty; l.dirty &= l.dirty - 1) {
        const u64 i = u64(__builtin_ctzll(l.dirty));
        f(line * kLine + i, l.data[i]);
      }
    dirty_.clear();
  }

 private:
  Line* current(Line& l) {  // drops happen when a line is next looked at
    if (l.seen_drops != drops_) l.valid = l.dirty, l.seen_drops = drops_;
    return &l;
  }
  std::unordered_map<u64, Line> lines_;
  std::vector<u64> dirty_;  // lines that have been dirty since the last clean()
  u64 drops_ = 0;
};

// One workgroup's way to memory. `caches` from the nearest to the farthest; empty: memory is reached at once.
class Path {
 public:
  Path(Memory& memory, std::vector<Cache*> caches) : memory_(memory), caches_(std::move(caches)) {}

  void read(u64 addr, int n, u8* out, Scope scope) {
    if (caches_.empty()) return memory_.read(addr, n, out);
    for (int i = 0; i < n; ++i) out[i] = read_byte(addr + u64(i), scope);
  }
  void write(u64 addr, int n, const u8* in, Scope scope) {
    if (caches_.empty()) return memory_.write(addr, n, in);
    memory_.check(addr, n);
    const size_t home = scope == kSystemScope ? caches_.size() : scope == kAgentScope ? 2 : 1;
    for (int i = 0; i < n; ++i) {
      const u64 a = addr + u64(i);
      for (size_t c = 0; c < std::min(home, caches_.size()); ++c)  // copies on the way are brought up to date
        if (const Cache::Line* l = caches_[c]->find(a); l && l->valid >> a % Cache::kLine & 1) caches_[c]->set(a, in[i], false);
      store_at(home, a, in[i]);
    }
  }
  void writeback(Scope scope) {
    if (caches_.empty() || scope < kAgentScope) return;
    push(1);
    if (scope == kSystemScope) push(2);
  }
  void invalidate(Scope scope) {
    for (size_t c = 0; c < caches_.size() && c < size_t(scope); ++c) caches_[c]->drop_clean();
  }
  // What caches may do at any time.
  void jitter(std::mt19937& random) {
    if (caches_.empty()) return;
    const u32 r = random() % 64;
    if (r < 2) push(1 + r);
    else if (r < 5) caches_[r - 2]->drop_clean();
  }

 private:
  u8 read_byte(u64 a, Scope scope) {
    const size_t first = scope == kSystemScope  ? caches_.size()
                         : scope == kAgentScope ? 2
                                                : 0;  // older copies may be hit from here on
    u8 byte = 0;
    size_t c = 0;
    for (; c < caches_.size(); ++c)
      if (const Cache::Line* l = caches_[c]->find(a);
          l && ((l->dirty >> a % Cache::kLine & 1) || (c >= first && l->valid >> a % Cache::kLine & 1))) {
        byte = l->data[a % Cache::kLine];
        break;
      }
    if (c == caches_.size()) memory_.read(a, 1, &byte);
    for (size_t fill = first; fill < c; ++fill) caches_[fill]->set(a, byte, false);
    return byte;
  }
  void store_at(size_t home, u64 a, u8 byte) {
    if (home < caches_.size()) caches_[home]->set(a, byte, true);
    else memory_.write(a, 1, &byte);
  }
  void push(size_t c) {  // what is dirty in one cache moves outwards by one
    caches_[c]->clean([&](u64 addr, u8 byte) { store_at(c + 1, addr, byte); });
  }

  Memory& memory_;
  std::vector<Cache*> caches_;
};

}  // namespace gfx950
