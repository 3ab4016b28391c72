// One wave: registers and every instruction that touches nothing else. (Memory instructions: transfers.h.)
#pragma once
#include <random>

#include "code.h"

namespace gfx950 {

class Wave {
 public:
  u32 v[kVgprs][kLanes], s[kSgprs];
  bool scc = false;
  int pc = 0;

  Wave() {
    for (auto& r : v)
      for (u32& x : r) x = 0x7fc0dead;  // whatever was there before
    for (u32& x : s) x = 0xdeadbeef;
    set64(kExec, ~0ull);
  }

  u64 get64(int i) const { return s[i] | u64(s[i + 1]) << 32; }
  void set64(int i, u64 x) { s[i] = u32(x), s[i + 1] = u32(x >> 32); }
  u64 exec() const { return get64(kExec); }
  bool active(int lane) const { return exec() >> lane & 1; }

  // Registers with a load in flight.
  void pend(const Operand& o, int registers, int d) {
    for (int i = 0; i < registers; ++i) (o.kind == kVgpr ? pending_v_[o.index + i] : pending_s_[o.index + i]) += d;
  }
  void check(const Operand& o, int registers) const {
    if (o.kind != kVgpr && o.kind != kSgpr) return;
    for (int i = 0; i < registers; ++i)
      if ((o.kind == kVgpr ? pending_v_[o.index + i] : pending_s_[o.index + i]) != 0)
        throw Hazard{"register-in-flight", std::string("uses ") +
                                               (o.kind == kSgpr ? "s"
                                                : o.index < 256 ? "v"
                                                                : "a") +
                                               std::to_string((o.index + i) % 256) + " before the wait for its load"};
  }
  bool pending_v(int i) const { return pending_v_[i] != 0; }

  // A scalar source.
  u64 scalar(const Operand& o, char type) const {
    const bool wide = type == 'q' || type == 'd';
    if (o.kind == kSgpr) return check(o, wide ? 2 : 1), wide ? get64(o.index) : s[o.index];
    if (o.kind == kFloat)
      return wide ? o.value : type == 'h' || type == 's' ? to_f16(float(f64(o.value))) : bits(float(f64(o.value)));
    if (o.kind == kInt) return type == 'd' && i64(o.value) > 64 ? o.value << 32 : wide ? o.value : o.value & 0xffffffff;
    throw Hazard{"bad-operand", "a vector register where a scalar belongs"};
  }

  void salu(const Code& c) {
    const Inst& in = *c.in;
    const char* sig = c.alu->sig;
    Alu x{};
    x.carry = scc, x.flag = scc, x.in = &in;
    int i = 0;
    const char result = *sig != '=' ? *sig : 0;
    if (result) x.old = result == 'q' ? get64(in.op[0].index) : s[in.op[0].index], ++i;
    u64* src[3] = {&x.a, &x.b, &x.c};
    int n = 0;
    for (const char* t = std::strchr(sig, '=') + 1; *t; ++t) *src[n++] = scalar(in.op[i++], *t);
    c.alu->run(x);
    scc = x.flag;
    if (!result) return;
    check(in.op[0], result == 'q' ? 2 : 1);
    if (result == 'q') set64(in.op[0].index, x.r);
    else s[in.op[0].index] = u32(x.r);
  }

  void saveexec(const Code& c) {
    const u64 old = exec(), m = scalar(c.in->op[1], 'q');
    const u64 now = c.what == 0 ? m & old : c.what == 1 ? m | old : c.what == 2 ? m & ~old : m ^ old;
    check(c.in->op[0], 2);
    set64(c.in->op[0].index, old), set64(kExec, now), scc = now != 0;
  }

  bool taken(const Code& c) const {
    switch (c.what) {
      case kAlways: return true;
      case kScc0: return !scc;
      case kScc1: return scc;
      case kVccz: return get64(kVcc) == 0;
      case kVccnz: return get64(kVcc) != 0;
      case kExecz: return exec() == 0;
      default: return exec() != 0;
    }
  }

  void valu(const Code& c) {
    const Inst& in = *c.in;
    const char* equals = std::strchr(c.alu->sig, '=');
    const int results = int(equals - c.alu->sig), sources = int(std::strlen(equals + 1));
    u64 src[3][kLanes];
    u64 mask = exec(), carry = 0;
    for (int i = 0; i < sources; ++i) {
      const char type = equals[1 + i];
      // v_cndmask and the carries name their mask only in the long form; the short form means vcc.
      if (type == 'm') carry = results + i < in.mod[kOperands] ? scalar(in.op[results + i], 'q') : get64(kVcc);
      else fetch(in, in.op[results + i], i, type, src[i]);
    }
    if (in.mod[kDpp]) mask = dpp(in, src[0], mask);
    const char type = c.alu->sig[0];
    const bool mask_only = type == 'm', wide = type == 'q' || type == 'd';
    const Operand& d = in.op[0];
    if (!mask_only) check(d, wide ? 2 : 1);
    u64 flags = 0;
    for (int l = 0; l < kLanes; ++l) {
      if (!(mask >> l & 1)) continue;
      Alu x{src[0][l], src[1][l], src[2][l], mask_only ? 0 : v[d.index][l], 0, bool(carry >> l & 1), false, &in};
      c.alu->run(x);
      flags |= u64(x.flag) << l;
      if (mask_only) continue;
      if (type == 'f' && (in.mod[kClamp] || in.mod[kOmod])) x.r = bits(finish(in, f32(x.r)));
      if (in.mod[kSdwa]) x.r = place(in, x.r, x.old);
      v[d.index][l] = type == 'h' || type == 's' ? u32(x.r & 0xffff) : u32(x.r);
      if (wide) v[d.index + 1][l] = u32(x.r >> 32);
    }
    if (mask_only || results == 2) {
      const bool to_exec = std::string_view(c.alu->name).substr(0, 6) == "v_cmpx";
      check(in.op[results - 1], 2);
      set64(in.op[results - 1].index, flags);
      if (to_exec) set64(kExec, flags);
    }
  }

  void packed(const Code& c) {  // each half with the halves of the sources that op_sel (low) and op_sel_hi (high) name
    const Inst& in = *c.in;
    const char* equals = std::strchr(c.alu->sig, '=');
    const int sources = int(std::strlen(equals + 1));
    const bool pairs = c.alu->sig[0] == 'f';
    u32 out[2][kLanes];
    for (int h = 0; h < 2; ++h)
      for (int l = 0; l < kLanes; ++l) {
        Alu x{0, 0, 0, 0, 0, false, false, &in};
        u64* to[3] = {&x.a, &x.b, &x.c};
        for (int i = 0; i < sources; ++i) {
          const Operand& o = in.op[1 + i];
          const int sel = (h ? in.mod[kOpSelHi] : in.mod[kOpSel]) >> i & 1, neg = (h ? in.mod[kNegHi] : in.mod[kNegLo]) >> i & 1;
          if (o.kind == kVgpr || o.kind == kSgpr) check(o, pairs ? 2 : 1);
          const int index = o.index + (pairs ? sel : 0);
          u64 y = o.kind == kVgpr ? v[index][l] : o.kind == kSgpr ? s[index] : scalar(o, pairs ? 'f' : 'h');
          if (!pairs && o.kind != kInt && o.kind != kFloat) y = y >> (16 * sel) & 0xffff;
          *to[i] = neg ? y ^ (pairs ? 0x80000000 : 0x8000) : y;
        }
        c.alu->run(x);
        out[h][l] = u32(x.r);
      }
    const int d = in.op[0].index;
    check(in.op[0], pairs ? 2 : 1);
    for (int l = 0; l < kLanes; ++l) {
      if (!active(l)) continue;
      if (pairs) v[d][l] = out[0][l], v[d + 1][l] = out[1][l];
      else v[d][l] = u32(pk(out[0][l], out[1][l]));
    }
  }

  void matrix(const Code& c) {
    const Inst& in = *c.in;
    const MfmaOp& op = *c.mfma;
    double side[2][128][32];
    for (int i = 0; i < 2; ++i) {
      static const int kFormats[] = {kE4m3, kE5m2};
      const int format = op.element >= 0 ? op.element : in.mod[i ? kBlgp : kCbsz];
      if (op.element < 0 && format > 1) throw Hazard{"unsupported", "an f8f6f4 operand that is neither fp8 nor bf8"};
      u8 scales[kLanes];
      if (op.scaled) {
        const int byte = (in.mod[kOpSel] >> i & 1) + 2 * (in.mod[kOpSelHi] >> i & 1);
        u64 word[kLanes];
        fetch(in, in.op[4 + i], 0, 'u', word, false);
        for (int l = 0; l < kLanes; ++l) scales[l] = u8(word[l] >> (8 * byte));
      }
      check(in.op[1 + i], mfma_registers(op));
      mfma_operand(op, op.element >= 0 ? format : kFormats[format], &v[in.op[1 + i].index], op.scaled ? scales : nullptr, side[i]);
    }
    const int registers = op.size * op.size / kLanes;
    u32 acc[16][kLanes];
    for (int q = 0; q < registers; ++q)
      for (int l = 0; l < kLanes; ++l) acc[q][l] = in.op[3].kind == kVgpr ? v[in.op[3].index + q][l] : u32(scalar(in.op[3], 'f'));
    check(in.op[3], in.op[3].kind == kVgpr ? registers : 0);
    check(in.op[0], registers);
    mfma(op, side[0], side[1], acc, &v[in.op[0].index]);
  }

  void lanes(const Code& c) {
    const Inst& in = *c.in;
    u64 x[kLanes], y[kLanes];
    const Operand& d = in.op[0];
    check(d, 1);
    switch (c.what) {
      case kReadfirstlane:
        fetch(in, in.op[1], 0, 'u', x);
        s[d.index] = u32(x[exec() ? __builtin_ctzll(exec()) : 0]);
        break;
      case kReadlane:
        fetch(in, in.op[1], 0, 'u', x);
        s[d.index] = u32(x[scalar(in.op[2], 'u') & 63]);
        break;
      case kWritelane: v[d.index][scalar(in.op[2], 'u') & 63] = u32(scalar(in.op[1], 'u')); break;
      case kPermlane16Swap:  // odd rows of 16 of the first register trade places with the even rows of the second
      case kPermlane32Swap: {
        const int n = c.what == kPermlane16Swap ? 16 : 32;
        check(in.op[1], 1);
        for (int l = 0; l < kLanes; ++l)
          if (l / n % 2 && active(l) && active(l - n)) std::swap(v[d.index][l], v[in.op[1].index][l - n]);
        break;
      }
      default:
        fetch(in, in.op[1], 0, 'u', x), fetch(in, in.op[2], 1, 'u', y);
        for (int l = 0; l < kLanes; ++l)
          if (active(l)) {
            const u64 below =
                c.what == kMbcntLo ? (l < 32 ? (1ull << l) - 1 : 0xffffffffull) : (l < 32 ? 0 : (1ull << (l - 32)) - 1);
            v[d.index][l] = u32(__builtin_popcountll(x[l] & below) + y[l]);
          }
    }
  }

  // ds_bpermute pulls (from an inactive lane: 0), ds_permute pushes.
  void permute(const Code& c, u32* out) const {
    const Inst& in = *c.in;
    u64 x[kLanes], y[kLanes];
    fetch(in, in.op[1], 0, 'u', x), fetch(in, in.op[2], 1, 'u', y);
    std::fill(out, out + kLanes, 0);
    for (int l = 0; l < kLanes; ++l) {
      const u64 other = (x[l] + u64(in.mod[kOffset])) / 4 % kLanes;
      if (!active(l)) continue;
      if (c.what == kBpermute) out[l] = active(int(other)) ? u32(y[other]) : 0;
      else out[other] = u32(y[l]);
    }
  }

  // One vector source for all lanes. `i` is its position among the sources (for op_sel).
  void fetch(const Inst& in, const Operand& o, int i, char type, u64* out, bool modifiers = true) const {
    const bool wide = type == 'q' || type == 'd';
    if (o.kind != kVgpr) {
      const u64 x = scalar(o, type);
      for (int l = 0; l < kLanes; ++l) out[l] = x;
    } else {
      check(o, wide ? 2 : 1);
      for (int l = 0; l < kLanes; ++l) out[l] = wide ? v[o.index][l] | u64(v[o.index + 1][l]) << 32 : v[o.index][l];
    }
    if (!modifiers) return;
    if (in.mod[kSdwa] && o.sel != 6)
      for (int l = 0; l < kLanes; ++l) {
        const int width = o.sel < 4 ? 8 : 16, at = o.sel < 4 ? 8 * o.sel : 16 * (o.sel - 4);
        const u64 x = out[l] >> at & ((1ull << width) - 1);
        out[l] = o.mods & kSext ? u32(width == 8 ? i64(int8_t(x)) : s16(x)) : x;
      }
    if ((type == 'h' || type == 's') && in.mod[kOpSel] >> i & 1)
      for (int l = 0; l < kLanes; ++l) out[l] >>= 16;
    const u64 sign = wide ? 1ull << 63 : type == 'h' ? 0x8000 : 0x80000000;
    for (int l = 0; l < kLanes && o.mods; ++l) {
      if (o.mods & kAbs) out[l] &= ~sign;
      if (o.mods & kNeg) out[l] ^= sign;
    }
  }

 private:
  static float finish(const Inst& in, float x) {
    x *= in.mod[kOmod] == 1 ? 2.0f : in.mod[kOmod] == 2 ? 4.0f : in.mod[kOmod] == 3 ? 0.5f : 1.0f;
    return in.mod[kClamp] ? std::fmin(std::fmax(x, 0.0f), 1.0f) : x;
  }
  static u64 place(const Inst& in, u64 x, u64 old) {  // SDWA: dst_sel, dst_unused (0 pad, 1 sign, 2 preserve)
    const int sel = in.mod[kDstSel];
    if (sel == 6) return x;
    const int width = sel < 4 ? 8 : 16, at = sel < 4 ? 8 * sel : 16 * (sel - 4);
    const u64 field = ((1ull << width) - 1) << at;
    if (in.mod[kDstUnused] == 1) throw Hazard{"unsupported", "dst_unused:UNUSED_SEXT"};
    return (in.mod[kDstUnused] == 2 ? old & ~field : 0) | (x << at & field);
  }
  // Moves `x` between lanes; returns the lanes that are written.
  u64 dpp(const Inst& in, u64* x, u64 mask) const {
    u64 from[kLanes], out = 0;
    std::copy(x, x + kLanes, from);
    const int arg = in.mod[kDppArg];
    for (int l = 0; l < kLanes; ++l) {
      const int row = l & ~15, r = l & 15;
      int src = -1;
      switch (in.mod[kDpp]) {
        case kQuadPerm: src = (l & ~3) + (arg >> (2 * (l & 3)) & 3); break;
        case kRowShl: src = r + arg < 16 ? l + arg : -1; break;
        case kRowShr: src = r >= arg ? l - arg : -1; break;
        case kRowRor: src = row + ((r - arg) & 15); break;
        case kRowMirror: src = row + 15 - r; break;
        case kRowHalfMirror: src = (l & ~7) + 7 - (l & 7); break;
        case kRowBcast: src = arg == 15 ? (row ? row - 1 : -1) : (l >= 32 ? 31 : -1); break;
        case kRowNewbcast: src = row + arg; break;
        case kWaveShr: src = l - 1; break;
      }
      const bool enabled = in.mod[kRowMask] >> (l / 16) & in.mod[kBankMask] >> (l / 4 % 4) & 1;
      const bool valid = src >= 0 && active(src);
      x[l] = valid ? from[src] : 0;
      if (mask >> l & 1 && enabled && (valid || in.mod[kBoundCtrl])) out |= 1ull << l;
    }
    return out;
  }

  u16 pending_v_[kVgprs] = {}, pending_s_[kSgprs] = {};
};

}  // namespace gfx950
