// Host side of gemm_ar on P2P memory: the order of launches, and the table of algorithms for CUDA. mori_ops/symmetric.py owns the
// memory, the side stream and the agreement between ranks.
#include "gemm_ar_sm90.h"

#include <mutex>

#include "../common/cuda.h"
#include "../common/route.h"
#include "../mxfp8/gemm_sm90.h"

namespace mori::gemm_ar {
namespace {

using mxfp8::GemmArgs;
using mxfp8::GemmShape;
using mxfp8::Pair;
using mxfp8::Quant;

constexpr const char* kOp = "gemm_ar";

constexpr int kPairReservedFp8 = 12;  // processors for the steps between the copies, and to encode and decode
constexpr int kPairReserved = 4;      // the tiles of large shapes divide by 128 as well as by 132

// Thresholds: two H200s, N = 7168, bench/results/cuda_gemm_ar.json.
constexpr Route kRoutes[] = {
    {"plain", [](const RouteDims& d) { return d[0] == 1; }, "one rank: scaled_gemm"},
    {"one_shot", [](const RouteDims& d) { return d[1] * d[2] <= 4 * 1024 * 1024; }, "few rows: everyone pushes its partial sums to everyone"},
    {"pair", [](const RouteDims& d) { return d[0] == 2; }, "two ranks, MXFP8, bf16 out: the GEMM adds what copy engines have brought meanwhile; else spans"},
    {"spans", nullptr, "the GEMM writes spans of rows to their owners, who reduce them while it runs; everyone reads the sums"},
};
const RegisterRoutes kRegistered("gemm_ar", "cuda", kRoutes);

// `then` goes on behind what `first` holds now.
void order(cudaStream_t first, cudaStream_t then) {
  cudaEvent_t event = nullptr;
  cuda::check_launch(kOp, cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  cudaError_t error = cudaEventRecord(event, first);
  if (error == cudaSuccess) error = cudaStreamWaitEvent(then, event, 0);
  cudaEventDestroy(event);  // takes effect when it has been reached
  cuda::check_launch(kOp, error);
}

// Calls on one device follow each other, whatever their streams: two GEMMs that wait for other ranks could keep each other's copies and
// blocks off the processors. Not while a graph is captured, which knows only its own streams.
class Turn {
 public:
  explicit Turn(cudaStream_t stream) : lock_(mutex()), stream_(stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    cuda::check_launch(kOp, cudaStreamIsCapturing(stream, &status));
    int device = 0;
    cuda::check_launch(kOp, cudaGetDevice(&device));
    if (status != cudaStreamCaptureStatusNone || device >= kDevices) return;
    static cudaEvent_t last[kDevices] = {};
    if (last[device] == nullptr) {
      cuda::check_launch(kOp, cudaEventCreateWithFlags(&last[device], cudaEventDisableTiming));
    } else {
      cuda::check_launch(kOp, cudaStreamWaitEvent(stream, last[device], 0));
    }
    end_ = last[device];
  }
  ~Turn() {
    if (end_ != nullptr) cudaEventRecord(end_, stream_);
  }

 private:
  static constexpr int kDevices = 64;
  static std::mutex& mutex() {
    static std::mutex mutex;
    return mutex;
  }
  std::lock_guard<std::mutex> lock_;
  cudaStream_t stream_;
  cudaEvent_t end_ = nullptr;
};

// The operands, dense, and the GEMM of some of their rows.
class Product {
 public:
  Product(const GemmShape& shape, Quant quant, const Tensor& a, const Tensor& b, const Tensor& a_scale, const Tensor& b_scale, Float out_type)
      : shape_(shape), quant_(quant), a_(dense(a)), b_(dense(b)), a_scale_(dense(a_scale)), b_scale_(dense(b_scale)), out_type_(out_type) {}

  GemmArgs args() const {
    GemmArgs args = {};
    args.a = static_cast<const uint8_t*>(a_.const_data_ptr()), args.b = static_cast<const uint8_t*>(b_.const_data_ptr());
    args.a_scale = a_scale_.const_data_ptr(), args.b_scale = b_scale_.const_data_ptr();
    args.out_type = out_type_;
    args.m = shape_.m, args.n = shape_.n, args.k = shape_.k;
    return args;
  }

  // Rows [first, first + count) into `out`; `first` is a multiple of mxfp8::kPackRows.
  void multiply(int64_t first, int64_t count, void* out, int reserved_processors, cudaStream_t stream) const {
    GemmArgs part = args();
    part.a += first * shape_.k;
    part.m = count, part.out = out, part.reserved_processors = reserved_processors;
    Tensor packed = a_scale_;
    if (quant_ != Quant::mxfp8) {
      const int64_t columns = quant_ == Quant::ptpc ? 4 : quant_ == Quant::blockscale ? 4 * ceil_div(shape_.k, mxfp8::kBlockscale) : shape_.k / mxfp8::kBlock;
      part.a_scale = static_cast<const uint8_t*>(part.a_scale) + first * columns;
    } else if (count < shape_.m) {
      Tensor groups = torch::stable::view(a_scale_, {shape_.k / mxfp8::kBlock, ceil_div(shape_.m, mxfp8::kPackRows), mxfp8::kPackRows / 4});
      packed = dense(torch::stable::narrow(groups, 1, first / mxfp8::kPackRows, ceil_div(count, mxfp8::kPackRows)));
      part.a_scale = packed.const_data_ptr();
    }
    mxfp8::launch_scaled(part, quant_, a_, stream);
  }

  bool fits_pair() const { return mxfp8::pair_fits(args(), quant_); }
  void add_pair(const Pair& pair, const void* bias, Float bias_type, int reserved_processors, cudaStream_t stream) const {
    GemmArgs all = args();
    all.bias = bias, all.bias_type = bias_type, all.reserved_processors = reserved_processors;
    mxfp8::launch_pair(all, quant_, pair, a_, stream);
  }

 private:
  GemmShape shape_;
  Quant quant_;
  Tensor a_, b_, a_scale_, b_scale_;
  Float out_type_;
};

void run_one_shot(const Call& call, const Product& product, cudaStream_t stream) {
  product.multiply(0, call.m, call.slot(call.rank, call.rank), 0, stream);
  cuda::check_launch(kOp, launch_one_shot(call, stream));
}

// The copies of one of two streams, which take the chunks in turn, with the steps between them.
class Copies {
 public:
  Copies(const Call& call, cudaStream_t stream) : call_(call), stream_(stream) {}

  void send(int chunk, void* to, const void* from, int64_t bytes) {
    Step next;
    next.delivered = chunk;
    step(next);
    copy(to, from, bytes);
    arrived_ = chunk;
  }
  void encode(int chunk) {
    Step next;
    next.summed = chunk;
    step(next);
    cuda::check_launch(kOp, launch_encode(call_, chunk, stream_));
  }
  void fetch(int chunk, void* to, const void* from, int64_t bytes) {
    Step next;
    next.reduced = chunk;
    step(next);
    copy(to, from, bytes);
  }
  void decode(int chunk) { cuda::check_launch(kOp, launch_decode(call_, chunk, stream_)); }

 private:
  void step(Step next) {
    next.arrived = arrived_;
    arrived_ = -1;
    cuda::check_launch(kOp, launch_step(call_, next, stream_));
  }
  void copy(void* to, const void* from, int64_t bytes) { cuda::check_launch(kOp, cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_)); }
  const Call& call_;
  cudaStream_t stream_;
  int arrived_ = -1;  // a chunk whose copy stands last on the stream
};

void run_pair(const Call& call, const Product& product, const std::vector<cudaStream_t>& sides, cudaStream_t stream) {
  const int rank = call.rank, peer = 1 - rank;
  Signals *mine = call.signals(rank), *theirs = call.signals(peer);
  Pair pair = {};
  pair.rank = rank, pair.peer = peer;
  pair.span_rows = call.span_rows(), pair.chunk_rows = call.chunk_rows;
  pair.partial = call.slot(rank, rank), pair.addend = call.slot(rank, peer), pair.sum = call.sums(rank);
  pair.out = static_cast<uint8_t*>(call.out);
  pair.arrived = mine->arrived[peer];
  pair.finished[0] = mine->delivered, pair.finished[1] = call.fp8_wire ? mine->summed : theirs->reduced[rank];
  pair.counters[0] = mine->parts[0], pair.counters[1] = mine->parts[1];
  pair.epoch = &mine->epoch, pair.failed = &mine->failed, pair.failure = call.failure, pair.timeout_ns = call.timeout_ns;

  for (cudaStream_t side : sides) order(stream, side);
  product.add_pair(pair, call.bias, call.bias_type, call.fp8_wire ? kPairReservedFp8 : kPairReserved, stream);
  std::vector<Copies> copies;
  for (cudaStream_t side : sides) copies.emplace_back(call, side);
  const int64_t row_bytes = call.n * 2, chunk_bytes = call.chunk_rows * row_bytes;
  const auto rows = [&](int of, int chunk) { return std::min(call.chunk_rows, call.m - call.first_row(of, chunk)); };
  const auto copier = [&](int chunk) -> Copies& { return copies[chunk % sides.size()]; };
  for (int i = 0; i < call.span_chunks && rows(peer, i) > 0; ++i)
    copier(i).send(i, call.slot(peer, rank) + i * chunk_bytes, call.slot(rank, rank) + i * chunk_bytes, rows(peer, i) * row_bytes);
  for (int i = 0; i < call.span_chunks; ++i) {
    if (call.fp8_wire && rows(rank, i) > 0) copier(i).encode(i);
    if (rows(peer, i) <= 0) continue;
    if (call.fp8_wire) {
      const int64_t at = i * call.chunk_rows * wire_bytes(call.n);
      copier(i).fetch(i, call.fetched() + at, call.codes(peer) + at, rows(peer, i) * wire_bytes(call.n));
      copier(i).decode(i);
    } else {
      copier(i).fetch(i, static_cast<uint8_t*>(call.out) + call.first_row(peer, i) * row_bytes, call.sums(peer) + i * chunk_bytes, rows(peer, i) * row_bytes);
    }
  }
  for (cudaStream_t side : sides) order(side, stream);
  cuda::check_launch(kOp, launch_end(call, stream));
}

void run_spans(const Call& call, const Product& product, cudaStream_t side, cudaStream_t stream) {
  const int64_t row_bytes = call.n * (call.partial_type == Float::bf16 ? 2 : 4);
  order(stream, side);
  for (int64_t round = 0; round < call.rounds(); ++round) {
    for (int i = 1; i <= call.world; ++i) {  // the peers' rows first: they have the longer way
      const int owner = (call.rank + i) % call.world;
      const int64_t first = (round * call.world + owner) * call.span_rows();
      if (first >= call.m) continue;
      uint8_t* target = call.slot(owner, call.rank) + round * call.span_rows() * row_bytes;
      product.multiply(first, std::min(call.span_rows(), call.m - first), target, kReservedProcessors, stream);
      cuda::check_launch(kOp, launch_signal(call, owner, round, stream));
    }
  }
  // Only now: a later span may take a kernel that its launch has to load, which can wait for all that runs, and these wait for the spans.
  cuda::check_launch(kOp, launch_spans(call, Place::beside, side));
  cuda::check_launch(kOp, launch_spans(call, Place::behind, stream));
  order(side, stream);
}

void run(Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, std::string quant_name, std::optional<Tensor> bias, std::string wire, std::string algorithm,
         int64_t chunk_rows, int64_t span_chunks, int64_t rank, std::vector<int64_t> workspaces, std::vector<int64_t> layout, int64_t failure, double timeout,
         std::vector<int64_t> side_streams, Tensor out) {
  const Quant quant = mxfp8::parse_quant(kOp, quant_name);
  const GemmShape shape = mxfp8::check_gemm(kOp, quant, a, b, a_scale, b_scale, bias);
  const int64_t world = static_cast<int64_t>(workspaces.size());
  MORI_CHECK(world <= kMaxWorld && layout.size() == 6, kOp, ": at most ", kMaxWorld, " ranks, got ", world);
  const bool bf16 = out.scalar_type() == ScalarType::BFloat16, one_shot = algorithm == "one_shot";
  const int64_t row_bytes = shape.n * (bf16 ? 2 : 4);
  const Tensor bias_row = bias ? dense(*bias) : out;

  Call call = {};
  call.rank = static_cast<int>(rank), call.world = static_cast<int>(world);
  for (int64_t s = 0; s < world; ++s) call.workspace[s] = reinterpret_cast<uint8_t*>(workspaces[s]);
  call.slot_bytes = layout[0], call.sums_offset = layout[1], call.codes_offset = layout[2], call.codes_bytes = layout[3];
  call.inbox_offset = layout[4], call.inbox_bytes = layout[5];
  call.m = shape.m, call.n = shape.n, call.chunk_rows = one_shot ? shape.m : chunk_rows, call.span_chunks = one_shot ? 1 : static_cast<int>(span_chunks);
  call.partial_type = bf16 ? Float::bf16 : Float::f32, call.out_type = cuda::float_type(out), call.bias_type = cuda::float_type(bias_row);
  call.bias = bias ? bias_row.const_data_ptr() : nullptr;
  call.out = out.mutable_data_ptr();
  call.fp8_wire = wire == "fp8", call.one_shot = one_shot;
  call.timeout_ns = static_cast<uint64_t>(timeout * 1e9);
  call.failure = reinterpret_cast<Failure*>(failure);
  const int64_t own_chunks = one_shot ? 1 : call.rounds() * span_chunks;
  const int64_t own_rows = own_chunks * call.chunk_rows, slot_bytes = one_shot ? std::min(call.slot_bytes, call.inbox_bytes) : call.slot_bytes;
  MORI_CHECK(own_rows * row_bytes <= slot_bytes && (one_shot || own_rows * wire_bytes(shape.n) <= call.codes_bytes) && own_chunks <= kMaxChunks, kOp,
             ": the workspace is too small for [", shape.m, ", ", shape.n, "]");

  const Product product(shape, quant, a, b, a_scale, b_scale, call.partial_type);
  const cuda::Launch launch(a);
  const Turn turn(launch.stream());
  std::vector<cudaStream_t> sides;
  for (int64_t side : side_streams) sides.push_back(reinterpret_cast<cudaStream_t>(side));
  if (one_shot) {
    run_one_shot(call, product, launch.stream());
  } else if (algorithm == "pair") {
    MORI_CHECK(world == 2 && product.fits_pair() && call.rounds() == 1 && chunk_rows % mxfp8::kPairRows == 0 && call.span_rows() < call.m, kOp,
               ": not a product for 'pair'");
    run_pair(call, product, sides, launch.stream());
  } else {
    run_spans(call, product, sides[0], launch.stream());
  }
}

void prepare(Tensor like) {
  const cuda::Launch launch(like);
  cuda::check_launch(kOp, load_pair_kernels());
}

}  // namespace
}  // namespace mori::gemm_ar

STABLE_TORCH_LIBRARY_IMPL(mori, CUDA, m) {
  m.impl("_gemm_ar_prepare", TORCH_BOX(&mori::gemm_ar::prepare));
  m.impl("_gemm_ar_symmetric", TORCH_BOX(&mori::gemm_ar::run));
}
