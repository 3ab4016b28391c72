// mpp::tensor_ops::matmul2d: C = A B or C += A B over an execution scope, with the rules that Apple's compiler enforces.
#pragma once

#include "tensor.h"

namespace mpp::tensor_ops {

struct matmul2d_descriptor {
  enum class mode { multiply, multiply_accumulate };
  int m, n, k;
  bool transpose_left, transpose_right, relaxed_precision;
  mode matmul_mode;
  constexpr matmul2d_descriptor(int m_, int n_, int k_ = int(metal::dynamic_extent), bool transpose_left_ = false,
                                bool transpose_right_ = false, bool relaxed_precision_ = false, mode mode_ = mode::multiply)
      : m(m_),
        n(n_),
        k(k_),
        transpose_left(transpose_left_),
        transpose_right(transpose_right_),
        relaxed_precision(relaxed_precision_),
        matmul_mode(mode_) {}
};

}  // namespace mpp::tensor_ops

namespace msl {

template <class X>
inline constexpr bool is_cooperative = false;
template <class T, int C, int R, int N, metal::CooperativeRole W, bool A, class O>
inline constexpr bool is_cooperative<metal::cooperative_tensor<T, C, R, N, W, A, O>> = true;

// The element type of an operand that is given as a tensor type, a cooperative tensor type or the element type itself.
template <class X>
struct operand_element {
  using type = value_type<X>;
};
template <class T, class E, class K>
struct operand_element<metal::tensor<T, E, K>> {
  using type = value_type<T>;
};
template <class T, int C, int R, int N, metal::CooperativeRole W, bool A, class O>
struct operand_element<metal::cooperative_tensor<T, C, R, N, W, A, O>> {
  using type = T;
};
template <class L, class R>
struct Operands {};

// Operands of the oldest released whitelist; later ones are longer.
template <class T>
inline constexpr bool is_byte = is_same<T, char> || is_same<T, uchar> || is_same<T, int8_t>;
template <class L, class R, class D>
inline constexpr bool operands_supported = (is_float<L> && is_float<R> && (is_same<D, float> || (is_same<D, L> && is_same<D, R>))) ||
                                           (is_byte<L> && is_byte<R> && is_same<D, int>);

constexpr bool extent_16_or_32(int e) { return e == 16 || e == 32; }

// Calls put(column, row, value) for every element of an operand. `frames` hold one cooperative tensor per thread, or views of
// memory that are all the same.
template <class Operand, class Frame, class F>
MSL_UNCHECKED void read_operand(void** frames, unsigned threads, Operand* Frame::* which, int columns, int rows, F put) {
  if constexpr (is_cooperative<Operand>) {
    for (unsigned t = 0; t < threads; t++) {
      const Operand& part = *(static_cast<Frame*>(frames[t])->*which);
      for (int slot = 0; slot < part.get_capacity(); slot++) {
        const Position at = Operand::position(t, slot);
        if (at.row >= 0) put(at.column, at.row, part.slots[slot]);
      }
    }
  } else {
    const Operand& view = *(static_cast<Frame*>(frames[0])->*which);
    for (int row = 0; row < rows; row++)
      for (int column = 0; column < columns; column++) put(column, row, load_shared(view.address(column, row)));
  }
}

}  // namespace msl

namespace mpp::tensor_ops {

template <matmul2d_descriptor D, class Scope>
struct matmul2d {
  static constexpr int kThreads = int(msl::kSimdWidth * Scope::simdgroups);
  static constexpr bool kDynamicK = D.k == int(metal::dynamic_extent);
  static constexpr int kK = kDynamicK ? 1 : D.k;  // cooperative operands need a static k
  static_assert(D.m > 0 && D.n > 0 && D.m % 8 == 0 && D.n % 8 == 0, "matmul2d: m and n are multiples of 8");
  static_assert(D.m % 16 == 0 || D.n % 16 == 0, "matmul2d: at least one of m and n is a multiple of 16");
  static_assert(kDynamicK || (D.k > 0 && D.k % 16 == 0), "matmul2d: k is dynamic_extent or a multiple of 16");

  // Columns, then rows. L, R: element types of the operands.
  template <class L, class R>
  using Left = metal::cooperative_tensor<L, D.transpose_left ? D.m : kK, D.transpose_left ? kK : D.m, kThreads,
                                         metal::CooperativeRole::left, D.transpose_left, msl::Operands<L, R>>;
  template <class L, class R>
  using Right = metal::cooperative_tensor<R, D.transpose_right ? kK : D.n, D.transpose_right ? D.n : kK, kThreads,
                                          metal::CooperativeRole::right, !D.transpose_right, msl::Operands<L, R>>;
  template <class L, class R, class E>
  using Destination = metal::cooperative_tensor<E, D.n, D.m, kThreads, metal::CooperativeRole::destination, false, msl::Operands<L, R>>;
  template <class X>
  using Element = typename msl::operand_element<X>::type;

  template <class L, class R, class E, class Index = int>
  Left<Element<L>, Element<R>> get_left_input_cooperative_tensor() const {
    check_input_scope();
    Left<Element<L>, Element<R>> tensor;
    return poisoned(tensor);
  }
  template <class L, class R, class E, class Index = int>
  Right<Element<L>, Element<R>> get_right_input_cooperative_tensor() const {
    check_input_scope();
    Right<Element<L>, Element<R>> tensor;
    return poisoned(tensor);
  }
  template <class L, class R, class E, class Index = int>
  Destination<Element<L>, Element<R>, E> get_destination_cooperative_tensor() const {
    Destination<Element<L>, Element<R>, E> tensor;
    return poisoned(tensor);
  }

  template <class A, class B, class C>
  void run(thread A& left, thread B& right, thread C& destination, msl::Site site = msl::here("matmul2d::run")) const {
    using L = Element<A>;
    using R = Element<B>;
    using E = Element<C>;
    check_operand<A, Left<L, R>>();
    check_operand<B, Right<L, R>>();
    check_operand<C, Destination<L, R, E>>();
    static_assert(msl::operands_supported<L, R, E>, "matmul2d: this combination of operand types is not supported");
    static_assert(!(msl::is_cooperative<A> && msl::is_cooperative<B>) ||
                      (msl::extent_16_or_32(D.m) && msl::extent_16_or_32(D.n) && msl::extent_16_or_32(D.k) &&
                       (D.m == 32 || D.n == 32 || D.k == 32)),
                  "matmul2d: with both inputs cooperative m, n and k are 16 or 32, and one of them is 32");
    Frame<A, B, C> frame{&left, &right, &destination, site};
    msl::collective(site, frame, &combine<A, B, C>, Scope::simdgroups);
  }

 private:
  template <class A, class B, class C>
  struct Frame {
    A* left;
    B* right;
    C* destination;
    msl::Site site;
  };

  static constexpr void check_input_scope() {
    static_assert(Scope::simdgroups == 1, "matmul2d: cooperative inputs need the scope of one simdgroup");
    static_assert(!kDynamicK, "matmul2d: cooperative inputs need a static k");
  }
  template <class Operand, class Own>
  static constexpr void check_operand() {
    if constexpr (msl::is_cooperative<Operand>)
      static_assert(msl::is_same<Operand, Own>, "matmul2d: the cooperative tensor was made for another operation, operand or element types");
  }
  template <class Tensor>
  static Tensor poisoned(Tensor& tensor) {
    __builtin_memset(tensor.slots, 0xff, sizeof tensor.slots);
    return tensor;
  }

  template <class A, class B, class C>
  static void combine(void** frames, unsigned threads) {
    using F = Frame<A, B, C>;
    const F& first = *static_cast<F*>(frames[0]);
    if (threads != unsigned(kThreads)) msl_runtime->fail("matmul2d: a simdgroup is not full", first.site.line);
    if constexpr (kDynamicK) {
      static_assert(!msl::is_cooperative<A>, "matmul2d: cooperative inputs need a static k");
      product<F>(frames, threads, D.transpose_left ? first.left->rows : first.left->columns);
    } else {
      product<F>(frames, threads, D.k);
    }
  }

  static constexpr int kBlock = 32;  // of the reduction
  struct Product {
    float a[D.m][kBlock], b[kBlock][D.n], sum[D.m][D.n];

    MSL_UNCHECKED void add(int length, bool forward) {
      for (int i = 0; i < D.m; i++)
        for (int step = 0; step < length; step++) {
          const int at = forward ? step : length - 1 - step;
          for (int j = 0; j < D.n; j++) sum[i][j] = __builtin_fmaf(a[i][at], b[at][j], sum[i][j]);
        }
    }
  };

  template <class F>
  static void product(void** frames, unsigned threads, int k) {
    static Product p;  // too large for the stack of a lane
    __builtin_memset(p.sum, 0, sizeof p.sum);
    if constexpr (D.matmul_mode == matmul2d_descriptor::mode::multiply_accumulate)
      msl::read_operand(frames, threads, &F::destination, D.n, D.m,
                        [](int column, int row, auto value) { p.sum[row][column] = float(value); });
    const bool forward = msl_runtime->behaviour.product_order == msl::ProductOrder::kForward;
    const int blocks = (k + kBlock - 1) / kBlock;
    for (int block = 0; block < blocks; block++) {
      const int k0 = (forward ? block : blocks - 1 - block) * kBlock, length = k - k0 < kBlock ? k - k0 : kBlock;
      auto put_left = [=](int column, int row, auto value) {
        const int i = D.transpose_left ? column : row, at = (D.transpose_left ? row : column) - k0;
        if (at >= 0 && at < length) p.a[i][at] = float(value);
      };
      auto put_right = [=](int column, int row, auto value) {
        const int j = D.transpose_right ? row : column, at = (D.transpose_right ? column : row) - k0;
        if (at >= 0 && at < length) p.b[at][j] = float(value);
      };
      msl::read_operand(frames, threads, &F::left, D.transpose_left ? D.m : k, D.transpose_left ? k : D.m, put_left);
      msl::read_operand(frames, threads, &F::right, D.transpose_right ? k : D.n, D.transpose_right ? D.n : k, put_right);
      p.add(length, forward);
    }
    write(frames, threads, &F::destination, p.sum);
  }

  template <class C, class F>
  MSL_UNCHECKED static void write(void** frames, unsigned threads, C* F::* which, const float (&sum)[D.m][D.n]) {
    using E = typename C::element_type;
    if constexpr (msl::is_cooperative<C>) {
      for (unsigned t = 0; t < threads; t++) {
        C& part = *(static_cast<F*>(frames[t])->*which);
        for (int slot = 0; slot < part.get_capacity(); slot++) {
          const msl::Position at = C::position(t, slot);
          if (at.row >= 0) part.slots[slot] = E(sum[at.row][at.column]);
        }
      }
    } else {
      const C& view = *(static_cast<F*>(frames[0])->*which);
      for (int row = 0; row < D.m; row++)
        for (int column = 0; column < D.n; column++) msl::store_shared(view.address(column, row), E(sum[row][column]));
    }
  }
};

}  // namespace mpp::tensor_ops
