// Launches, workgroups and the order in which waves run; the C interface that interpreter.py loads.
#include <map>

#include "transfers.h"

namespace gfx950 {
namespace {

struct Launch {  // mirrored in interpreter.py
  const Inst* code;
  const char* const* names;
  Counters* counters;
  u32* trace;         // of the first workgroup: [waves][trace_capacity] program counters, or null
  u64* trace_length;  // [waves]
  u64 trace_capacity;
  u32 length, lds_bytes, scratch_bytes, user_sgprs, workgroup_ids, device;
  i32 after;  // the launch that must have ended before (a stream), or -1
  u32 pace;   // a wave that can run does so in one of this many rounds
  u64 delay;  // instructions that others execute first
  u32 grid[3], block[3];
  u32 user_sgpr[32];
};
struct Buffer {
  u64 base, size;
  u8* data;
};
struct Error {
  char kind[40], text[280];
  i32 launch, pc, wave, workgroup[3];
};

constexpr u32 kXcds = 8;

enum State { kRunning, kAtBarrier, kEnded };

struct Runner {  // a wave and where it stands
  Wave wave;
  std::unique_ptr<WaveMemory> memory;
  State state = kRunning;
};

struct Workgroup {
  const Launch* launch;
  const std::vector<Code>* code;
  u32 id[3];
  bool traced;
  Lds lds;
  Cache l1;
  Path path;
  std::vector<std::unique_ptr<Runner>> waves;

  Workgroup(const Launch& l, const std::vector<Code>& c, u64 index, Memory& memory, Cache* l2, Cache* device, const Policy& policy)
      : launch(&l),
        code(&c),
        id{u32(index % l.grid[0]), u32(index / l.grid[0] % l.grid[1]), u32(index / l.grid[0] / l.grid[1])},
        traced(l.trace && index == 0),
        lds(l.lds_bytes, int((l.block[0] * l.block[1] * l.block[2] + 63) / 64)),
        path(memory, policy.caches ? std::vector<Cache*>{&l1, l2, device} : std::vector<Cache*>{}) {
    const u32 threads = l.block[0] * l.block[1] * l.block[2];
    for (u32 w = 0; w * kLanes < threads; ++w) {
      auto r = std::make_unique<Runner>();
      u32 s = 0;
      for (; s < l.user_sgprs; ++s) r->wave.s[s] = l.user_sgpr[s];
      for (int d = 0; d < 3; ++d)
        if (l.workgroup_ids >> d & 1) r->wave.s[s++] = id[d];
      u64 exec = 0;
      for (u32 lane = 0; lane < kLanes; ++lane) {
        const u32 t = w * kLanes + lane;
        exec |= u64(t < threads) << lane;
        r->wave.v[0][lane] = t % l.block[0] | t / l.block[0] % l.block[1] << 10 | t / l.block[0] / l.block[1] << 20;
      }
      r->wave.set64(kExec, exec);
      r->memory = std::make_unique<WaveMemory>(r->wave, lds, path, int(w), l.scratch_bytes, policy);
      waves.push_back(std::move(r));
    }
  }

  bool ended() const {
    return std::all_of(waves.begin(), waves.end(), [](const auto& r) { return r->state == kEnded; });
  }
  void release_barrier() {
    int at = 0, over = 0;
    for (const auto& r : waves) at += r->state == kAtBarrier, over += r->state == kEnded;
    if (!at || size_t(at + over) < waves.size()) return;
    if (over)
      throw Hazard{"divergent-barrier",
                   std::to_string(at) + " waves wait at a barrier that the others have passed by or ended without"};
    for (auto& r : waves) r->state = kRunning, ++r->memory->epoch;
  }
  void step(int w, u64 now) {
    Runner& r = *waves[size_t(w)];
    const Launch& l = *launch;
    if (r.wave.pc < 0 || r.wave.pc >= int(l.length)) throw Hazard{"ran-off-the-end", "no instruction here"};
    const Code& c = (*code)[size_t(r.wave.pc)];
    Counters& count = l.counters[r.wave.pc];
    ++count.executed;
    if (traced && l.trace_length[w] < l.trace_capacity) l.trace[u64(w) * l.trace_capacity + l.trace_length[w]++] = u32(r.wave.pc);
    bool jump = false;
    switch (c.cls) {
      case kClassSalu: r.wave.salu(c); break;
      case kClassValu: r.wave.valu(c); break;
      case kClassPacked: r.wave.packed(c); break;
      case kClassMfma: r.wave.matrix(c); break;
      case kClassLane: r.wave.lanes(c); break;
      case kClassSaveexec: r.wave.saveexec(c); break;
      case kClassBranch: jump = r.wave.taken(c); break;
      case kClassWait: r.memory->wait(c.in->mod[kVmcnt], c.in->mod[kLgkmcnt]); break;
      case kClassSmem: r.memory->smem(c); break;
      case kClassTime: r.memory->time(c, now); break;
      case kClassVmem: r.memory->vmem(c); break;
      case kClassDs: r.memory->ds(c, count); break;
      case kClassPermute: r.memory->permute(c); break;
      case kClassBarrier:
        if (~r.wave.exec()) throw Hazard{"divergent-barrier", "a barrier with some lanes switched off"};
        r.state = kAtBarrier;
        break;
      case kClassEnd:
        r.memory->finish();
        r.state = kEnded;
        break;
      case kClassCache: r.memory->cache(c); break;
      case kClassNop:
      case kClassSleep: break;
    }
    r.wave.pc = jump ? c.in->mod[kTarget] : r.wave.pc + 1;
  }
};

void fill(char* to, size_t n, const std::string& text) { std::snprintf(to, n, "%s", text.c_str()); }

class Machine {
 public:
  Machine(Launch* launches, int n, const Policy& policy, Error* error)
      : launches_(launches), n_(n), policy_(policy), random_(u32(policy.seed)), error_(error) {}

  Memory memory;

  bool run() {
    try {
      for (int i = 0; i < n_; ++i) {
        const Launch& l = launches_[i];
        code_.emplace_back(l.length);
        for (u32 pc = 0; pc < l.length; ++pc) {
          where(i, int(pc), -1, nullptr);
          if (!resolve(l.names[pc], &l.code[pc], &code_.back()[pc])) throw Hazard{"unknown-opcode", l.names[pc]};
        }
      }
      next_.assign(size_t(n_), 0);
      where(0, -1, -1, nullptr);
      while (admit()) round();
      for (u32 device : ended_) release(device);
    } catch (const Hazard& h) {
      fill(error_->kind, sizeof error_->kind, h.kind);
      fill(error_->text, sizeof error_->text, h.text);
      return false;
    }
    return true;
  }

 private:
  void where(int launch, int pc, int wave, const u32* workgroup) {
    error_->launch = launch, error_->pc = pc, error_->wave = wave;
    for (int d = 0; d < 3; ++d) error_->workgroup[d] = workgroup ? i32(workgroup[d]) : -1;
  }
  bool admit() {
    for (int i = 0; i < n_; ++i) {
      const int after = launches_[i].after;
      if (after >= 0 && !finished(after)) continue;
      if (steps_ < launches_[i].delay && !live_.empty()) continue;
      if (after >= 0 && next_[size_t(i)] == 0) boundary(launches_[i].device);
      for (i64 free = policy_.resident - in_flight(i); free > 0 && next_[size_t(i)] < workgroups(i); --free) start(i);
    }
    return !live_.empty();
  }
  bool finished(int launch) const { return next_[size_t(launch)] == workgroups(launch) && !in_flight(launch); }
  u64 workgroups(int launch) const {
    const Launch& l = launches_[launch];
    return u64(l.grid[0]) * l.grid[1] * l.grid[2];
  }
  i64 in_flight(int launch) const {
    return std::count_if(live_.begin(), live_.end(), [&](const auto& w) { return w->launch == &launches_[launch]; });
  }
  // Between two kernels of a stream: the first is released and the second acquires, as far as the device.
  void boundary(u32 device) {
    for (auto& [key, l2] : l2_)
      if (key.first == device) Path(memory, {nullptr, &l2, &device_[device]}).writeback(kAgentScope), l2.drop_clean();
  }
  void release(u32 device) {  // at the end of a run everything is visible to everyone
    for (auto& [key, l2] : l2_)
      if (key.first == device) Path(memory, {nullptr, &l2, &device_[device]}).writeback(kSystemScope);
  }
  void start(int launch) {
    const u64 index = next_[size_t(launch)]++;
    const u32 device = launches_[launch].device;
    live_.push_back(std::make_unique<Workgroup>(launches_[launch], code_[size_t(launch)], index, memory,
                                                &l2_[{device, u32(index % kXcds)}], &device_[device], policy_));
  }
  // Every wave that can run gets one turn: until a barrier, its end, a sleep or the quantum.
  void round() {
    std::vector<std::pair<Workgroup*, int>> turns;
    for (auto& w : live_)
      for (int i = 0; i < int(w->waves.size()); ++i)
        if (w->waves[size_t(i)]->state == kRunning) turns.push_back({w.get(), i});
    if (policy_.order == 1) std::reverse(turns.begin(), turns.end());
    if (policy_.order == 2) std::shuffle(turns.begin(), turns.end(), random_);
    for (auto& [w, i] : turns)
      if (w->launch->pace <= 1 || random_() % w->launch->pace == 0) turn(*w, i);
    for (auto& w : live_) {
      where(int(w->launch - launches_), w->waves[0]->wave.pc - 1, 0, w->id);
      w->release_barrier();
    }
    for (auto it = live_.begin(); it != live_.end();) {
      const int launch = int((*it)->launch - launches_);
      it = (*it)->ended() ? live_.erase(it) : it + 1;
      if (finished(launch)) ended_.push_back(launches_[launch].device);
    }
  }
  void turn(Workgroup& w, int i) {
    Runner& r = *w.waves[size_t(i)];
    const int quantum = policy_.order == 2 ? 1 + int(random_() % u32(policy_.quantum)) : policy_.quantum;
    for (int n = 0; n < quantum && r.state == kRunning; ++n) {
      where(int(w.launch - launches_), r.wave.pc, i, w.id);
      if (policy_.retire == Policy::kRandom) r.memory->drift(random_);
      const bool sleep = r.wave.pc < int(w.launch->length) && (*w.code)[size_t(r.wave.pc)].cls == kClassSleep;
      w.step(i, steps_);
      if (++steps_ > policy_.budget) throw Hazard{"no-progress", std::to_string(policy_.budget) + " instructions and not done"};
      if (sleep) break;
    }
  }

  Launch* launches_;
  int n_;
  const Policy& policy_;
  std::mt19937 random_;
  Error* error_;
  std::vector<std::vector<Code>> code_;
  std::vector<u64> next_;
  std::vector<std::unique_ptr<Workgroup>> live_;
  std::map<std::pair<u32, u32>, Cache> l2_;  // by device and XCD; workgroups are dealt to the XCDs in turn
  std::map<u32, Cache> device_;
  std::vector<u32> ended_;
  u64 steps_ = 0;
};

}  // namespace
}  // namespace gfx950

extern "C" int gfx950_run(gfx950::Launch* launches, int n, const gfx950::Buffer* buffers, int n_buffers,
                          const gfx950::Policy* policy, gfx950::Error* error) {
  gfx950::Machine machine(launches, n, *policy, error);
  for (int i = 0; i < n_buffers; ++i) machine.memory.add(buffers[i].base, buffers[i].size, buffers[i].data);
  return machine.run() ? 0 : 1;
}
extern "C" int gfx950_sizes(int which) { return which == 0 ? int(sizeof(gfx950::Inst)) : int(sizeof(gfx950::Launch)); }
extern "C" int gfx950_knows(const char* name) {
  gfx950::Code c;
  return gfx950::resolve(name, nullptr, &c);
}
