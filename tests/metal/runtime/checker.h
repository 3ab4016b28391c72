// Finds accesses to threadgroup memory that no barrier orders, and reads of bytes that nobody wrote.
//
// Two accesses to a byte, one of them a write, are ordered when one lane makes both, when a threadgroup barrier lies between
// them, or when both lanes are of one simdgroup and a simdgroup barrier lies between. A collective (simdgroup_load, matmul2d
// on a threadgroup tensor ...) accesses memory as the whole simdgroup: which lane touches which element is not specified.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "memory.h"

namespace msl {

class Checker {
 public:
  // Who accesses: a lane, or its whole simdgroup.
  struct Actor {
    uint16_t thread;
    bool collective;
    unsigned simdgroup() const { return thread / kSimdWidth; }
    uint32_t lanes() const { return collective ? ~0u : 1u << thread % kSimdWidth; }
  };

  Checker() : bytes_(Memory::kArena) {}

  void begin_threadgroup() { group_start_ = ++epoch_; }
  void threadgroup_barrier() { epoch_++; }
  void simdgroup_barrier(unsigned simdgroup) { simdgroup_epoch_[simdgroup]++; }

  // Each returns what is wrong, or an empty string; `at` is an offset in the arena.
  std::string load(size_t at, Actor actor) {
    Byte& byte = bytes_[at];
    if (byte.write_epoch < group_start_) return "reads threadgroup memory that nobody wrote";
    if (!ordered_after_write(byte, actor)) return conflict("a read", "the write", byte.writer);
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

  std::string store(size_t at, Actor actor) {
    Byte& byte = bytes_[at];
    if (byte.write_epoch >= group_start_ && !ordered_after_write(byte, actor)) return conflict("a write", "the write", byte.writer);
    if (byte.read_epoch == epoch_ && byte.readers) {
      const unsigned own = actor.simdgroup();
      const bool other_simdgroup = byte.readers & ~(1u << own);
      const bool other_lane = byte.reading_simdgroup == own && byte.read_simdgroup_epoch == simdgroup_epoch_[own] &&
                              (actor.collective || (byte.reading_lanes & ~actor.lanes()));
      if (other_simdgroup || other_lane) return conflict("a write", "the read", byte.reader);
    }
    byte = {};
    byte.write_epoch = epoch_;
    byte.write_simdgroup_epoch = simdgroup_epoch_[actor.simdgroup()];
    byte.writer = actor.thread;
    byte.collective_writer = actor.collective;
    return {};
  }

 private:
  static constexpr unsigned kNobody = 0xff;
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
  static std::string conflict(const char* now, const char* before, unsigned other) {
    return std::string(now) + " and " + before + " of thread " + std::to_string(other) + " without a barrier between";
  }

  std::vector<Byte> bytes_;
  uint32_t epoch_ = 1, group_start_ = 1;
  uint32_t simdgroup_epoch_[kMaxSimdgroups] = {};
};

}  // namespace msl
