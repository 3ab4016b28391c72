// Finds accesses to shared memory that no barrier orders, and reads of threadgroup memory that nobody wrote.
//
// Two accesses to a byte, one of them a write, are ordered when one lane makes both, when a threadgroup barrier lies between
// them, or when both lanes are of one simdgroup and a simdgroup barrier lies between. Lanes of different threadgroups are never
// ordered. A collective (simdgroup_load, matmul2d on a threadgroup tensor ...) accesses memory as the whole simdgroup: which lane
// touches which element is not specified.
#pragma once

#include <cstdint>
#include <vector>

#include "../include/msl/runtime.h"

namespace msl {

// Who accesses: a lane, or with `collective` its whole simdgroup.
struct Actor {
  uint16_t thread;
  bool collective;
  unsigned simdgroup() const { return thread / kSimdWidth; }
  uint32_t lanes() const { return collective ? ~0u : 1u << thread % kSimdWidth; }
};

// What an access does wrong; `text` is null if nothing. `thread` made the other access, unless it is kNoThread.
struct Finding {
  static constexpr unsigned kNoThread = ~0u;
  const char* text = nullptr;
  unsigned thread = kNoThread;
};

// The history of some bytes: of threadgroup memory, whose content ends with the threadgroup, or of a buffer.
class Shadow {
 public:
  enum class Kind { kThreadgroup, kDevice };

  Shadow(size_t bytes, Kind kind) : bytes_(bytes), kind_(kind) {}

  void begin_threadgroup() { group_start_ = ++epoch_; }
  void threadgroup_barrier() { epoch_++; }
  void simdgroup_barrier(unsigned simdgroup) { simdgroup_epoch_[simdgroup]++; }

  Finding load(size_t at, Actor actor) {
    Byte& byte = bytes_[at];
    if (byte.write_epoch < group_start_) {
      if (kind_ == Kind::kThreadgroup) return {"a read of what nobody wrote"};
      if (byte.write_epoch) return {"a read of what another threadgroup writes"};
    } else if (!ordered_after_write(byte, actor)) {
      return {"a read without a barrier after the write", byte.writer};
    }
    if (byte.read_epoch != epoch_) {
      byte.read_epoch = epoch_;
      byte.readers = 0;
      byte.reading_simdgroup = kNobody;
    }
    const unsigned own = actor.simdgroup();
    if (byte.reading_simdgroup != own || byte.read_simdgroup_epoch != simdgroup_epoch_[own]) {
      byte.reading_simdgroup = own;
      byte.read_simdgroup_epoch = simdgroup_epoch_[own];
      byte.reading_lanes = 0;
    }
    byte.readers |= 1u << own;
    byte.reading_lanes |= actor.lanes();
    byte.reader = actor.thread;
    return {};
  }

  Finding store(size_t at, Actor actor) {
    Byte& byte = bytes_[at];
    const unsigned own = actor.simdgroup();
    if (byte.write_epoch >= group_start_ && !ordered_after_write(byte, actor))
      return {"a write without a barrier after the write", byte.writer};
    if (byte.read_epoch == epoch_) {
      const bool other_simdgroup = byte.readers & ~(1u << own);
      const bool other_lane = byte.reading_simdgroup == own && byte.read_simdgroup_epoch == simdgroup_epoch_[own] &&
                              (actor.collective || (byte.reading_lanes & ~actor.lanes()));
      if (other_simdgroup || other_lane) return {"a write without a barrier after the read", byte.reader};
    }
    if (kind_ == Kind::kDevice) {
      if (byte.write_epoch && byte.write_epoch < group_start_) return {"a write to what another threadgroup writes"};
      if (byte.read_epoch && byte.read_epoch < group_start_) return {"a write to what another threadgroup reads"};
    }
    byte = {};
    byte.write_epoch = epoch_;
    byte.write_simdgroup_epoch = simdgroup_epoch_[own];
    byte.writer = actor.thread;
    byte.collective_writer = actor.collective;
    return {};
  }

 private:
  static constexpr uint8_t kNobody = 0xff;
  struct Byte {
    uint32_t write_epoch = 0, write_simdgroup_epoch = 0, read_epoch = 0, read_simdgroup_epoch = 0;
    uint32_t readers = 0;        // simdgroups that read in read_epoch
    uint32_t reading_lanes = 0;  // lanes of the last of them that read in read_simdgroup_epoch
    uint16_t writer = 0, reader = 0;
    bool collective_writer = false;
    uint8_t reading_simdgroup = kNobody;
  };

  bool ordered_after_write(const Byte& byte, Actor actor) const {
    if (byte.write_epoch < epoch_) return true;
    if (byte.writer / kSimdWidth != actor.simdgroup()) return false;
    if (byte.write_simdgroup_epoch < simdgroup_epoch_[actor.simdgroup()]) return true;
    return byte.writer == actor.thread && !byte.collective_writer && !actor.collective;
  }

  std::vector<Byte> bytes_;
  Kind kind_;
  uint32_t epoch_ = 0, group_start_ = 0;
  uint32_t simdgroup_epoch_[kMaxSimdgroups] = {};
};

}  // namespace msl
