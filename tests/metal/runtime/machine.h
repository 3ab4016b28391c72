// Runs a kernel: one threadgroup at a time, every lane a fiber, barriers and collectives as meeting points.
#pragma once

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "fiber.h"
#include "memory.h"
#include "shadow.h"
#include "signals.h"

namespace msl {

using Size = std::array<unsigned, 3>;
using Entry = void (*)(void** buffers);

enum class Order : int { kForward, kReverse, kShuffled };

// What a kernel says about itself when it is probed.
struct Identity {
  std::string function;  // its __PRETTY_FUNCTION__
  int max_threads;       // of its attribute, or 0
};

struct Dispatch {
  Entry entry;
  const Variables* variables;
  void** buffers;
  Size threads, group;
  bool checked;  // the library has hooks
  Order order;
  unsigned seed;
  int poison;
  Behaviour behaviour;
};

inline bool same(const Site& a, const Site& b) { return a.line == b.line && (a.call == b.call || !std::strcmp(a.call, b.call)); }
inline std::string text(const Site& site) { return std::string(site.call) + " (line " + std::to_string(site.line) + ")"; }

class Machine {
 public:
  static Machine& get() {
    static Machine machine;
    return machine;
  }

  Runtime* interface() { return &runtime_; }
  Memory& memory() { return memory_; }

  Identity probe(Entry entry) {
    char dummy[64] = {};
    void* buffers[32];
    for (void*& buffer : buffers) buffer = dummy;
    runtime_.lane = &fibers_[0].lane;
    probing_ = true;
    entry(buffers);
    probing_ = false;
    return identity_;
  }

  void run(const Dispatch& dispatch) {
    now_ = &dispatch;
    runtime_.behaviour = dispatch.behaviour;
    random_.seed(dispatch.seed);
    error_.clear();
    threadgroup_shadow_ = Shadow(dispatch.checked ? Memory::arena_used(*dispatch.variables) : 0, Shadow::Kind::kThreadgroup);
    device_shadows_.clear();
    for (const Buffer& b : memory_.buffers())
      device_shadows_.emplace_back(dispatch.checked && b.writable ? b.bytes : 0, Shadow::Kind::kDevice);
    Signals signals([](int signal, char* address) { get().fault(signal, address); });
    Size groups;
    for (int d = 0; d < 3; d++) groups[d] = (dispatch.threads[d] + dispatch.group[d] - 1) / dispatch.group[d];
    const uint64_t total = uint64_t(groups[0]) * groups[1] * groups[2];
    for (uint64_t i = 0; i < total && error_.empty(); i++) {
      const uint64_t flat = dispatch.order == Order::kReverse ? total - 1 - i : i;
      run_threadgroup({unsigned(flat % groups[0]), unsigned(flat / groups[0] % groups[1]), unsigned(flat / groups[0] / groups[1])}, groups);
    }
    if (!error_.empty()) throw std::runtime_error(error_);
  }

 private:
  static constexpr unsigned kNone = ~0u;
  enum class State { kReady, kWaiting, kDone };
  struct Fiber {
    void* stack;
    State state;
    Site site;
    void* frame;
    Lane lane;
  };
  // Lanes that meet: those of a simdgroup, or of the threadgroup.
  struct Meeting {
    unsigned begin, count, arrived;
    Site site;
  };

  Machine() : stacks_(kMaxThreads), fibers_(kMaxThreads) {
    runtime_.shared_begin = memory_.begin();
    runtime_.shared_end = memory_.end();
    runtime_.collective = [](Site site, unsigned simdgroups, void* frame, Combine combine) {
      get().collective(site, simdgroups, frame, combine);
    };
    runtime_.threadgroup_barrier = [](Site site, int flags) { get().barrier(get().threadgroup_, site, flags); };
    runtime_.simdgroup_barrier = [](Site site, int flags) { get().barrier(get().own_simdgroup(), site, flags); };
    runtime_.on_load = [](const char* address, unsigned bytes) { get().access(address, bytes, false); };
    runtime_.on_store = [](const char* address, unsigned bytes) { get().access(address, bytes, true); };
    runtime_.probe = [](const char* function, int max_threads) {
      if (get().probing_) get().identity_ = {function, max_threads};
      return get().probing_;
    };
    runtime_.fail = [](const char* message, int line) {
      get().fail(line ? message + (" (line " + std::to_string(line) + ")") : message);
    };
  }

  // ---- scheduling ----

  void run_threadgroup(const Size& at, const Size& groups) {
    memory_.fill_arena(*now_->variables, now_->poison);
    threadgroup_shadow_.begin_threadgroup();
    for (Shadow& shadow : device_shadows_) shadow.begin_threadgroup();
    set_up_lanes(at, groups);
    run_lanes();
    if (error_.empty()) check_memory();
  }

  void set_up_lanes(const Size& at, const Size& groups) {
    Size size;
    for (int d = 0; d < 3; d++) size[d] = std::min(now_->group[d], now_->threads[d] - at[d] * now_->group[d]);
    lanes_ = size[0] * size[1] * size[2];
    simdgroups_ = (lanes_ + kSimdWidth - 1) / kSimdWidth;
    for (unsigned i = 0; i < lanes_; i++) {
      Fiber& fiber = fibers_[i];
      fiber.state = State::kReady;
      fiber.stack = new_stack(stacks_.top(i), [] { get().run_lane(); });
      Lane& lane = fiber.lane;
      const Size position = {i % size[0], i / size[0] % size[1], i / size[0] / size[1]};
      for (int d = 0; d < 3; d++) {
        lane.position_in_threadgroup[d] = position[d];
        lane.position_in_grid[d] = at[d] * now_->group[d] + position[d];
        lane.threadgroup_position[d] = at[d];
        lane.threads_per_threadgroup[d] = size[d];
        lane.threads_per_grid[d] = now_->threads[d];
        lane.threadgroups_per_grid[d] = groups[d];
      }
      lane.index_in_threadgroup = i;
      lane.index_in_simdgroup = i % kSimdWidth;
      lane.simdgroup = i / kSimdWidth;
      lane.simdgroups = simdgroups_;
    }
    threadgroup_ = {0, lanes_, 0, {}};
    for (unsigned s = 0; s < simdgroups_; s++) simdgroup_[s] = {s * kSimdWidth, std::min(kSimdWidth, lanes_ - s * kSimdWidth), 0, {}};
  }

  [[noreturn]] void run_lane() {
    now_->entry(now_->buffers);
    fibers_[current_].state = State::kDone;
    done_++;
    leave();
    std::abort();
  }

  // Forward and reverse run a simdgroup as far as it gets before the next; shuffled changes the order with every pass.
  void run_lanes() {
    const Order order = now_->order;
    done_ = 0;
    std::vector<unsigned> simdgroups(simdgroups_), lanes(kSimdWidth);
    std::iota(simdgroups.begin(), simdgroups.end(), 0);
    std::iota(lanes.begin(), lanes.end(), 0);
    if (order == Order::kReverse) {
      std::reverse(simdgroups.begin(), simdgroups.end());
      std::reverse(lanes.begin(), lanes.end());
    }
    while (done_ < lanes_) {
      bool progress = false;
      if (order == Order::kShuffled) std::shuffle(simdgroups.begin(), simdgroups.end(), random_);
      for (unsigned s : simdgroups) {
        bool again = true;
        while (again) {
          if (order == Order::kShuffled) std::shuffle(lanes.begin(), lanes.end(), random_);
          again = false;
          for (unsigned lane : lanes) {
            const unsigned i = s * kSimdWidth + lane;
            if (i >= lanes_ || fibers_[i].state != State::kReady) continue;
            enter(i);
            if (!error_.empty()) return;
            progress = true;
            again = order != Order::kShuffled;
          }
        }
      }
      if (!progress) return report_divergence();
    }
  }

  void enter(unsigned i) {
    current_ = i;
    runtime_.lane = &fibers_[i].lane;
    msl_switch_stack(&scheduler_, fibers_[i].stack);
    current_ = kNone;
  }
  void leave() { msl_switch_stack(&fibers_[current_].stack, scheduler_); }

  // ---- meeting points ----

  Meeting& own_simdgroup() { return simdgroup_[current_ / kSimdWidth]; }

  // True for the last lane to arrive, which lets the others go on with release().
  bool arrive(Meeting& meeting, const Site& site, void* frame) {
    Fiber& fiber = fibers_[current_];
    if (meeting.arrived && !same(meeting.site, site))
      fail("lanes that belong together are at different operations: " + text(meeting.site) + " and " + text(site));
    meeting.site = fiber.site = site;
    fiber.frame = frame;
    if (++meeting.arrived == meeting.count) return true;
    fiber.state = State::kWaiting;
    leave();
    return false;
  }
  void release(Meeting& meeting) {
    meeting.arrived = 0;
    for (unsigned i = meeting.begin; i < meeting.begin + meeting.count; i++) fibers_[i].state = State::kReady;
  }

  void collective(const Site& site, unsigned simdgroups, void* frame, Combine combine) {
    if (simdgroups > 1 && simdgroups != simdgroups_)
      fail(text(site) + ": the scope has " + std::to_string(simdgroups) + " simdgroups, the threadgroup has " +
           std::to_string(simdgroups_));
    Meeting& meeting = simdgroups > 1 ? threadgroup_ : own_simdgroup();
    if (!arrive(meeting, site, frame)) return;
    void* frames[kMaxThreads];
    for (unsigned i = 0; i < meeting.count; i++) frames[i] = fibers_[meeting.begin + i].frame;
    in_collective_ = true;
    combine(frames, meeting.count);
    in_collective_ = false;
    release(meeting);
  }

  void barrier(Meeting& meeting, const Site& site, int flags) {
    if (!arrive(meeting, site, nullptr)) return;
    auto order = [&](Shadow& shadow) {
      &meeting == &threadgroup_ ? shadow.threadgroup_barrier() : shadow.simdgroup_barrier(current_ / kSimdWidth);
    };
    if (flags & kMemThreadgroup) order(threadgroup_shadow_);
    if (flags & kMemDevice) std::for_each(device_shadows_.begin(), device_shadows_.end(), order);
    release(meeting);
  }

  // ---- errors ----

  void report_divergence() {
    auto describe = [&](unsigned i) {
      return "thread " + std::to_string(i) + (fibers_[i].state == State::kDone ? " has returned" : " waits at " + text(fibers_[i].site));
    };
    auto differs = [&](unsigned i, unsigned j) { return fibers_[i].state != fibers_[j].state || !same(fibers_[i].site, fibers_[j].site); };
    unsigned waiting = 0, other = 0;
    while (fibers_[waiting].state != State::kWaiting) waiting++;
    while (other < lanes_ - 1 && !differs(waiting, other)) other++;
    error_ = "not all lanes reach an operation that needs them all: " + describe(waiting) + ", " + describe(other) + threadgroup_name();
  }

  std::string threadgroup_name() const {
    const unsigned* at = fibers_[0].lane.threadgroup_position;
    return " [threadgroup " + std::to_string(at[0]) + "," + std::to_string(at[1]) + "," + std::to_string(at[2]) + "]";
  }

  // Gives up the running lane and, with it, the call.
  [[noreturn]] void fail(const std::string& message) {
    error_ = message + (in_collective_ ? " [simdgroup " + std::to_string(current_ / kSimdWidth) : " [thread " + std::to_string(current_)) +
             "]" + threadgroup_name();
    in_collective_ = false;
    leave();
    std::abort();
  }

  void fault(int signal, char* address) {
    if (current_ == kNone) {  // not a kernel's: die of it as without the handler
      ::signal(signal, SIG_DFL);
      return;
    }
    if (signal == SIGFPE) fail("integer division by zero");
    if (signal == SIGILL) fail("undefined behaviour");
    if (stacks_.contains(address)) fail("stack overflow of a thread");
    if (address < memory_.begin() || address >= memory_.end()) fail("access to an address outside all buffers");
    if (memory_.near_arena(address)) fail("access outside threadgroup memory");
    out_of_bounds(address);
  }

  [[noreturn]] void out_of_bounds(const char* address) {
    const Buffer& buffer = memory_.buffers()[memory_.nearest(address)];
    const bool behind = address >= buffer.begin;
    const long distance = behind ? address - (buffer.begin + buffer.bytes) : buffer.begin - address;
    fail("out-of-bounds access, " + std::to_string(distance) + " bytes " + (behind ? "behind " : "before ") + buffer.name);
  }

  // Writes that left traces, for a build without hooks.
  void check_memory() {
    if (const Variable* v = memory_.damaged(*now_->variables))
      error_ = "a write behind the end of threadgroup variable " + v->name + threadgroup_name();
    if (const Buffer* b = memory_.damaged()) error_ = "out-of-bounds write beside " + b->name + threadgroup_name();
  }

  // ---- hooks of a checked build ----

  void access(const char* address, unsigned bytes, bool is_store) {
    if (current_ == kNone) return;
    if (memory_.in_arena(address)) return access_threadgroup(address - memory_.arena(), bytes, is_store);
    const int i = memory_.nearest(address);
    if (i < 0 || memory_.near_arena(address)) return;  // the access itself will fault
    const Buffer& buffer = memory_.buffers()[i];
    if (address < buffer.begin) out_of_bounds(address);
    if (address + bytes > buffer.begin + buffer.bytes) out_of_bounds(address + bytes - 1);
    if (buffer.writable) record(device_shadows_[i], address - buffer.begin, bytes, is_store, buffer.name, 0);
  }

  void access_threadgroup(size_t at, unsigned bytes, bool is_store) {
    const Variable* variable = nullptr;
    for (const Variable& v : *now_->variables)
      if (at >= v.offset) variable = &v;
    if (!variable || at + bytes > variable->offset + variable->bytes)
      fail(std::string(is_store ? "a write " : "a read ") +
           (variable ? "behind the end of threadgroup variable " + variable->name : "outside threadgroup memory"));
    record(threadgroup_shadow_, at, bytes, is_store, variable->name, variable->offset);
  }

  void record(Shadow& shadow, size_t at, unsigned bytes, bool is_store, const std::string& name, size_t origin) {
    const Actor actor{uint16_t(current_), in_collective_};
    for (size_t i = at; i < at + bytes; i++) {
      const Finding finding = is_store ? shadow.store(i, actor) : shadow.load(i, actor);
      if (!finding.text) continue;
      const std::string other = finding.thread == Finding::kNoThread ? "" : " of thread " + std::to_string(finding.thread);
      fail(name + ", byte " + std::to_string(i - origin) + ": " + finding.text + other);
    }
  }

  Runtime runtime_{};
  Memory memory_;
  Shadow threadgroup_shadow_{0, Shadow::Kind::kThreadgroup};
  std::vector<Shadow> device_shadows_;
  Stacks stacks_;
  std::vector<Fiber> fibers_;
  Meeting threadgroup_, simdgroup_[kMaxSimdgroups];
  std::mt19937 random_;
  const Dispatch* now_ = nullptr;
  void* scheduler_ = nullptr;
  unsigned current_ = kNone, lanes_ = 0, simdgroups_ = 0, done_ = 0;
  bool in_collective_ = false, probing_ = false;
  std::string error_;
  Identity identity_;
};

}  // namespace msl
