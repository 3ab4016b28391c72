// How the sparse kernel shares its work: equal parts of the list of rounds, and the workspace where items that were cut meet.
#pragma once

#include "qsa_sm90.h"

namespace mori::qsa {

constexpr int kTileRows = 16;  // query rows of a tile: columns of the products

// The list of (item, round) in nearly equal parts, one per worker. An item is a token and `step` tiles of query rows.
struct Parts {
  int units, workers, size, longer;  // the first `longer` parts have one round more than `size`
  __host__ __device__ Parts(int units, int most) : units(units), workers(units < most ? units : most) {
    size = workers > 0 ? units / workers : 0;
    longer = units - size * workers;
  }
  __host__ __device__ int begin(int worker) const { return worker * size + (worker < longer ? worker : longer); }
  __host__ __device__ int owner(int unit) const {
    const int in_longer = longer * (size + 1);
    return unit < in_longer ? unit / (size + 1) : longer + (unit - in_longer) / size;
  }
};

struct Plan {
  int rounds, pairs, step;  // rounds of an item; items of a token; tiles that a CTA serves side by side, 1 or 2
  int units, most_workers;
  float* sums;              // [workers * step][2][kTileRows][dim]: what a worker left of the first and of the last item of its part
  float4* stats;            // [workers * step][2][kTileRows]: maximum, sum, score factor, token
  // Blocks of `block` tokens that the dense kernel has not done, or null: then the units are those of the blocks left.
  const uint8_t* status;
  int blocks, block, status_heads;
  int* units_left;
};

// Joins what the workers left of the items that were cut (qsa_merge_parts_sm90.cu).
cudaError_t launch_merge_parts(const AttnArgs& args, const Plan& plan, cudaStream_t stream);

}  // namespace mori::qsa
