// A workgroup's LDS: bytes, who reads or writes each of them right now and since which barrier, and the bank conflicts of an
// access. Two accesses of different waves are ordered only by barriers: an access that completed (was waited for) after the n-th
// barrier comes before one issued after barrier n+1. So a race is found whatever order the waves happen to run in here.
#pragma once
#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "program.h"

namespace gfx950 {

struct Hazard {
  std::string kind, text;
};

class Lds {
 public:
  static constexpr u8 kPoison = 0xff;  // NaN as e4m3, e8m0, bf16, fp16 and fp32
  enum Agent { kDs, kDma };

  Lds(u32 size, int waves) : bytes_(size, kPoison), track_(size), own_reads_(waves, std::vector<u8>(size, 0)) {}

  u32 size() const { return u32(bytes_.size()); }
  const u8* at(u32 a) const { return &bytes_[a]; }
  u8* at(u32 a) { return &bytes_[a]; }

  void begin_read(u32 a, int wave, u32 epoch) {
    Byte& b = track_[a];
    if (b.writes && !(b.agent == kDs && b.writer == wave))
      throw Hazard{"lds-read-in-flight", "reads LDS byte " + std::to_string(a) + " while " + name(b) + " is still writing it"};
    if (b.writer != kNobody && b.writer != wave && b.write_epoch >= epoch)
      throw Hazard{"lds-race", "reads LDS byte " + std::to_string(a) + " that " + name(b) + " wrote, with no barrier between"};
    ++b.reads, ++own_reads_[wave][a];
  }
  void end_read(u32 a, int wave, u32 epoch) {
    Byte& b = track_[a];
    --b.reads, --own_reads_[wave][a];
    if (epoch > b.read_epoch) b.read_epoch = epoch, b.readers = 0;
    b.readers |= u16(1u << wave);
  }
  void begin_write(u32 a, int wave, u32 epoch, Agent agent) {
    Byte& b = track_[a];
    if (b.reads > (agent == kDs ? own_reads_[wave][a] : 0))
      throw Hazard{"lds-overwrite-pending-read", "writes LDS byte " + std::to_string(a) + " that a pending read still needs"};
    if (b.read_epoch >= epoch && (b.readers & ~(1u << wave)))
      throw Hazard{"lds-race", "writes LDS byte " + std::to_string(a) + " that another wave has read, with no barrier between"};
    if (b.writes && (b.writer != wave || b.agent != agent))
      throw Hazard{"lds-write-in-flight", "writes LDS byte " + std::to_string(a) + " while " + name(b) + " is still writing it"};
    if (!b.writes && b.writer != kNobody && b.writer != wave && b.write_epoch >= epoch)
      throw Hazard{"lds-race", "writes LDS byte " + std::to_string(a) + " that " + name(b) + " wrote, with no barrier between"};
    ++b.writes, b.writer = u8(wave), b.agent = agent;
  }
  void end_write(u32 a, u32 epoch) {
    Byte& b = track_[a];
    --b.writes, b.write_epoch = epoch;
  }

 private:
  static constexpr u8 kNobody = 0xff;
  struct Byte {
    u32 write_epoch = 0, read_epoch = 0;
    u16 reads = 0, readers = 0;  // readers: the waves that completed a read in read_epoch
    u8 writes = 0, writer = kNobody, agent = kDs;
  };
  static std::string name(const Byte& b) { return (b.agent == kDma ? "a transfer of wave " : "wave ") + std::to_string(b.writer); }

  std::vector<u8> bytes_;
  std::vector<Byte> track_;
  std::vector<std::vector<u8>> own_reads_;  // reads in flight, per wave
};

// Lanes are served in phases; lanes of one phase that want different dwords of one bank take turns. The phases and bank counts of
// gfx950 are those that HipKittens (arXiv 2511.08083) found by experiment; narrow accesses are taken as one phase of all 64 lanes.
struct Phases {
  int count, banks;
  std::array<u8, kLanes> phase;
};
inline Phases lds_phases(int bytes, bool write) {
  Phases p{1, 64, {}};
  for (int l = 0; l < kLanes; ++l) {
    const int quad = l / 4 % 8, upper = l / 32;
    if (bytes == 16 && !write) p.count = 4, p.phase[l] = u8(2 * upper + (0x96 >> quad & 1));
    else if (bytes == 12 && !write) p.count = 8, p.banks = 32, p.phase[l] = u8(4 * upper + (quad < 4 ? quad : quad ^ 5));
    else if (bytes == 8 && !write) p.count = 2, p.phase[l] = u8(upper);
    else if (bytes >= 12) p.count = 8, p.banks = 32, p.phase[l] = u8(l / 8);
    else if (bytes == 8) p.count = 4, p.banks = 32, p.phase[l] = u8(l / 16);
    else if (write) p.count = 2, p.banks = 32, p.phase[l] = u8(upper);
  }
  return p;
}

}  // namespace gfx950
