// The inner products in terms of a few vector operations. A .cc file includes one of simd_*.h,
// which defines them in the namespace B12X_ISA, and then this file.
//
// Everything here has internal linkage or lives in B12X_ISA, and nothing from the standard library
// is instantiated: code compiled for one instruction set must not stand in for another's.

namespace b12x::host::B12X_ISA {
namespace {

constexpr int kCodesPerGroup = kWideColumns / 2;
constexpr int kScaleChunk = 8;  // groups whose scales are looked up at a time

// Asks for a line of the rows that come next. Rows are too short for the hardware to see that they
// follow each other while several are read at once. The address may lie behind the matrix.
inline void Prefetch(const void* address) { __builtin_prefetch(address); }

enum class Format { kNvfp4, kMxfp4 };

// The scales of `num_groups` groups from `group` on, two for each group.
template <Format format>
void LookUpScales(const uint8_t* scales, int64_t num_scales, int64_t group, int num_groups,
                  float* values) {
  for (int g = 0; g < num_groups; ++g) {
    if constexpr (format == Format::kMxfp4) {
      values[2 * g] = values[2 * g + 1] = kE8m0Values[scales[group + g]];
    } else {
      const int64_t first = 2 * (group + g);
      values[2 * g] = kE4m3Values[scales[first]];
      values[2 * g + 1] = first + 1 < num_scales ? kE4m3Values[scales[first + 1]] : 0.0f;
    }
  }
}

// A matrix's geometry, in groups of 32 columns; the last group may hold 16.
template <Format format>
struct Wide {
  explicit Wide(int64_t columns)
      : full_groups(columns / kWideColumns),
        groups((columns + kWideColumns - 1) / kWideColumns),
        code_stride(columns / 2),
        scale_stride(columns / (format == Format::kMxfp4 ? 32 : 16)) {}

  // A pointer from which the 16 bytes of `group` can be read; half a group is filled up in `tail`.
  const uint8_t* Codes(const uint8_t* row, int64_t group, uint8_t* tail) const {
    if (group < full_groups) return row + group * kCodesPerGroup;
    for (int i = 0; i < kCodesPerGroup; ++i) {
      tail[i] = i < kCodesPerGroup / 2 ? row[group * kCodesPerGroup + i] : 0;
    }
    return tail;
  }

  int64_t full_groups;
  int64_t groups;
  int64_t code_stride;
  int64_t scale_stride;
};

// R rows times M activation rows, weights decoded in registers.
template <Format format, bool is_short, int R, int M>
void DotInRegisters(const PackedRows& w, int64_t row, const float* const* a, float* out,
                    int64_t stride) {
  const Wide<format> shape(w.columns);
  const uint8_t* codes = w.codes + row * shape.code_stride;
  const uint8_t* scales = w.scales + row * shape.scale_stride;
  F16 acc[R][M];
  B12X_UNROLL for (int r = 0; r < R; ++r) {
    B12X_UNROLL for (int m = 0; m < M; ++m) acc[r][m] = Zero();
  }
  float values[R][2 * kScaleChunk];
  uint8_t tail[kCodesPerGroup];
  for (int64_t begin = 0; begin < shape.groups; begin += kScaleChunk) {
    const int64_t rest = shape.groups - begin;
    const int size = rest < kScaleChunk ? static_cast<int>(rest) : kScaleChunk;
    for (int r = 0; r < R; ++r) {
      LookUpScales<format>(scales + r * shape.scale_stride, shape.scale_stride, begin, size,
                           values[r]);
      Prefetch(scales + (R + r) * shape.scale_stride + 2 * begin);
    }
    for (int g = 0; g < size; ++g) {
      const int64_t group = begin + g;
      Prefetch(codes + R * shape.code_stride + group * R * kCodesPerGroup);
      B12X_UNROLL for (int r = 0; r < R; ++r) {
        F16 even, odd;
        DecodeGroup(shape.Codes(codes + r * shape.code_stride, group, tail), &even, &odd);
        const F16 scale = Halves(values[r] + 2 * g);
        even = Mul(even, scale);
        odd = Mul(odd, scale);
        B12X_UNROLL for (int m = 0; m < M; ++m) {
          const float* columns = a[m] + group * kWideColumns;
          acc[r][m] = MulAdd<is_short>(Load(columns), even, acc[r][m]);
          acc[r][m] = MulAdd<is_short>(Load(columns + kLanes), odd, acc[r][m]);
        }
      }
    }
  }
  B12X_UNROLL for (int r = 0; r < R; ++r) {
    B12X_UNROLL for (int m = 0; m < M; ++m) out[m * stride + r] = Sum(acc[r][m]);
  }
}

template <Format format, bool is_short, int M>
void DotRowsInRegisters(const PackedRows& w, int num_rows, const float* const* a, float* out,
                        int64_t stride) {
  constexpr int R =
      kRegisterDots / M < kRowStep ? (kRegisterDots / M < 1 ? 1 : kRegisterDots / M) : kRowStep;
  for (int row = 0; row < num_rows; row += R) {
    DotInRegisters<format, is_short, R, M>(w, row, a, out + row, stride);
  }
}

constexpr int kTileGroups = 16;

// Sums of a tile of R rows, in the cache, with M activation rows.
template <bool is_short, int R, int M>
void DotTile(const float* tile, int num_groups, const float* const* a, int64_t column,
             float (*sums)[kRowStep][kLanes]) {
  F16 acc[R][M];
  B12X_UNROLL for (int r = 0; r < R; ++r) {
    B12X_UNROLL for (int m = 0; m < M; ++m) acc[r][m] = Load(sums[m][r]);
  }
  for (int g = 0; g < num_groups; ++g) {
    B12X_UNROLL for (int half = 0; half < 2; ++half) {
      const int64_t offset = g * kWideColumns + half * kLanes;
      F16 values[M];
      B12X_UNROLL for (int m = 0; m < M; ++m) values[m] = Load(a[m] + column + offset);
      B12X_UNROLL for (int r = 0; r < R; ++r) {
        const F16 weights = Load(tile + r * kTileGroups * kWideColumns + offset);
        B12X_UNROLL for (int m = 0; m < M; ++m) {
          acc[r][m] = MulAdd<is_short>(values[m], weights, acc[r][m]);
        }
      }
    }
  }
  B12X_UNROLL for (int r = 0; r < R; ++r) {
    B12X_UNROLL for (int m = 0; m < M; ++m) Store(acc[r][m], sums[m][r]);
  }
}

// Decodes tiles of 4 rows and 512 columns once for all activation rows.
template <Format format, bool is_short>
void DotByTiles(const PackedRows& w, int num_rows, const float* const* a, int count, float* out,
                int64_t stride) {
  const Wide<format> shape(w.columns);
  alignas(64) float tile[kRowStep][kTileGroups][kWideColumns];
  alignas(64) float sums[kMaxActivations][kRowStep][kLanes];
  uint8_t tail[kCodesPerGroup];
  for (int row = 0; row < num_rows; row += kRowStep) {
    for (int m = 0; m < count; ++m) {
      for (int r = 0; r < kRowStep; ++r) Store(Zero(), sums[m][r]);
    }
    for (int64_t begin = 0; begin < shape.groups; begin += kTileGroups) {
      const int64_t rest = shape.groups - begin;
      const int size = rest < kTileGroups ? static_cast<int>(rest) : kTileGroups;
      for (int r = 0; r < kRowStep; ++r) {
        const uint8_t* codes = w.codes + (row + r) * shape.code_stride;
        float values[2 * kTileGroups];
        LookUpScales<format>(w.scales + (row + r) * shape.scale_stride, shape.scale_stride, begin,
                             size, values);
        for (int g = 0; g < size; ++g) {
          Prefetch(codes + kRowStep * shape.code_stride + (begin + g) * kCodesPerGroup);
          F16 even, odd;
          DecodeGroup(shape.Codes(codes, begin + g, tail), &even, &odd);
          const F16 scale = Halves(values + 2 * g);
          Store(Mul(even, scale), tile[r][g]);
          Store(Mul(odd, scale), tile[r][g] + kLanes);
        }
      }
      int m = 0;
      for (; m + kTileActivations <= count; m += kTileActivations) {
        for (int r = 0; r < kRowStep; r += kTileRows) {
          DotTile<is_short, kTileRows, kTileActivations>(
              tile[r][0], size, a + m, begin * kWideColumns,
              reinterpret_cast<float (*)[kRowStep][kLanes]>(sums[m][r]));
        }
      }
      for (; m < count; ++m) {
        for (int r = 0; r < kRowStep; r += kTileRows) {
          DotTile<is_short, kTileRows, 1>(
              tile[r][0], size, a + m, begin * kWideColumns,
              reinterpret_cast<float (*)[kRowStep][kLanes]>(sums[m][r]));
        }
      }
    }
    for (int m = 0; m < count; ++m) {
      for (int r = 0; r < kRowStep; ++r) out[m * stride + row + r] = Sum(Load(sums[m][r]));
    }
  }
}

template <Format format, bool is_short>
void DotWide(const PackedRows& w, int num_rows, const void* const* activations, int count,
             float* out, int64_t stride) {
  const float* a[kMaxActivations];
  for (int m = 0; m < count; ++m) a[m] = static_cast<const float*>(activations[m]);
  switch (count) {
    case 1:
      return DotRowsInRegisters<format, is_short, 1>(w, num_rows, a, out, stride);
    case 2:
      return DotRowsInRegisters<format, is_short, 2>(w, num_rows, a, out, stride);
    case 3:
      return DotRowsInRegisters<format, is_short, 3>(w, num_rows, a, out, stride);
    case 4:
      return DotRowsInRegisters<format, is_short, 4>(w, num_rows, a, out, stride);
    default:
      return DotByTiles<format, is_short>(w, num_rows, a, count, out, stride);
  }
}

constexpr int kFp4CodeBytes = kFp4Columns / 2;
constexpr int kFp4Scales = kFp4Columns / 16;

// R rows times M activation rows of NVFP4. Within a lane of a group the sum is an exact integer,
// and its product with the two block scales is exact too.
template <int R, int M>
void DotFp4InRegisters(const PackedRows& w, int64_t row, const Fp4Group* const* a, float* out,
                       int64_t stride) {
  const int64_t full_groups = w.columns / kFp4Columns;
  const int64_t groups = (w.columns + kFp4Columns - 1) / kFp4Columns;
  const int64_t code_stride = w.columns / 2;
  const int64_t scale_stride = w.columns / 16;
  F16 acc[R][M];
  B12X_UNROLL for (int r = 0; r < R; ++r) {
    B12X_UNROLL for (int m = 0; m < M; ++m) acc[r][m] = Zero();
  }
  for (int64_t g = 0; g < groups; ++g) {
    B12X_UNROLL for (int r = 0; r < R; ++r) {
      const uint8_t* codes = w.codes + (row + r) * code_stride + g * kFp4CodeBytes;
      const uint8_t* scales = w.scales + (row + r) * scale_stride + g * kFp4Scales;
      Prefetch(codes + R * code_stride);
      Prefetch(scales + R * scale_stride);
      float values[kFp4Scales];
      uint8_t tail[kFp4CodeBytes];
      if (g < full_groups) {
        B12X_UNROLL for (int i = 0; i < kFp4Scales; ++i) values[i] = kE4m3Values[scales[i]];
      } else {
        const int num_scales = static_cast<int>(scale_stride - g * kFp4Scales);
        for (int i = 0; i < kFp4Scales; ++i) {
          values[i] = i < num_scales ? kE4m3Values[scales[i]] : 0.0f;
        }
        for (int i = 0; i < kFp4CodeBytes; ++i) tail[i] = i < 8 * num_scales ? codes[i] : 0;
        codes = tail;
      }
      const Fp4Weights weights = DecodeFp4(codes);
      const F16 weight_scale = Pairs(values);
      B12X_UNROLL for (int m = 0; m < M; ++m) {
        const Fp4Group& group = a[m][g];
        const F16 scale = Mul(weight_scale, Load(group.scale));
        acc[r][m] = MulAdd<true>(DotFp4Group(weights, group), scale, acc[r][m]);
      }
    }
  }
  B12X_UNROLL for (int r = 0; r < R; ++r) {
    B12X_UNROLL for (int m = 0; m < M; ++m) out[m * stride + r] = Sum(acc[r][m]);
  }
}

template <int M>
void DotFp4Rows(const PackedRows& w, int row, const Fp4Group* const* a, float* out,
                int64_t stride) {
  constexpr int R = kFp4Rows / M < 1 ? 1 : (kFp4Rows / M > kRowStep ? kRowStep : kFp4Rows / M);
  for (int r = 0; r < kRowStep; r += R) {
    DotFp4InRegisters<R, M>(w, row + r, a, out + row + r, stride);
  }
}

void DotFp4(const PackedRows& w, int num_rows, const void* const* activations, int count,
            float* out, int64_t stride) {
  const Fp4Group* a[kMaxActivations];
  for (int m = 0; m < count; ++m) a[m] = static_cast<const Fp4Group*>(activations[m]);
  for (int row = 0; row < num_rows; row += kRowStep) {
    int m = 0;
    for (; m + 4 <= count; m += 4) DotFp4Rows<4>(w, row, a + m, out + m * stride, stride);
    for (; m + 2 <= count; m += 2) DotFp4Rows<2>(w, row, a + m, out + m * stride, stride);
    for (; m < count; ++m) DotFp4Rows<1>(w, row, a + m, out + m * stride, stride);
  }
}

}  // namespace

extern const Kernels kKernels;
const Kernels kKernels = {
    DotWide<Format::kNvfp4, false>,
    DotWide<Format::kNvfp4, true>,
    DotWide<Format::kMxfp4, false>,
    DotWide<Format::kMxfp4, true>,
    DotFp4,
};

}  // namespace b12x::host::B12X_ISA
