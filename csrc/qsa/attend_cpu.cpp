// Flash attention over lists of cells, on the CPU.
//
// For one KV head and a block of tokens whose selections are prefixes of one list (a lone token, or the causal start of a prompt
// where token t selects cells 0..t): walk the list in chunks of kChunk cells; decode K to fp32 panels, score every row of the block
// (tokens x Hq/Hkv rows share each decoded cell), softmax the chunk by itself, multiply with decoded V panels, and fold the chunk
// into the row's running (max, sum, acc). Empty slots are dropped before, so they are exactly neutral.
// Each q row is scaled by a power of two to max |q| in [0.5, 1) and the factor returns inside the exponent: no q overflows.
// Bound by FMA throughput; decoding costs about a quarter of it at 12 rows and little at 96.
#include "attend_cpu.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>

#include "../common/route.h"

namespace mori::qsa {
namespace {

constexpr int64_t kBlockRows = 96;     // rows of a block: 8 tokens of 12 heads; q, acc, total and scores then fill 350 KB of L2 at D 256
constexpr int64_t kSplitItems = 16;    // up to so many (token, KV head) pairs, threads share the chunks of one token

enum FlashRoute : size_t { kByChunks, kByTokens };
const Route kRoutes[] = {
    {"chunks", [](const RouteDims& d) { return d[0] * d[4] <= kSplitItems; },
     "few tokens: threads take chunks of 128 cells of one token, folded in the order of the list (the same bits as 'tokens')"},
    {"tokens", [](const RouteDims&) { return true; },
     "threads take blocks of tokens; up to 96 rows share a decoded cell when the tokens' cells are prefixes of one list"},
};
const RegisterRoutes kRegistered("qsa_flash", "cpu", kRoutes);

constexpr float kLowest = -std::numeric_limits<float>::infinity();

// ---- reading ids -----------------------------------------------------------------------------------------------------

struct RowScan {
  int64_t count = 0;   // ids >= 0
  int64_t used = 0;    // slots up to the last id >= 0; equal to count when no empty slot stands before it
  bool bad = false;    // an id >= cells
};

template <class Id>
RowScan scan_row(const Id* ids, int64_t n, int64_t cells) {
  RowScan row;
  for (int64_t s = 0; s < n; ++s) {
    row.count += ids[s] >= 0;
    row.bad |= ids[s] >= cells;
  }
  row.used = n;
  while (row.used > 0 && ids[row.used - 1] < 0) --row.used;
  return row;
}

template <class Id>
int64_t compact_row(const Id* ids, int64_t n, int64_t* list) {
  int64_t count = 0;
  for (int64_t s = 0; s < n; ++s)
    if (ids[s] >= 0) list[count++] = ids[s];
  return count;
}

// Calls f with the ids of token 0 as their own type.
template <class F>
auto with_ids(const Tensor& ids, const F& f) {
  if (ids.scalar_type() == ScalarType::Int) return f(static_cast<const int32_t*>(ids.const_data_ptr()));
  return f(static_cast<const int64_t*>(ids.const_data_ptr()));
}

template <class Id>
[[noreturn]] void fail_bad_id(const char* op, const Id* row, int64_t token, int64_t begin, int64_t cells) {
  int64_t s = begin;
  while (row[s] < cells) ++s;
  fail<std::out_of_range>(op, ": ids[", token, ", ", s, "] is ", row[s], ", but k holds ", cells, " cells");
}

// The cells of one token within the plan's slots.
int64_t compact(const Inputs& in, const Plan& plan, int64_t token, int64_t* list) {
  return with_ids(in.ids, [&](auto* ids) { return compact_row(ids + token * in.shape.slots + plan.begin, plan.end - plan.begin, list); });
}

// ---- one chunk of cells for one block of tokens ----------------------------------------------------------------------

// Buffers of one thread.
struct Scratch {
  std::vector<float> q, acc, total, scores, k_panel, v_panel, k_scale, v_scale, factor, chunk_max, chunk_sum, max, sum;
  std::vector<const char*> k_cells, v_cells;
  std::vector<int64_t> list, counts;

  Scratch(int64_t rows, int64_t tokens, int64_t dim, int64_t slots)
      : q(rows * dim), acc(rows * dim), total(rows * dim), scores(rows * kChunk), k_panel(dim * kPanel), v_panel(kChunk * kPanel),
        k_scale(kChunk * kMaxGroups), v_scale(kChunk * kMaxGroups), factor(rows), chunk_max(rows), chunk_sum(rows), max(rows), sum(rows),
        k_cells(kChunk), v_cells(kChunk), list(slots), counts(tokens) {}
};

// Calls f(first row, rows) for tiles of nearly equal height over rows [begin, end).
template <class F>
void for_tiles(int64_t begin, int64_t end, const F& f) {
  const int64_t rows = end - begin, tiles = ceil_div(rows, kTileRows);
  for (int64_t i = 0; i < tiles; ++i) f(begin + rows * i / tiles, rows * (i + 1) / tiles - rows * i / tiles);
}

class Engine {
 public:
  Engine(const Inputs& in, const Micro& micro)
      : in_(in), micro_(micro), group_(in.shape.q_heads / in.shape.kv_heads), dim_(in.shape.dim) {}

  int64_t group() const { return group_; }

  // q of the tokens [begin, end) that share `kv_head`: row r = token * group + head, scaled to max |q| in [0.5, 1).
  void load_q(int64_t begin, int64_t end, int64_t kv_head, Scratch& w) const {
    for (int64_t row = 0; row < (end - begin) * group_; ++row) {
      float* q = w.q.data() + row * dim_;
      micro_.load(in_.q.at(begin + row / group_, kv_head * group_ + row % group_), in_.q.dtype(), dim_, q);
      const float top = micro_.largest(q, dim_);
      int exponent = 0;
      if (std::isfinite(top)) std::frexp(top, &exponent);
      // Two factors: 2^149 is no fp32 number.
      const float half = std::ldexp(in_.shape.sm_scale < 0 ? -1.0f : 1.0f, -exponent / 2), rest = std::ldexp(1.0f, -exponent - (-exponent / 2));
      for (int64_t d = 0; d < dim_; ++d) q[d] = q[d] * half * rest;
      const double factor = std::ldexp(std::abs(in_.shape.sm_scale), exponent);
      w.factor[row] = static_cast<float>(std::min<double>(factor, std::numeric_limits<float>::max()));
    }
  }

  // The first n cells of `list` (which holds `listed`) for `tokens` tokens, of which token t uses the first counts[t], not decreasing
  // in t. Leaves chunk_max, chunk_sum and acc of every row with a cell; gives the first such row.
  int64_t chunk(const int64_t* list, int64_t n, int64_t listed, int64_t kv_head, int64_t tokens, const int64_t* counts, Scratch& w) const {
    const int64_t rows = tokens * group_;
    const auto first_row_beyond = [&](int64_t cells) { return (std::upper_bound(counts, counts + tokens, cells) - counts) * group_; };
    for (int64_t c = 0; c < n; c += kPanel) {
      gather(list, c, n, kv_head, w);
      prefetch_v(list, c, std::min(c + kPanel, n), kv_head);
      prefetch_k(list, c + kPanel, std::min(c + 2 * kPanel, n), kv_head);
      micro_.k_panel(w.k_cells.data() + c, w.k_scale.data() + c * kMaxGroups, dim_, w.k_panel.data());
      for_tiles(first_row_beyond(c), rows, [&](int64_t row, int64_t height) {
        micro_.scores(height, w.q.data() + row * dim_, dim_, w.k_panel.data(), w.scores.data() + row * kChunk + c);
      });
    }
    const int64_t first = first_row_beyond(0);
    for (int64_t row = first; row < rows; ++row)
      micro_.softmax(w.scores.data() + row * kChunk, counts[row / group_], w.factor[row], &w.chunk_max[row], &w.chunk_sum[row]);
    for (int64_t d = 0; d < dim_; d += kPanel) {
      const int64_t share = kChunk * kPanel / dim_, ahead = n + d / kPanel * share;
      prefetch_k(list, ahead, std::min(ahead + share, listed), kv_head);
      micro_.v_panel(w.v_cells.data(), w.v_scale.data(), n, d, w.v_panel.data());
      for_tiles(first, rows, [&](int64_t row, int64_t height) {
        // Cells that every row of the tile uses, then each row's own: a cell that a row did not select must not touch it (it may hold NaN).
        const int64_t shared = counts[row / group_];
        const float* p = w.scores.data() + row * kChunk;
        float* acc = w.acc.data() + row * dim_ + d;
        micro_.values(height, p, shared, w.v_panel.data(), acc, dim_, false);
        for (int64_t r = 0; r < height; ++r) {
          const int64_t own = counts[(row + r) / group_] - shared;
          if (own > 0) micro_.values(1, p + r * kChunk + shared, own, w.v_panel.data() + shared * kPanel, acc + r * dim_, dim_, true);
        }
      });
    }
    return first;
  }

  // Adds a chunk's (max, sum, acc) to a row's running ones.
  void fold(float& max, float& sum, float* total, float chunk_max, float chunk_sum, const float* acc, float factor) const {
    if (max == kLowest && sum == 0) {
      max = chunk_max;
      sum = chunk_sum;
      std::copy(acc, acc + dim_, total);
      return;
    }
    const float top = chunk_max > max ? chunk_max : max;
    const float a = std::exp((max - top) * factor), b = std::exp((chunk_max - top) * factor);
    max = top;
    sum = sum * a + chunk_sum * b;
    micro_.fold(total, acc, a, b, dim_);
  }

  void emit(const RowSink& sink, int64_t token, int64_t head, float max, float sum, float factor, float* total) const {
    const double lse = static_cast<double>(max) * factor + std::log(static_cast<double>(sum));
    sink(token, head, total, sum, sum == 0 ? kLowest : static_cast<float>(lse));
  }

 private:
  // Addresses and scales of the cells of the panel at c. A partial last panel repeats the last cell: nobody reads its extra scores.
  void gather(const int64_t* list, int64_t begin, int64_t n, int64_t kv_head, Scratch& w) const {
    for (int64_t c = begin; c < begin + kPanel; ++c) {
      const int64_t cell = list[std::min(c, n - 1)];
      w.k_cells[c] = in_.k.at(cell, kv_head);
      w.v_cells[c] = in_.v.at(cell, kv_head);
      if (!in_.shape.int8_kv) continue;
      micro_.load_scales(in_.k_scale->at(cell, kv_head), dim_ / kScaleGroup, w.k_scale.data() + c * kMaxGroups);
      micro_.load_scales(in_.v_scale->at(cell, kv_head), dim_ / kScaleGroup, w.v_scale.data() + c * kMaxGroups);
    }
  }

  // Selected cells lie anywhere in memory, so their rows are asked for early, a few at a time between the products: V of the chunk
  // while its scores are computed, K and the scales of the next chunk while this one meets V.
  void prefetch_k(const int64_t* list, int64_t begin, int64_t end, int64_t kv_head) const {
    for (int64_t c = begin; c < end; ++c) {
      prefetch(in_.k.at(list[c], kv_head), row_bytes());
      if (!in_.shape.int8_kv) continue;
      prefetch(in_.k_scale->at(list[c], kv_head), 1);
      prefetch(in_.v_scale->at(list[c], kv_head), 1);
    }
  }

  void prefetch_v(const int64_t* list, int64_t begin, int64_t end, int64_t kv_head) const {
    for (int64_t c = begin; c < end; ++c) prefetch(in_.v.at(list[c], kv_head), row_bytes());
  }

  int64_t row_bytes() const { return in_.shape.int8_kv ? dim_ : 2 * dim_; }

  const Inputs& in_;
  const Micro& micro_;
  const int64_t group_, dim_;
};

// Runs work(thread, item) for every item; threads take the next item when they are free, so the order may vary but no result does.
template <class F>
void for_items(int64_t items, int64_t threads, const F& work) {
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t) {
    for (int64_t item; (item = next.fetch_add(1)) < items;) work(begin, item);
  });
}

std::vector<Scratch> make_scratch(int64_t threads, int64_t rows, int64_t tokens, const AttnShape& s) {
  std::vector<Scratch> scratch;
  scratch.reserve(threads);
  for (int64_t i = 0; i < threads; ++i) scratch.emplace_back(rows, tokens, s.dim, s.slots);
  return scratch;
}

// ---- the two ways to share the work ----------------------------------------------------------------------------------

void attend_by_tokens(const Inputs& in, const Plan& plan, const Micro& micro, const RowSink& sink) {
  const AttnShape& s = in.shape;
  const Engine engine(in, micro);
  int64_t longest = 0;
  for (const Plan::Block& block : plan.blocks) longest = std::max(longest, block.end - block.begin);
  const int64_t items = static_cast<int64_t>(plan.blocks.size()) * s.kv_heads, group = engine.group();
  const int64_t threads = std::min<int64_t>(torch::stable::get_num_threads(), items);
  std::vector<Scratch> scratch = make_scratch(threads, longest * group, longest, s);
  for_items(items, threads, [&](int64_t thread, int64_t item) {
    Scratch& w = scratch[thread];
    const int64_t kv_head = item % s.kv_heads;
    // The last blocks first: in a causal prompt they are the longest.
    const Plan::Block block = plan.blocks[plan.blocks.size() - 1 - item / s.kv_heads];
    const int64_t tokens = block.end - block.begin, rows = tokens * group;
    engine.load_q(block.begin, block.end, kv_head, w);
    std::fill_n(w.max.data(), rows, kLowest);
    std::fill_n(w.sum.data(), rows, 0.0f);
    const int64_t count = compact(in, plan, block.end - 1, w.list.data());
    for (int64_t c = 0; c < count; c += kChunk) {
      const int64_t n = std::min(kChunk, count - c);
      for (int64_t t = 0; t < tokens; ++t) w.counts[t] = std::clamp<int64_t>(plan.counts[block.begin + t] - c, 0, n);
      for (int64_t row = engine.chunk(w.list.data() + c, n, count - c, kv_head, tokens, w.counts.data(), w); row < rows; ++row)
        engine.fold(w.max[row], w.sum[row], w.total.data() + row * s.dim, w.chunk_max[row], w.chunk_sum[row], w.acc.data() + row * s.dim,
                    w.factor[row]);
    }
    for (int64_t row = 0; row < rows; ++row)
      engine.emit(sink, block.begin + row / group, kv_head * group + row % group, w.max[row], w.sum[row], w.factor[row],
                  w.total.data() + row * s.dim);
  });
}

void attend_by_chunks(const Inputs& in, const Plan& plan, const Micro& micro, const RowSink& sink) {
  const AttnShape& s = in.shape;
  const Engine engine(in, micro);
  const int64_t group = engine.group();
  struct Item {
    int64_t token, kv_head, cell, n, listed;
  };
  std::vector<int64_t> lists(s.tokens * s.slots);
  std::vector<Item> items;
  for (int64_t token = 0; token < s.tokens; ++token) {
    const int64_t count = compact(in, plan, token, lists.data() + token * s.slots);
    for (int64_t kv_head = 0; kv_head < s.kv_heads; ++kv_head)
      for (int64_t c = 0; c < count; c += kChunk) items.push_back({token, kv_head, c, std::min(kChunk, count - c), count - c});
  }
  const int64_t threads = std::max<int64_t>(1, std::min<int64_t>(torch::stable::get_num_threads(), items.size()));
  std::vector<Scratch> scratch = make_scratch(threads, group, 1, s);
  const int64_t rows = static_cast<int64_t>(items.size()) * group;
  std::vector<float> acc(rows * s.dim), max(rows), sum(rows);
  for_items(items.size(), threads, [&](int64_t thread, int64_t i) {
    Scratch& w = scratch[thread];
    const Item& item = items[i];
    engine.load_q(item.token, item.token + 1, item.kv_head, w);
    engine.chunk(lists.data() + item.token * s.slots + item.cell, item.n, item.listed, item.kv_head, 1, &item.n, w);
    std::copy_n(w.acc.data(), group * s.dim, acc.data() + i * group * s.dim);
    std::copy_n(w.chunk_max.data(), group, max.data() + i * group);
    std::copy_n(w.chunk_sum.data(), group, sum.data() + i * group);
  });
  Scratch& w = scratch[0];
  size_t i = 0;
  for (int64_t token = 0; token < s.tokens; ++token)
    for (int64_t kv_head = 0; kv_head < s.kv_heads; ++kv_head) {
      engine.load_q(token, token + 1, kv_head, w);
      std::fill_n(w.max.data(), group, kLowest);
      std::fill_n(w.sum.data(), group, 0.0f);
      for (; i < items.size() && items[i].token == token && items[i].kv_head == kv_head; ++i)
        for (int64_t r = 0, row = i * group; r < group; ++r, ++row)
          engine.fold(w.max[r], w.sum[r], w.total.data() + r * s.dim, max[row], sum[row], acc.data() + row * s.dim, w.factor[r]);
      for (int64_t r = 0; r < group; ++r)
        engine.emit(sink, token, kv_head * group + r, w.max[r], w.sum[r], w.factor[r], w.total.data() + r * s.dim);
    }
}

}  // namespace

Rows::Rows(const Tensor& t)
    : tensor_(t.stride(2) == 1 ? t : torch::stable::contiguous(t)), data_(static_cast<const char*>(tensor_.const_data_ptr())),
      stride_(tensor_.stride(0) * tensor_.element_size()), head_stride_(tensor_.stride(1) * tensor_.element_size()) {}

Inputs::Inputs(const AttnTensors& t) : shape(t.shape), q(t.q), k(t.k), v(t.v), ids(dense(t.ids)) {
  if (t.k_scale) k_scale.emplace(*t.k_scale);
  if (t.v_scale) v_scale.emplace(*t.v_scale);
}

Plan make_plan(const char* op, const Inputs& in, int64_t begin, int64_t end) {
  const AttnShape& s = in.shape;
  Plan plan{begin, end, std::vector<int64_t>(s.tokens), {}};
  std::vector<RowScan> scans(s.tokens);
  std::vector<uint8_t> extends(s.tokens);  // the token's cells begin with those of the token before
  with_ids(in.ids, [&](auto* ids) {
    const int64_t grain = std::max<int64_t>(1, 65536 / std::max<int64_t>(1, end - begin));
    torch::stable::parallel_for(0, s.tokens, grain, [&](int64_t from, int64_t to) {
      for (int64_t t = from; t < to; ++t) scans[t] = scan_row(ids + t * s.slots + begin, end - begin, s.cells);
    });
    for (int64_t t = 0; t < s.tokens; ++t)
      if (scans[t].bad) fail_bad_id(op, ids + t * s.slots, t, begin, s.cells);
    torch::stable::parallel_for(1, s.tokens, grain, [&](int64_t from, int64_t to) {
      for (int64_t t = from; t < to; ++t) {
        const RowScan &last = scans[t - 1], &row = scans[t];
        const auto* slots = ids + t * s.slots + begin;
        extends[t] = last.count == last.used && row.count == row.used && last.count <= row.count &&
                     std::equal(slots, slots + last.count, slots - s.slots);
      }
    });
  });
  const int64_t longest = std::max<int64_t>(1, kBlockRows / (s.q_heads / s.kv_heads));
  for (int64_t t = 0; t < s.tokens; ++t) {
    plan.counts[t] = scans[t].count;
    if (extends[t] && plan.blocks.back().end - plan.blocks.back().begin < longest) ++plan.blocks.back().end;
    else plan.blocks.push_back({t, t + 1});
  }
  return plan;
}

void attend(const Inputs& in, const Plan& plan, const Micro& micro, const RowSink& sink) {
  const AttnShape& s = in.shape;
  if (s.tokens == 0 || s.q_heads == 0) return;
  const size_t route = pick_route(kRoutes, {s.tokens, s.slots, s.cells, s.q_heads, s.kv_heads, s.dim});
  if (route == kByChunks) attend_by_chunks(in, plan, micro, sink);
  else attend_by_tokens(in, plan, micro, sink);
}

}  // namespace mori::qsa
