// Fused MoE decode of a single token, the shortest launch of all: what counts is how soon each
// thing begins. What follows from shapes alone is worked out while the ids are on their way, the
// first weights are requested before their work is listed, an item's activations come while those
// of the one before it are multiplied, and the multipliers, who have nothing else to do by then,
// finish the output.
//
// The bits are those of the kernels for any number of tokens.
#include "cuda/kernels/sm90_moe_decode.cuh"
#include "cuda/kernels/sm90_moe_decode_kernels.h"
#include "cuda/moe/grid_barrier.cuh"

namespace b12x {
namespace {

template <typename Recipe>
class OneTokenDecode : public MoeDecode<Recipe, DecodePart::kBoth> {
  using Base = MoeDecode<Recipe, DecodePart::kBoth>;
  using Base::base;
  using Base::items;
  using Base::kTileRowBytes;
  using Base::lane;
  using Base::memory;
  using Base::p;
  using Base::ring;
  using Base::tables;
  using Base::warp;
  using typename Base::Math;
  using typename Base::Product;

 public:
  using Base::Base;

  __device__ __forceinline__ void request() {
    int id = -1;
    if (lane < p.top_k) id = p.topk_ids[lane];
    ring.init(lane);
    const uint64_t policy = ptx::evict_first_policy();
    // Where the work begins if all ids are experts.
    Product first = this->template view_of<1>(p.top_k);
    UnitWalk unit = UnitWalk::of(first.share, first.shape.teams, lane);
    UnitRequest request{};
    const bool all_routed =
        __all_sync(0xFFFFFFFFu, lane >= p.top_k || (id >= 0 && id < p.num_experts));
    if (all_routed) {
      const int expert = __shfl_sync(0xFFFFFFFFu, id, unit.major);
      request = this->template request_of<1>(first, unit, expert);
      if (request.teams > 0) request.chunk(ring, first.shape.split, lane, policy);
    }
    list_one_token(p, tables(), lane, id);
    __syncwarp();
    pass_sync_all();
    if (request.teams > 0) {
      request.all_chunks(ring, first.shape.split, lane, policy);
      unit.next();
    } else if (!all_routed) {
      first.share = this->template view_of<1>().share;
      unit = UnitWalk::of(first.share, first.shape.teams, lane);
    }
    this->template request_units<1>(first, unit, policy);
    this->template request_units<2>(this->template view_of<2>(), policy);
  }

  __device__ __forceinline__ void multiply() {
    if (lane == 0) {
      if (warp < p.plan.fc1.teams) this->sums(1).init(p.plan.fc1, warp);
      if (warp < p.plan.fc2.teams) this->sums(2).init(p.plan.fc2, warp);
    }
    Second second;
    switch (p.plan.fc1.chunks) {
      case 1:
        multiply_first<1>(second);
        break;
      case 2:
        multiply_first<2>(second);
        break;
      default:
        multiply_first<3>(second);
    }
    if (items() != p.top_k) second = Second::of(*this, items());
    switch (p.plan.fc2.chunks) {
      case 1:
        return multiply_second<1>(second);
      case 2:
        return multiply_second<2>(second);
      default:
        return multiply_second<3>(second);
    }
  }

 private:
  // A lane's activations of kChunks tiles, `split` tiles apart, of the `columns` that are left from
  // its first number on. `kAsItIs`: they may not be written yet.
  template <int kChunks>
  struct Activations {
    uint4 v[kChunks];

    template <bool kAsItIs>
    __device__ __forceinline__ void load(const char* from, int columns, int split) {
#pragma unroll
      for (int k = 0; k < kChunks; ++k) {
        v[k] = uint4{0, 0, 0, 0};
        if (k * split * kTileColumns < columns) {
          const char* chunk = from + k * split * kTileRowBytes;
          v[k] = kAsItIs ? ptx::load_16_as_it_is(chunk) : ptx::load_16(chunk);
        }
      }
    }
    __device__ __forceinline__ bool is_written() const {
      uint32_t most = 0;
#pragma unroll
      for (int k = 0; k < kChunks; ++k) most = ptx::most_of(most, v[k]);
      return !ptx::has_unwritten_half(most);
    }
  };

  // This lane's part in the second product.
  struct Second {
    const char* h;  // its numbers of the first item; of a step of a tile, or none
    int columns;    // that a row has from there on
    int items, item;
    int steps, mine;  // units of a team at most, and of this warp's
    // What this warp finishes in the end: every 16th of the units, from (major, minor) on.
    int units, major, minor;

    static __device__ __forceinline__ Second of(const OneTokenDecode& decode, int items) {
      const Product it = decode.template view_of<2>(items);
      const TeamShape& shape = it.shape;
      const int warp = decode.warp, lane = decode.lane;
      const int team = shape.team_of >> 4 * warp & 15, rank = shape.rank_of >> 4 * warp & 15;
      const int at = rank * kTileRowBytes + (lane & 3) * 16 + 64 * (lane >> 3);
      Second s;
      s.h = static_cast<const char*>(decode.p.h) + at;
      s.columns = Math::one_token_lane(lane) ? it.k_tiles * kTileColumns - at / 2 : 0;
      s.items = items;
      s.item = team - static_cast<int>(divide(team, it.share.limit)) * items;
      s.steps = it.share.units_of(shape.by_teams, 0);
      s.mine = (shape.idle >> warp & 1) != 0 ? 0 : it.share.units_of(shape.by_teams, team);
      s.units = it.share.units;
      s.major = divide(warp, it.share.limit);
      s.minor = warp - s.major * items;
      return s;
    }
  };

  // One unit: this warp's tiles with the activations `b`.
  template <int kChunks>
  __device__ __forceinline__ void multiply_unit(const uint4 (&b)[kChunks][4], bool last_exists,
                                                TeamSumWriter& sums) {
    const auto tile_lane = TileLane<true>::of(lane);
    float acc[4] = {};
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      if (k + 1 == kChunks && !last_exists) {
        this->skip();
        break;
      }
      const auto weights = TileRegisters::load<true>(ring.wait() + warp * kTileBytes, tile_lane);
      ring.release(lane);
      Math::multiply_one_token(weights, b[k], acc);
    }
    sums.put(acc, lane);
  }

  template <int kChunks>
  __device__ __forceinline__ void multiply_first(Second& second) {
    const Product assumed = this->template view_of<1>(p.top_k);
    const TeamShape& shape = assumed.shape;
    const int team = shape.team_of >> 4 * warp & 15, rank = shape.rank_of >> 4 * warp & 15;
    const bool idle = (shape.idle >> warp & 1) != 0;
    const bool last_exists = (kChunks - 1) * shape.split + rank < assumed.k_tiles;
    // This lane's numbers are of one step of a tile, or it has none.
    const int step = lane >> 3, at = rank * kTileRowBytes + (lane & 3) * 16 + 64 * step;
    const bool has_any = Math::one_token_lane(lane);
    Activations<kChunks> x;
    if constexpr (Recipe::kQuantized) {
      quantize_input_for_this_cta(p, base + p.plan.shared.input);
    } else {
      x.template load<false>(static_cast<const char*>(p.x) + at, has_any ? p.hidden - at / 2 : 0,
                             shape.split);
    }
    // While x and the ids are on their way.
    second = Second::of(*this, p.top_k);
    int steps = assumed.share.units_of(shape.by_teams, 0);
    int mine = idle ? 0 : assumed.share.units_of(shape.by_teams, team);
    sync_all();
    if constexpr (Recipe::kQuantized) {
      x.template load<false>(memory + p.plan.shared.input + at,
                             has_any ? assumed.k_tiles * kTileColumns - at / 2 : 0, shape.split);
    }
    uint4 b[kChunks][4];
#pragma unroll
    for (int k = 0; k < kChunks; ++k) Math::one_token_operand(x.v[k], step, b[k]);
    if (items() != p.top_k) {
      const UnitShare share = this->template view_of<1>().share;
      steps = share.units_of(shape.by_teams, 0);
      mine = idle ? 0 : share.units_of(shape.by_teams, team);
    }
    TeamSumWriter sums(this->sums(1), team, warp, lane);
#pragma unroll 1
    for (int left = mine; left > 0; --left) multiply_unit<kChunks>(b, last_exists, sums);
#pragma unroll 1
    for (int left = (steps - mine) * kChunks; left > 0; --left) this->skip();
  }

  template <int kChunks>
  __device__ __forceinline__ void multiply_second(const Second& it) {
    const TeamShape& shape = p.plan.fc2;
    const int k_tiles = p.plan.shape.fc2_k_tiles, row_bytes = k_tiles * kTileRowBytes;
    const int team = shape.team_of >> 4 * warp & 15, rank = shape.rank_of >> 4 * warp & 15;
    const bool last_exists = (kChunks - 1) * shape.split + rank < k_tiles;
    const int step = lane >> 3;
    int item = it.item, own_major = it.major, own_minor = it.minor, own_team = warp, own_count = 0;
    TeamSumWriter sums(this->sums(2), team, warp, lane);
    RowOutput<Recipe> output(p, tables(), this->y_rows(), lane);
    this->see_first_is_finished();
    if (warp < it.units) output.prepare(own_major, own_minor);
    Activations<kChunks> next;
    if (it.mine > 0) next.template load<true>(it.h + item * row_bytes, it.columns, shape.split);
#pragma unroll 1
    for (int left = it.mine; left > 0; --left) {
      while (this->resident() && !next.is_written()) {
        next.template load<true>(it.h + item * row_bytes, it.columns, shape.split);
      }
      uint4 b[kChunks][4];
#pragma unroll
      for (int k = 0; k < kChunks; ++k) Math::one_token_operand(next.v[k], step, b[k]);
      item += shape.teams;
#pragma unroll 1
      for (; item >= it.items; item -= it.items) {
      }
      if (left > 1) next.template load<true>(it.h + item * row_bytes, it.columns, shape.split);
      multiply_unit<kChunks>(b, last_exists, sums);
    }
#pragma unroll 1
    for (int left = (it.steps - it.mine) * kChunks; left > 0; --left) this->skip();
    const TeamSums all = this->sums(2);
#pragma unroll 1
    for (int unit = warp; unit < it.units; unit += kMoeDecodeWarps) {
#pragma unroll 1
      for (; own_team >= shape.teams; own_team -= shape.teams) ++own_count;
#pragma unroll 1
      for (; own_minor >= it.items; own_minor -= it.items) ++own_major;
      output.prepare(own_major, own_minor);
      float acc[1][4];
      all.take(acc[0], shape, own_team, own_count, lane);
      output.store(own_major, own_minor, acc);
      own_team += kMoeDecodeWarps;
      own_minor += kMoeDecodeWarps;
    }
    sync_multipliers();
#pragma unroll 1
    for (int tile = threadIdx.x >> 4; tile < this->owned_tiles(); tile += kMoeDecodeThreads / 16) {
      this->write_owned(tile, 0, threadIdx.x & 15, this->resident());
    }
  }
};

// The finishers are those of the kernel for any number of tokens.
template <typename Recipe>
__global__ void __launch_bounds__(kMoeDecodeLaunchThreads, 1)
    sm90_moe_decode_one_token(const __grid_constant__ MoeDecodeParams params) {
  extern __shared__ __align__(128) char shared[];
  OneTokenDecode<Recipe> decode(params, shared);
  if (decode.is_multiplier()) return decode.multiply();
  if (decode.is_requester()) return decode.request();
  const bool meets = threadIdx.x == kMoeDecodeLaunchThreads - 32;
  GridBarrier barrier;
  if (meets) barrier.begin(params.barrier);
  decode.mark_intermediate();
  sync_finishers();
  if (meets) barrier.arrive();
  decode.begin_finishing();
  const bool resident = all_finishers(!meets || barrier.wait());
  decode.template finish<1>(decode.template view_of<1>());
  decode.say_first_is_finished(resident);
}

}  // namespace

MoeDecodeKernel one_token_kernel(DecodeRecipeId recipe) {
  switch (recipe) {
    case DecodeRecipeId::kW4A16Bf16:
      return sm90_moe_decode_one_token<W4A16Bf16>;
    case DecodeRecipeId::kW4A16Fp16:
      return sm90_moe_decode_one_token<W4A16Fp16>;
    case DecodeRecipeId::kW4A16Mxfp4:
      return sm90_moe_decode_one_token<W4A16Mxfp4>;
    case DecodeRecipeId::kNvfp4:
      return sm90_moe_decode_one_token<Nvfp4>;
  }
  return nullptr;
}

}  // namespace b12x
