// Runs compiled shaders: one threadgroup at a time, every lane a fiber, barriers and collectives as meeting points.
#include <dlfcn.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <signal.h>

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>

#include "checker.h"
#include "fiber.h"
#include "memory.h"

namespace msl {
namespace {

namespace py = pybind11;
using Size = std::array<unsigned, 3>;
using Entry = void (*)(void** buffers);

constexpr unsigned kNone = ~0u;

enum class Order : int { kForward, kReverse, kShuffled };

std::string text(const Site& site) { return std::string(site.call) + " (line " + std::to_string(site.line) + ")"; }

class Machine {
 public:
  struct Options {
    Order order;
    unsigned seed;
    int poison;
    Behaviour behaviour;
  };

  static Machine& get() {
    static Machine machine;
    return machine;
  }

  Runtime* interface() { return &runtime_; }
  Memory& memory() { return memory_; }

  // The kernel as its __PRETTY_FUNCTION__ names it.
  std::string probe(Entry entry) {
    char dummy[64] = {};
    void* buffers[32];
    for (void*& buffer : buffers) buffer = dummy;
    runtime_.lane = &fibers_[0].lane;
    probing_ = true;
    entry(buffers);
    probing_ = false;
    return probed_;
  }

  void dispatch(Entry entry, const std::vector<Memory::Variable>& variables, void** buffers, Size threads, Size group, const Options& options) {
    entry_ = entry;
    buffers_ = buffers;
    variables_ = &variables;
    runtime_.behaviour = options.behaviour;
    random_.seed(options.seed);
    error_.clear();
    Signals signals;
    Size groups;
    for (int d = 0; d < 3; d++) groups[d] = (threads[d] + group[d] - 1) / group[d];
    const uint64_t total = uint64_t(groups[0]) * groups[1] * groups[2];
    for (uint64_t i = 0; i < total && error_.empty(); i++) {
      const uint64_t flat = options.order == Order::kReverse ? total - 1 - i : i;
      const Size at = {unsigned(flat % groups[0]), unsigned(flat / groups[0] % groups[1]), unsigned(flat / groups[0] / groups[1])};
      memory_.fill_arena(variables, options.poison);
      checker_.begin_threadgroup();
      set_up_lanes(at, threads, group, groups);
      run_threadgroup(options.order);
      check_memory();
    }
    current_ = kNone;
    if (!error_.empty()) throw std::runtime_error(error_);
  }

 private:
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

  // Faults of a kernel become errors of the call; the handlers live as long as the call.
  class Signals {
   public:
    Signals() {
      stack_t stack = {};
      stack.ss_sp = handler_stack_.data();
      stack.ss_size = handler_stack_.size();
      sigaltstack(&stack, &old_stack_);
      struct sigaction action = {};
      action.sa_sigaction = [](int signal, siginfo_t* info, void*) { get().fault(signal, static_cast<char*>(info->si_addr)); };
      action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
      for (size_t i = 0; i < kSignals.size(); i++) sigaction(kSignals[i], &action, &old_[i]);
    }
    ~Signals() {
      for (size_t i = 0; i < kSignals.size(); i++) sigaction(kSignals[i], &old_[i], nullptr);
      sigaltstack(&old_stack_, nullptr);
    }

   private:
    static constexpr std::array<int, 4> kSignals = {SIGSEGV, SIGBUS, SIGILL, SIGFPE};
    std::vector<char> handler_stack_ = std::vector<char>(64 * 1024);
    stack_t old_stack_;
    struct sigaction old_[kSignals.size()];
  };

  Machine() : stacks_(kMaxThreads), fibers_(kMaxThreads) {
    runtime_.shared_begin = memory_.begin();
    runtime_.shared_end = memory_.end();
    runtime_.collective = [](Site site, unsigned simdgroups, void* frame, Combine combine) { get().collective(site, simdgroups, frame, combine); };
    runtime_.threadgroup_barrier = [](Site site, int flags) { get().barrier(get().threadgroup_, site, flags); };
    runtime_.simdgroup_barrier = [](Site site, int flags) { get().barrier(get().own_simdgroup(), site, flags); };
    runtime_.on_load = [](const char* address, unsigned bytes) { get().access(address, bytes, false); };
    runtime_.on_store = [](const char* address, unsigned bytes) { get().access(address, bytes, true); };
    runtime_.probe = [](const char* function) {
      if (get().probing_) get().probed_ = function;
      return get().probing_;
    };
    runtime_.fail = [](const char* message, int line) { get().fail(line ? message + (" (line " + std::to_string(line) + ")") : message); };
  }

  // ---- scheduling ----

  void set_up_lanes(const Size& at, const Size& threads, const Size& group, const Size& groups) {
    Size size;
    for (int d = 0; d < 3; d++) size[d] = std::min(group[d], threads[d] - at[d] * group[d]);
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
        lane.position_in_grid[d] = at[d] * group[d] + position[d];
        lane.threadgroup_position[d] = at[d];
        lane.threads_per_threadgroup[d] = size[d];
        lane.threads_per_grid[d] = threads[d];
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
    entry_(buffers_);
    fibers_[current_].state = State::kDone;
    done_++;
    leave();
    std::abort();
  }

  // Forward and reverse run a simdgroup as far as it gets before the next; shuffled changes the order with every pass.
  void run_threadgroup(Order order) {
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
    if (meeting.arrived && (meeting.site.line != site.line || std::strcmp(meeting.site.call, site.call)))
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
      fail(text(site) + ": the scope has " + std::to_string(simdgroups) + " simdgroups, the threadgroup has " + std::to_string(simdgroups_));
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
    if (flags & kMemThreadgroup) {
      if (&meeting == &threadgroup_)
        checker_.threadgroup_barrier();
      else
        checker_.simdgroup_barrier(current_ / kSimdWidth);
    }
    release(meeting);
  }

  void report_divergence() {
    auto describe = [&](unsigned i) {
      return "thread " + std::to_string(i) + (fibers_[i].state == State::kDone ? " has returned" : " waits at " + text(fibers_[i].site));
    };
    auto differs = [&](unsigned i, unsigned j) {
      return fibers_[i].state != fibers_[j].state || fibers_[i].site.line != fibers_[j].site.line || std::strcmp(fibers_[i].site.call, fibers_[j].site.call);
    };
    unsigned waiting = 0;
    while (fibers_[waiting].state != State::kWaiting) waiting++;
    unsigned other = 0;
    while (other < lanes_ - 1 && !differs(waiting, other)) other++;
    const Lane& lane = fibers_[waiting].lane;
    error_ = "not all lanes reach an operation that needs them all: " + describe(waiting) + ", " + describe(other) + where(lane);
  }

  // ---- errors ----

  static std::string where(const Lane& lane) {
    return " [threadgroup " + std::to_string(lane.threadgroup_position[0]) + "," + std::to_string(lane.threadgroup_position[1]) + "," +
           std::to_string(lane.threadgroup_position[2]) + "]";
  }

  // Gives up the running lane and, with it, the call.
  [[noreturn]] void fail(const std::string& message) {
    const Lane& lane = fibers_[current_].lane;
    error_ = message + (in_collective_ ? " [simdgroup " + std::to_string(lane.simdgroup) + "]" : " [thread " + std::to_string(current_) + "]") + where(lane);
    in_collective_ = false;
    leave();
    std::abort();
  }

  void fault(int signal, char* address) {
    if (current_ == kNone) {  // not a kernel's: die of it as without us
      ::signal(signal, SIG_DFL);
      return;
    }
    if (signal == SIGILL || signal == SIGFPE) fail(signal == SIGFPE ? "integer division by zero" : "undefined behaviour");
    if (stacks_.contains(address)) fail("stack overflow of a thread");
    if (address < memory_.begin() || address >= memory_.end()) fail("access to an address outside all buffers");
    if (address < memory_.arena() + Memory::kArena + Memory::kGap / 2) fail("access outside threadgroup memory");
    fail(out_of_bounds(address));
  }

  std::string out_of_bounds(const char* address) const {
    const int i = memory_.nearest(address);
    const Memory::Buffer& buffer = memory_.buffers()[i];
    const bool after = address >= buffer.begin;
    return "out-of-bounds access: " + std::to_string(after ? address - buffer.begin - buffer.bytes : buffer.begin - address) + " bytes " +
           (after ? "behind" : "before") + " storage " + std::to_string(i);
  }

  // Without the checker's hooks: writes that left their traces.
  void check_memory() {
    if (!error_.empty()) return;
    if (const Memory::Variable* v = memory_.damaged(*variables_)) error_ = "a write behind the end of threadgroup variable " + v->name + where(fibers_[0].lane);
    const int buffer = memory_.damaged();
    if (buffer >= 0) error_ = "out-of-bounds write beside storage " + std::to_string(buffer) + where(fibers_[0].lane);
  }

  // ---- hooks of a checked build ----

  void access(const char* address, unsigned bytes, bool is_store) {
    if (current_ == kNone) return;
    if (!memory_.in_arena(address)) return check_bounds(address, bytes);
    const size_t at = address - memory_.arena();
    const Memory::Variable* variable = nullptr;
    for (const Memory::Variable& v : *variables_)
      if (at >= v.offset) variable = &v;
    if (!variable || at + bytes > variable->offset + variable->bytes) {
      fail(std::string(is_store ? "a write" : "a read") + (variable ? " behind the end of threadgroup variable " + variable->name : " outside threadgroup memory"));
    }
    const Checker::Actor actor{uint16_t(current_), in_collective_};
    for (unsigned i = 0; i < bytes; i++) {
      const std::string wrong = is_store ? checker_.store(at + i, actor) : checker_.load(at + i, actor);
      if (!wrong.empty()) fail("threadgroup variable " + variable->name + ", byte " + std::to_string(at + i - variable->offset) + ": " + wrong);
    }
  }
  void check_bounds(const char* address, unsigned bytes) {
    const int i = memory_.nearest(address);
    if (i < 0) return;
    const Memory::Buffer& buffer = memory_.buffers()[i];
    if (address < buffer.begin || address + bytes > buffer.begin + buffer.bytes) fail(out_of_bounds(address < buffer.begin ? address : address + bytes - 1));
  }

  Runtime runtime_{};
  Memory memory_;
  Checker checker_;
  Stacks stacks_;
  std::vector<Fiber> fibers_;
  Meeting threadgroup_, simdgroup_[kMaxSimdgroups];
  std::mt19937 random_;
  void* scheduler_ = nullptr;
  unsigned current_ = kNone, lanes_ = 0, simdgroups_ = 0, done_ = 0;
  bool in_collective_ = false, probing_ = false;
  std::string error_, probed_;
  Entry entry_ = nullptr;
  void** buffers_ = nullptr;
  const std::vector<Memory::Variable>* variables_ = nullptr;
};

// A compiled shader.
class Library {
 public:
  Library(const std::string& path, int kernels) : handle_(dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) {
    if (!handle_) throw std::runtime_error(dlerror());
    ThreadgroupVariable *begin, *end;
    symbol<void (*)(Runtime*, ThreadgroupVariable**, ThreadgroupVariable**)>("msl_bind")(Machine::get().interface(), &begin, &end);
    for (ThreadgroupVariable* v = begin; v < end; v++) place(*v);
    for (int i = 0; i < kernels; i++) {
      entries_.push_back(symbol<Entry>("msl_entry_" + std::to_string(i)));
      names_.push_back(Machine::get().probe(entries_.back()));
    }
  }
  Library(const Library&) = delete;
  ~Library() { dlclose(handle_); }

  // Per parameter: (elements, element size, element kind, const).
  std::vector<std::tuple<int, int, char, bool>> parameters(int kernel, int count) const {
    struct BufferType {
      int elements, element_size;
      char element, is_const;
    };
    std::vector<BufferType> types(count + 1);
    symbol<void (*)(BufferType*)>("msl_describe_" + std::to_string(kernel))(types.data());
    std::vector<std::tuple<int, int, char, bool>> result;
    for (int i = 0; i < count; i++) result.emplace_back(types[i].elements, types[i].element_size, types[i].element ? types[i].element : ' ', types[i].is_const);
    return result;
  }

  size_t threadgroup_bytes(int kernel) const {
    size_t bytes = 0;
    for (const Memory::Variable& v : variables(kernel)) bytes += (v.bytes + 15) / 16 * 16;
    return bytes;
  }

  // storages: (address, bytes, writable); bindings: (storage, byte offset) per buffer index.
  void dispatch(int kernel, const std::vector<std::tuple<uintptr_t, size_t, bool>>& storages, const std::vector<std::pair<int, size_t>>& bindings, Size threads,
                Size group, int order, unsigned seed, int poison, std::array<int, 4> behaviour) const {
    Memory& memory = Machine::get().memory();
    struct Unmap {
      Memory& memory;
      ~Unmap() { memory.unmap(); }
    } unmap{memory};
    std::vector<char*> mapped;
    for (const auto& [address, bytes, writable] : storages) mapped.push_back(memory.map(reinterpret_cast<char*>(address), bytes, writable));
    std::vector<void*> buffers;
    for (const auto& [storage, offset] : bindings) buffers.push_back(mapped[storage] + offset);
    const Machine::Options options{Order(order), seed, poison,
                                   {SumOrder(behaviour[0]), MatrixLayout(behaviour[1]), ProductOrder(behaviour[2]), CooperativeLayout(behaviour[3])}};
    Machine::get().dispatch(entries_[kernel], variables(kernel), buffers.data(), threads, group, options);
    memory.copy_back();
  }

 private:
  template <class F>
  F symbol(const std::string& name) const {
    void* address = dlsym(handle_, name.c_str());
    if (!address) throw std::runtime_error("no symbol " + name);
    return reinterpret_cast<F>(address);
  }

  void place(ThreadgroupVariable& v) {
    auto& of_kernel = variables_[v.function];
    const size_t alignment = std::max<size_t>(v.alignment, Memory::kAlignment), offset = (Memory::arena_used(of_kernel) + alignment - 1) / alignment * alignment;
    if (offset + v.size + Memory::kRedZone > Memory::kArena) throw std::runtime_error(std::string("too much threadgroup memory in ") + v.function);
    of_kernel.push_back({v.name, offset, v.size});
    v.address = Machine::get().memory().arena() + offset;
  }
  const std::vector<Memory::Variable>& variables(int kernel) const {
    static const std::vector<Memory::Variable> none;
    const auto found = variables_.find(names_[kernel]);
    return found == variables_.end() ? none : found->second;
  }

  void* handle_;
  std::vector<Entry> entries_;
  std::vector<std::string> names_;
  std::map<std::string, std::vector<Memory::Variable>> variables_;
};

}  // namespace
}  // namespace msl

PYBIND11_MODULE(MSL_MODULE_NAME, m) {
  pybind11::class_<msl::Library>(m, "Library")
      .def(pybind11::init<const std::string&, int>())
      .def("parameters", &msl::Library::parameters)
      .def("threadgroup_bytes", &msl::Library::threadgroup_bytes)
      .def("dispatch", &msl::Library::dispatch);
}
