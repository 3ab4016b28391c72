// Memory instructions. An instruction is issued (addresses and store data are taken), takes effect at some later moment of the
// schedule's choice, and is complete when a wait covers it. Between issue and completion its bytes and registers are in flight.
#pragma once
#include <deque>
#include <memory>

#include "memory.h"
#include "wave.h"

namespace gfx950 {

struct Policy {
  enum Retire : i32 { kLate, kEarly, kRandom };
  i32 retire;
  i32 order;    // 0 forward, 1 reverse, 2 random
  i32 quantum;  // instructions before another wave runs
  i32 seed;
  i32 soffset_checked;  // does the raw-buffer range check see soffset?
  i32 resident;         // workgroups in flight per launch
  i32 caches;           // model L1, L2 and device-wide caching
  i32 unused;
  u64 budget;  // instructions in all, then "no progress"
};

struct Counters {  // per instruction of the program
  u64 executed, ds_accesses, conflict_cycles;
};

struct Transfer {
  enum Kind { kVector, kDma, kWrite, kRmw, kDsRead, kDsWrite, kScalar, kRegister, kWriteback, kNothing } kind;
  const Code* code;
  Operand dst;
  int bytes, parts = 1, registers = 0;
  u64 exec;
  bool applied = false;
  Scope scope = kWaveScope;
  u64 addr[kLanes];     // global address, or LDS address of the first part
  u64 addr2[kLanes];    // LDS address of the second part
  u32 lds[kLanes];      // DMA: destination
  u8 in_range[kLanes];  // one bit per dword
  u32 data[4][kLanes];  // store data, or a result that is only on its way
};

class WaveMemory {
 public:
  WaveMemory(Wave& w, Lds& lds, Path& memory, int id, u32 scratch_bytes, const Policy& policy)
      : w_(w),
        lds_(lds),
        memory_(memory),
        policy_(policy),
        id_(id),
        scratch_(size_t(scratch_bytes) * kLanes, Lds::kPoison),
        scratch_bytes_(scratch_bytes) {}

  u32 epoch = 0;  // barriers passed

  void wait(int vmcnt, int lgkmcnt) {
    while (vmcnt >= 0 && int(vm_.size()) > vmcnt) complete(vm_, vm_.begin());
    if (lgkmcnt < 0) return;
    // LDS operations come back in order among themselves, scalar loads in any order: only lgkmcnt(0) is a promise about them.
    int scalars = 0;
    for (const auto& t : lgkm_) scalars += t->kind == Transfer::kScalar;
    for (int done = int(lgkm_.size()) - lgkmcnt - (lgkmcnt ? scalars : 0); done > 0; --done) {
      auto it = lgkm_.begin();
      while (lgkmcnt && (*it)->kind == Transfer::kScalar) ++it;
      complete(lgkm_, it);
    }
  }
  void finish() {
    for (const auto& t : vm_)
      if (t->kind == Transfer::kDma) throw Hazard{"lds-write-at-end", "a transfer into LDS is still in flight when the wave ends"};
    wait(0, 0);
  }
  // Lets operations take effect as memory may at any time: in any order as long as no two of them meet at an address.
  void drift(std::mt19937& random) {
    for (auto* q : {&vm_, &lgkm_})
      for (size_t i = 0; i < q->size(); ++i) {
        Transfer& t = *(*q)[i];
        if (t.applied || random() % 8) continue;
        bool free = true;
        for (size_t j = 0; j < i; ++j) free = free && ((*q)[j]->applied || independent(*(*q)[j], t));
        if (free) apply(t);
      }
    memory_.jitter(random);
  }

  void cache(const Code& c) {
    const Scope scope = Scope(c.in->mod[kSc0] + 2 * c.in->mod[kSc1]);
    if (c.what == kInvalidate) return memory_.invalidate(scope);
    auto t = start(c, Transfer::kWriteback);
    t->scope = scope;
    push(vm_, std::move(t));
  }
  void smem(const Code& c) {
    const Inst& in = *c.in;
    auto t = start(c, Transfer::kScalar);
    w_.check(in.op[1], 2);
    t->addr[0] = w_.get64(in.op[1].index) + (in.op[2].kind == kNone ? 0 : w_.scalar(in.op[2], 'u')) + u64(i64(in.mod[kOffset]));
    t->addr[0] &= ~3ull, t->registers = c.what, t->dst = in.op[0];
    w_.check(t->dst, t->registers);
    w_.pend(t->dst, t->registers, 1);
    push(lgkm_, std::move(t));
  }

  // The clock: it counts the instructions that the machine has executed.
  void time(const Code& c, u64 now) {
    auto t = start(c, Transfer::kScalar);
    t->registers = c.what, t->dst = c.in->op[0];
    t->data[0][0] = u32(now), t->data[1][0] = u32(now >> 32);
    w_.check(t->dst, t->registers);
    w_.pend(t->dst, t->registers, 1);
    push(lgkm_, std::move(t));
  }

  void ds(const Code& c, Counters& count) {
    const Inst& in = *c.in;
    const DsOp& op = *c.ds;
    auto t = start(c, op.write ? Transfer::kDsWrite : Transfer::kDsRead);
    t->bytes = op.bytes, t->parts = op.parts;
    const int address = op.write ? 0 : 1;
    u64 base[kLanes];
    w_.fetch(in, in.op[address], 0, 'u', base, false);
    for (int l = 0; l < kLanes; ++l) {
      t->addr[l] = base[l] + u64(op.parts == 2 ? in.mod[kOffset0] * op.stride : in.mod[kOffset]);
      t->addr2[l] = base[l] + u64(in.mod[kOffset1] * op.stride);
      if (t->exec >> l & 1)
        for (int p = 0; p < op.parts; ++p)
          if (piece(*t, p, l) + u64(op.bytes) > lds_.size())
            throw Hazard{"out-of-range", "LDS address " + std::to_string(piece(*t, p, l)) + " of " + std::to_string(lds_.size())};
    }
    t->registers = op.parts * std::max(1, op.bytes / 4);
    if (op.write) {
      for (int p = 0; p < op.parts; ++p) capture(*t, in.op[1 + p], std::max(1, op.bytes / 4), 2 * p, op.fill);
    } else {
      t->dst = in.op[0];
      if (op.fill >= kLow) w_.check(t->dst, t->registers);
      reserve(*t, lgkm_);
    }
    count.ds_accesses += 1;
    for (int p = 0; p < op.parts; ++p) count.conflict_cycles += conflicts(*t, p, op.write);
    each_byte(*t, [&](u32 a) { op.write ? lds_.begin_write(a, id_, epoch, Lds::kDs) : lds_.begin_read(a, id_, epoch); });
    push(lgkm_, std::move(t));
  }

  void permute(const Code& c) {  // goes through the LDS hardware, not through its memory
    auto t = start(c, Transfer::kRegister);
    w_.permute(c, t->data[0]);
    t->dst = c.in->op[0], t->registers = 1;
    reserve(*t, lgkm_);
    push(lgkm_, std::move(t));
  }

  void vmem(const Code& c) {
    const Inst& in = *c.in;
    const bool dma = c.mem && (c.mem->access == kLoadLds || in.mod[kLds]);
    const bool store = c.mem && c.mem->access == kStore, returns = c.atomic && in.mod[kSc0];
    const bool loads = c.mem && !store && !dma;
    auto t = start(c, dma ? Transfer::kDma : store ? Transfer::kWrite : c.atomic ? Transfer::kRmw : Transfer::kVector);
    t->bytes = c.mem ? c.mem->bytes : c.atomic->bytes;
    t->scope = c.atomic ? (in.mod[kSc1] ? kSystemScope : kAgentScope) : Scope(in.mod[kSc0] + 2 * in.mod[kSc1]);
    const bool swap_pair = c.atomic && !std::strncmp(c.atomic->name, "cmpswap", 7);
    t->registers = std::max(1, t->bytes / 4);
    // Where the operands stand: buffer_* [data] address resource soffset; others [result] address [data] base.
    int i = loads || returns ? 1 : 0, data = -1;
    if (c.space == kBuffer) {
      if (!loads && !dma) data = 0, i = 1;
    } else if (store || c.atomic) {
      data = i + 1;
    }
    if (loads || returns) t->dst = in.op[0];
    if (data >= 0) capture(*t, in.op[data], swap_pair ? 2 * t->registers : t->registers, 0, c.mem ? c.mem->fill : kZero);
    const int base = c.space == kBuffer ? i + 1 : i + (store || c.atomic ? 2 : 1);
    addresses(c, *t, in.op[i], in.op[base], in.op[std::min(base + 1, 5)]);
    if (dma) {
      const u32 m0 = w_.s[kM0] + u32(in.mod[kOffset]);
      for (int l = 0; l < kLanes; ++l) t->lds[l] = m0 + u32(l * t->bytes);
      for (int l = 0; l < kLanes; ++l)
        if ((t->exec >> l & 1) && t->lds[l] + u32(t->bytes) > lds_.size())
          throw Hazard{"out-of-range",
                       "a transfer to LDS address " + std::to_string(t->lds[l]) + " of " + std::to_string(lds_.size())};
      each_byte(*t, [&](u32 a) { lds_.begin_write(a, id_, epoch, Lds::kDma); });
    }
    if (loads || returns) {
      if (c.mem && c.mem->fill >= kLow) w_.check(t->dst, t->registers);
      reserve(*t, vm_);
    }
    if (c.space == kFlat) push(lgkm_, start(c, Transfer::kNothing));
    push(vm_, std::move(t));
  }

 private:
  using Queue = std::deque<std::unique_ptr<Transfer>>;

  std::unique_ptr<Transfer> start(const Code& c, Transfer::Kind kind) {
    auto t = std::make_unique<Transfer>();
    t->kind = kind, t->code = &c, t->exec = w_.exec();
    return t;
  }
  // Whether the later of two operations of one queue may overtake the earlier: only plain accesses to different addresses.
  static bool independent(const Transfer& a, const Transfer& b) {
    const auto plain = [](const Transfer& t) {
      return t.kind == Transfer::kVector || t.kind == Transfer::kDma || t.kind == Transfer::kWrite;
    };
    if (a.kind == Transfer::kScalar && b.kind == Transfer::kScalar) return true;
    if (!plain(a) || !plain(b) || a.code->space == kScratch || b.code->space == kScratch) return false;
    if (a.kind == Transfer::kDma && b.kind == Transfer::kDma && a.lds[0] == b.lds[0]) return false;
    if (a.dst.kind != kNone && b.dst.kind != kNone) return false;  // loads into registers come back in order
    const auto [a0, a1] = extent(a);
    const auto [b0, b1] = extent(b);
    return a1 <= b0 || b1 <= a0 || (a.kind != Transfer::kWrite && b.kind != Transfer::kWrite);
  }
  static std::pair<u64, u64> extent(const Transfer& t) {
    u64 low = ~0ull, high = 0;
    for (int l = 0; l < kLanes; ++l)
      if (t.exec >> l & 1) low = std::min(low, t.addr[l]), high = std::max(high, t.addr[l] + u64(t.bytes));
    return {low, high};
  }
  void push(Queue& q, std::unique_ptr<Transfer> t) {
    if (policy_.retire == Policy::kEarly) apply(*t);
    q.push_back(std::move(t));
  }
  // A later load of the same queue may target a register that an earlier one still fills: they come back in order.
  void reserve(Transfer& t, const Queue& same) {
    for (int r = 0; r < t.registers; ++r) {
      bool own = false;
      for (const auto& o : same)
        own = own || (o->dst.kind == t.dst.kind && o->registers && t.dst.index + r >= o->dst.index &&
                      t.dst.index + r < o->dst.index + o->registers);
      Operand one = t.dst;
      one.index += r;
      if (!own) w_.check(one, 1);
    }
    w_.pend(t.dst, t.registers, 1);
  }
  void capture(Transfer& t, const Operand& from, int registers, int at, Fill fill) {
    w_.check(from, registers);
    for (int r = 0; r < registers; ++r)
      for (int l = 0; l < kLanes; ++l) t.data[at + r][l] = w_.v[from.index + r][l] >> (fill == kHigh ? 16 : 0);
  }

  void addresses(const Code& c, Transfer& t, const Operand& address, const Operand& base, const Operand& soffset) {
    const Inst& in = *c.in;
    u64 offset[kLanes] = {};
    const bool wide = c.space == kFlat || (c.space == kGlobal && base.kind == kNone);
    if (address.kind != kNone && (c.space != kBuffer || in.mod[kOffen])) w_.fetch(in, address, 0, wide ? 'q' : 'u', offset, false);
    if (in.mod[kIdxen]) throw Hazard{"unsupported", "idxen buffer addressing"};
    std::memset(t.in_range, 0xff, sizeof t.in_range);
    u64 origin = u64(i64(in.mod[kOffset]));
    if (c.space == kBuffer) {
      w_.check(base, 4);
      const u64 start = w_.get64(base.index) & 0xffffffffffffull, records = w_.s[base.index + 2], so = w_.scalar(soffset, 'u');
      if (w_.s[base.index + 1] >> 16) throw Hazard{"unsupported", "a buffer descriptor with a stride or swizzle"};
      // A dword that straddles the end is out of range when soffset is checked (the strict reading) and in range otherwise.
      const u64 limit = policy_.soffset_checked ? (records > so ? records - so : 0) : records;
      for (int l = 0; l < kLanes; ++l) {
        const u64 first = (offset[l] + origin) & 0xffffffff;
        t.in_range[l] = 0;
        for (int d = 0; 4 * d < t.bytes; ++d) {
          const u64 last = first + 4 * u64(d) + (policy_.soffset_checked ? u64(std::min(4, t.bytes)) : 1);
          t.in_range[l] |= u8((last <= limit) << d);
        }
        t.addr[l] = start + first + so;
      }
      return;
    }
    if (base.kind == kSgpr) origin += c.space == kScratch ? w_.scalar(base, 'u') : w_.scalar(base, 'q');
    for (int l = 0; l < kLanes; ++l) t.addr[l] = offset[l] + origin;
  }

  static u64 piece(const Transfer& t, int part, int lane) { return part ? t.addr2[lane] : t.addr[lane]; }
  template <class F>
  void each_byte(const Transfer& t, F f) {
    for (int l = 0; l < kLanes; ++l) {
      if (!(t.exec >> l & 1)) continue;
      for (int p = 0; p < t.parts; ++p) {
        const u32 a = t.kind == Transfer::kDma ? t.lds[l] : u32(piece(t, p, l));
        for (int i = 0; i < t.bytes; ++i) f(a + u32(i));
      }
    }
  }
  u64 conflicts(const Transfer& t, int part, bool write) const {
    const Phases p = lds_phases(t.bytes, write);
    u64 extra = 0;
    for (int phase = 0; phase < p.count; ++phase) {
      u64 seen[64][kLanes];
      int used[64] = {}, most = 1;
      for (int l = 0; l < kLanes; ++l) {
        if (p.phase[l] != phase || !(t.exec >> l & 1)) continue;
        for (u64 d = piece(t, part, l) / 4; d <= (piece(t, part, l) + u64(t.bytes) - 1) / 4; ++d) {
          const int bank = int(d % u64(p.banks));
          if (std::find(seen[bank], seen[bank] + used[bank], d) != seen[bank] + used[bank]) continue;
          seen[bank][used[bank]++] = d;
          most = std::max(most, used[bank]);
        }
      }
      extra += u64(most - 1);
    }
    return extra;
  }

  void complete(Queue& q, Queue::iterator it) {
    Transfer& t = **it;
    if (!t.applied) apply(t);
    if (t.registers && t.dst.kind != kNone) w_.pend(t.dst, t.registers, -1);
    if (t.kind == Transfer::kDma || t.kind == Transfer::kDsWrite) each_byte(t, [&](u32 a) { lds_.end_write(a, epoch); });
    if (t.kind == Transfer::kDsRead) each_byte(t, [&](u32 a) { lds_.end_read(a, id_, epoch); });
    q.erase(it);
  }

  void apply(Transfer& t) {
    t.applied = true;
    if (t.kind == Transfer::kNothing) return;
    if (t.kind == Transfer::kWriteback) return memory_.writeback(t.scope);
    if (t.code->cls == kClassTime) return w_.s[t.dst.index] = t.data[0][0], void(w_.s[t.dst.index + 1] = t.data[1][0]);
    if (t.kind == Transfer::kScalar)
      return memory_.read(t.addr[0], 4 * t.registers, reinterpret_cast<u8*>(&w_.s[t.dst.index]), kWaveScope);
    for (int l = 0; l < kLanes; ++l) {
      if (!(t.exec >> l & 1)) continue;
      u8 bytes[32] = {};
      switch (t.kind) {
        case Transfer::kVector: get(t, l, bytes), set_registers(t, l, bytes, t.code->mem->fill, t.bytes, 0); break;
        case Transfer::kDma: get(t, l, bytes), std::memcpy(lds_.at(t.lds[l]), bytes, size_t(t.bytes)); break;
        case Transfer::kWrite: gather(t, l, 0, t.bytes, bytes), put(t, l, bytes); break;
        case Transfer::kRmw: {
          u64 operand[2] = {}, now = 0;
          gather(t, l, 0, 16, reinterpret_cast<u8*>(operand));
          get(t, l, reinterpret_cast<u8*>(&now));
          if (t.bytes == 4 && std::strncmp(t.code->atomic->name, "cmpswap", 7)) operand[0] &= 0xffffffff;
          const u64 next = t.code->atomic->run(now, operand[0]);
          put(t, l, reinterpret_cast<const u8*>(&next));
          if (t.dst.kind != kNone) set_registers(t, l, reinterpret_cast<const u8*>(&now), kZero, t.bytes, 0);
          break;
        }
        case Transfer::kRegister: w_.v[t.dst.index][l] = t.data[0][l]; break;
        case Transfer::kDsRead:
          for (int p = 0; p < t.parts; ++p)
            set_registers(t, l, lds_.at(u32(piece(t, p, l))), t.code->ds->fill, t.bytes, p * std::max(1, t.bytes / 4));
          break;
        case Transfer::kDsWrite:
          for (int p = 0; p < t.parts; ++p)
            gather(t, l, 2 * p, t.bytes, bytes), std::memcpy(lds_.at(u32(piece(t, p, l))), bytes, size_t(t.bytes));
          break;
        default: break;
      }
    }
  }

  u8* private_bytes(u64 a, int lane, int n) {
    if (a + u64(n) > scratch_bytes_)
      throw Hazard{"out-of-range", "scratch address " + std::to_string(a) + " of " + std::to_string(scratch_bytes_)};
    return &scratch_[size_t(lane) * scratch_bytes_ + a];
  }
  void get(const Transfer& t, int l, u8* out) {
    if (t.code->space == kScratch) return void(std::memcpy(out, private_bytes(t.addr[l], l, t.bytes), size_t(t.bytes)));
    for (int d = 0; 4 * d < t.bytes; ++d)
      if (t.in_range[l] >> d & 1) memory_.read(t.addr[l] + u64(4 * d), std::min(4, t.bytes), out + 4 * d, t.scope);
  }
  void put(const Transfer& t, int l, const u8* bytes) {
    if (t.code->space == kScratch) return void(std::memcpy(private_bytes(t.addr[l], l, t.bytes), bytes, size_t(t.bytes)));
    for (int d = 0; 4 * d < t.bytes; ++d)
      if (t.in_range[l] >> d & 1) memory_.write(t.addr[l] + u64(4 * d), std::min(4, t.bytes), bytes + 4 * d, t.scope);
  }
  static void gather(const Transfer& t, int l, int at, int n, u8* out) {
    for (int r = 0; 4 * r < n; ++r) std::memcpy(out + 4 * r, &t.data[at + r][l], size_t(std::min(4, n - 4 * r)));
  }
  void set_registers(const Transfer& t, int l, const u8* bytes, Fill fill, int n, int at) {
    u32* const first = &w_.v[t.dst.index + at][l];
    u32 x = 0;
    std::memcpy(&x, bytes, size_t(std::min(n, 4)));
    if (fill == kSign || fill == kSignLow || fill == kSignHigh) x = n == 1 ? u32(i32(int8_t(x))) : u32(i32(int16_t(x)));
    if (fill == kLow || fill == kSignLow) x = (*first & 0xffff0000) | (x & 0xffff);
    if (fill == kHigh || fill == kSignHigh) x = (*first & 0xffff) | x << 16;
    *first = x;
    for (int r = 1; 4 * r < n; ++r) std::memcpy(&w_.v[t.dst.index + at + r][l], bytes + 4 * r, 4);
  }

  Wave& w_;
  Lds& lds_;
  Path& memory_;
  const Policy& policy_;
  int id_;
  Queue vm_, lgkm_;
  std::vector<u8> scratch_;
  u32 scratch_bytes_;
};

}  // namespace gfx950
