// Histogram gradient boosting of many small groups, one call for all of them.
//
// A group of a few thousand rows spends its time in clearing and scanning histograms, not in reading
// rows; so gradient and Hessian share one 64-bit cell (sums are exact, a sibling is one subtraction),
// histograms are kept as running totals, and all bins of all features are scored in one vector pass.
// Plain C++17 with a C interface for ctypes; no headers of any framework.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>
#include <vector>

#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__) && defined(__ELF__)
#define DISPATCH __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define DISPATCH
#endif

#if defined(__GNUC__) && defined(__x86_64__)
#include <immintrin.h>
#define WIDE __attribute__((target("avx512f,avx512bw,avx512vl")))
#endif

#if defined(__GNUC__)
#define INLINE inline __attribute__((always_inline))
#else
#define INLINE inline
#endif

#if defined(_WIN32)
#define EXPORT extern "C" __declspec(dllexport)
#else
#define EXPORT extern "C" __attribute__((visibility("default")))
#endif

namespace {

struct Config {
  int32_t n_estimators, num_leaves, min_child_samples, early_stopping_rounds;
  double learning_rate, reg_lambda, min_child_weight;
};

// ---- bins ---------------------------------------------------------------------------------------

struct Bins {
  int n, features, total;
  int stride;                      // bytes of a row in `by_row`: features, rounded up to 8
  int shift;                       // 1 << shift bins hold any feature's
  std::vector<int> begin;          // first bin of each feature in the histogram; features + 1 long
  std::vector<uint8_t> has_missing;  // whether the last bin of a feature holds NaN
  std::vector<double> edge;        // upper edge of each bin; the last value bin has none
  std::vector<uint8_t> by_row;     // (n, stride) bins
  std::vector<uint8_t> by_column;  // (features, n) bins
};

uint64_t sortable(double value) {
  uint64_t bits;
  value += 0.0;  // -0.0 sorts with 0.0
  std::memcpy(&bits, &value, 8);
  return bits >> 63 ? ~bits : bits | (uint64_t(1) << 63);
}

double unsortable(uint64_t bits) {
  bits = bits >> 63 ? bits & ~(uint64_t(1) << 63) : ~bits;
  double value;
  std::memcpy(&value, &bits, 8);
  return value;
}

// Radix sort; digits that are equal in all values cost nothing but their count.
void radix_sort(std::vector<uint64_t>& keys, std::vector<uint64_t>& other) {
  const size_t n = keys.size();
  if (n < 64) {
    std::sort(keys.begin(), keys.end());
    return;
  }
  other.resize(n);
  uint32_t counts[8][256] = {};
  for (uint64_t key : keys)
    for (int d = 0; d < 8; ++d) ++counts[d][(key >> (8 * d)) & 255];
  for (int d = 0; d < 8; ++d) {
    if (counts[d][(keys[0] >> (8 * d)) & 255] == n) continue;
    uint32_t at = 0;
    for (int v = 0; v < 256; ++v) {
      const uint32_t count = counts[d][v];
      counts[d][v] = at;
      at += count;
    }
    for (uint64_t key : keys) other[counts[d][(key >> (8 * d)) & 255]++] = key;
    keys.swap(other);
  }
}

// Upper edges of one feature's bins, from its sorted finite-or-infinite values.
void find_edges(const std::vector<uint64_t>& sorted, int max_bin, std::vector<double>& edges) {
  constexpr int kMinPerBin = 3;
  edges.clear();
  const int n = int(sorted.size());
  int distinct = 0;
  for (int i = 0; i < n; ++i) distinct += i == 0 || sorted[i] != sorted[i - 1];
  if (distinct <= 1) return;
  const bool each = distinct <= max_bin;
  double target = double(n) / max_bin;
  int in_bin = 0, left = n, bins_left = max_bin;
  for (int i = 0; i < n;) {
    int j = i + 1;
    while (j < n && sorted[j] == sorted[i]) ++j;
    const int here = j - i;
    int next = 0;
    if (j < n) {
      int k = j + 1;
      while (k < n && sorted[k] == sorted[j]) ++k;
      next = k - j;
    }
    in_bin += here;
    bool close = each ? in_bin >= kMinPerBin
                      : in_bin >= std::max(target, double(kMinPerBin)) ||
                            // a heavy value stands alone
                            (next >= target && in_bin >= std::max(kMinPerBin, int(target / 2)));
    if (close && j < n && int(edges.size()) + 1 < max_bin) {
      const double low = unsortable(sorted[i]), high = unsortable(sorted[j]);
      double middle = low + (high - low) / 2;
      if (!(middle >= low && middle < high)) middle = low;  // neighbours, or an infinity
      edges.push_back(middle);
      left -= in_bin;
      --bins_left;
      in_bin = 0;
      if (bins_left > 0) target = double(left) / bins_left;
    }
    i = j;
  }
}

// How many of the sorted edges lie below a value; without branches, which values would mispredict.
inline int place(const double* edges, int count, double value) {
  const double* from = edges;
  while (count > 1) {
    const int half = count / 2;
    from += from[half - 1] < value ? half : 0;
    count -= half;
  }
  return int(from - edges) + int(count == 1 && *from < value);
}

void make_bins(const double* X, int n, int train, int features, int max_bin, Bins& b) {
  b.n = n;
  b.features = features;
  b.begin.assign(features + 1, 0);
  b.has_missing.assign(features, 0);
  b.edge.clear();
  b.stride = (features + 7) / 8 * 8;
  b.by_row.resize(size_t(n) * b.stride);
  int widest = 0;
  b.by_column.resize(size_t(n) * features + 4);  // gathers of one byte read four
  std::vector<uint64_t> keys, other;
  std::vector<double> edges;
  for (int f = 0; f < features; ++f) {
    keys.clear();
    for (int i = 0; i < train; ++i) {
      const double v = X[size_t(i) * features + f];
      if (!std::isnan(v)) keys.push_back(sortable(v));
    }
    radix_sort(keys, other);
    find_edges(keys, max_bin, edges);
    const int values = int(edges.size()) + 1;
    const bool missing = int(keys.size()) < train;
    b.has_missing[f] = missing;
    const int begin = b.begin[f];
    b.begin[f + 1] = begin + values + missing;
    widest = std::max(widest, values + int(missing));
    b.edge.insert(b.edge.end(), edges.begin(), edges.end());
    b.edge.push_back(std::numeric_limits<double>::infinity());
    if (missing) b.edge.push_back(std::numeric_limits<double>::quiet_NaN());
    uint8_t* column = b.by_column.data() + size_t(f) * n;
    for (int i = 0; i < n; ++i) {
      const double v = X[size_t(i) * features + f];
      int bin;
      if (std::isnan(v)) {
        bin = missing ? values : values - 1;  // unseen in training: right, as when predicting
      } else {
        bin = place(edges.data(), int(edges.size()), v);
      }
      column[i] = uint8_t(bin);
      b.by_row[size_t(i) * b.stride + f] = uint8_t(bin);
    }
  }
  b.total = b.begin[features];
  b.shift = widest <= 64 ? 6 : 8;
}

// ---- gradients ----------------------------------------------------------------------------------

// exp for |x| <= 87, relative error below 2e-7; written so that compilers vectorise it.
inline float fast_exp(float x) {
  x = std::min(std::max(x, -87.0f), 87.0f);
  const float scaled = x * 1.44269504f;
  const float whole = float(int(scaled + (scaled >= 0 ? 0.5f : -0.5f)));
  const float r = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  const float e = p * r * r + r + 1.0f;
  int32_t bits = (int32_t(whole) + 127) << 23;
  float power;
  std::memcpy(&power, &bits, 4);
  return e * power;
}

DISPATCH void binary_gradients(const float* score, const float* y, int n, float* g, float* h) {
  for (int i = 0; i < n; ++i) {
    const float p = 1.0f / (1.0f + fast_exp(-score[i]));
    g[i] = p - y[i];
    h[i] = std::max(p * (1.0f - p), 1e-16f);
  }
}

// The largest absolute value; the bits of positive floats compare as the floats do.
DISPATCH float largest_size(const float* values, int count) {
  int32_t best = 0;
  for (int i = 0; i < count; ++i) {
    int32_t bits;
    std::memcpy(&bits, values + i, 4);
    bits &= 0x7fffffff;
    best = bits > best ? bits : best;
  }
  float value;
  std::memcpy(&value, &best, 4);
  return value;
}

// Packs gradient and Hessian of each row into one 64-bit cell whose sums over n rows cannot
// overflow: 30 bits with sign for the one, 31 without for the other.
DISPATCH void pack(const float* g, const float* h, int n, float scale_g, float scale_h,
                   int64_t* out) {
  for (int i = 0; i < n; ++i) {
    const float a = g[i] * scale_g;
    const int64_t q = int64_t(int32_t(a + (a >= 0 ? 0.5f : -0.5f)));
    const int64_t r = int64_t(int32_t(h[i] * scale_h + 0.5f));
    out[i] = (q << 32) + r;
  }
}

// ---- histograms and splits ----------------------------------------------------------------------

// Adds rows to `scratch`, in which every feature has 1 << kShift cells: the place of a cell is then
// its bin and a constant, and eight bins come with one load.
template <int kShift>
INLINE void add_rows(const Bins& b, const int32_t* rows, int count, const int64_t* packed,
                     int64_t* scratch) {
  const int words = b.features / 8, rest = b.features % 8;
  for (int k = 0; k < count; ++k) {
    const int64_t value = packed[rows[k]];
    const uint8_t* bins = b.by_row.data() + size_t(rows[k]) * b.stride;
    int64_t* cell = scratch;
    uint64_t eight;
    for (int w = 0; w < words; ++w, bins += 8, cell += 8 << kShift) {
      std::memcpy(&eight, bins, 8);
      cell[(0 << kShift) + (eight & 255)] += value;
      cell[(1 << kShift) + (eight >> 8 & 255)] += value;
      cell[(2 << kShift) + (eight >> 16 & 255)] += value;
      cell[(3 << kShift) + (eight >> 24 & 255)] += value;
      cell[(4 << kShift) + (eight >> 32 & 255)] += value;
      cell[(5 << kShift) + (eight >> 40 & 255)] += value;
      cell[(6 << kShift) + (eight >> 48 & 255)] += value;
      cell[(7 << kShift) + (eight >> 56)] += value;
    }
    if (!rest) continue;
    std::memcpy(&eight, bins, 8);
    switch (rest) {
      case 7: cell[(6 << kShift) + (eight >> 48 & 255)] += value; [[fallthrough]];
      case 6: cell[(5 << kShift) + (eight >> 40 & 255)] += value; [[fallthrough]];
      case 5: cell[(4 << kShift) + (eight >> 32 & 255)] += value; [[fallthrough]];
      case 4: cell[(3 << kShift) + (eight >> 24 & 255)] += value; [[fallthrough]];
      case 3: cell[(2 << kShift) + (eight >> 16 & 255)] += value; [[fallthrough]];
      case 2: cell[(1 << kShift) + (eight >> 8 & 255)] += value; [[fallthrough]];
      default: cell[eight & 255] += value;
    }
  }
}

// Moves each feature's cells from `scratch`, which is left zero, to `hist` as running totals.
void accumulate(const Bins& b, int64_t* scratch, int64_t* hist) {
  int f = 0;
  const auto take = [&](int64_t*& from, int64_t*& to, int64_t& run) {
    run += *from;
    *from++ = 0;
    *to++ = run;
  };
  // Two features side by side, as each addition waits for the one before.
  for (; f + 1 < b.features; f += 2) {
    int64_t one = 0, two = 0;
    int64_t *first = hist + b.begin[f], *second = hist + b.begin[f + 1];
    int64_t *a = scratch + (size_t(f) << b.shift), *c = scratch + (size_t(f + 1) << b.shift);
    const int64_t *middle = second, *end = hist + b.begin[f + 2];
    while (first < middle && second < end) {
      take(a, first, one);
      take(c, second, two);
    }
    while (first < middle) take(a, first, one);
    while (second < end) take(c, second, two);
  }
  if (f < b.features) {
    int64_t run = 0;
    int64_t *from = scratch + (size_t(f) << b.shift), *to = hist + b.begin[f];
    while (to < hist + b.begin[f + 1]) take(from, to, run);
  }
}

#if defined(WIDE)
// As `accumulate`, eight cells at a time: each is added to those one, two and four places on.
WIDE void accumulate_wide(const Bins& b, int64_t* scratch, int64_t* hist) {
  const __m512i zero = _mm512_setzero_si512(), last = _mm512_set1_epi64(7);
  for (int f = 0; f < b.features; ++f) {
    int64_t* from = scratch + (size_t(f) << b.shift);
    int64_t* to = hist + b.begin[f];
    int left = b.begin[f + 1] - b.begin[f];
    __m512i run = zero;
    for (; left > 0; left -= 8, from += 8, to += 8) {
      __m512i x = _mm512_loadu_si512(from);  // behind a feature's bins are zeros
      _mm512_storeu_si512(from, zero);
      x = _mm512_add_epi64(x, _mm512_alignr_epi64(x, zero, 7));
      x = _mm512_add_epi64(x, _mm512_alignr_epi64(x, zero, 6));
      x = _mm512_add_epi64(x, _mm512_alignr_epi64(x, zero, 4));
      x = _mm512_add_epi64(x, run);
      run = _mm512_permutexvar_epi64(last, x);
      if (left >= 8)
        _mm512_storeu_si512(to, x);
      else
        _mm512_mask_storeu_epi64(to, __mmask8((1u << left) - 1), x);
    }
  }
}

bool wide() {
  static const bool found = __builtin_cpu_supports("avx512f") &&
                            __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512vl");
  return found;
}
#endif

// Sets `hist` to running totals of the rows' cells; `scratch` is zero before and after.
DISPATCH void build(const Bins& b, const int32_t* rows, int count, const int64_t* packed,
                    int64_t* scratch, int64_t* hist) {
  if (b.shift == 6)
    add_rows<6>(b, rows, count, packed, scratch);
  else
    add_rows<8>(b, rows, count, packed, scratch);
#if defined(WIDE)
  if (wide()) return accumulate_wide(b, scratch, hist);
#endif
  accumulate(b, scratch, hist);
}

struct Sums {
  float scale_g, scale_h, lambda;
};

// Gain of cutting after each of `count` bins, and the largest of them; bins that leave too little on
// a side, as each feature's last one does, get a negative one. `cell_of` returns running totals.
template <class CellOf>
INLINE float score_cuts(CellOf cell_of, int count, int64_t whole, Sums s, float h_low, float* out) {
  const float G = float(int32_t(whole >> 32)) * s.scale_g;
  const float H = float(uint32_t(whole)) * s.scale_h;
  // Gains are not negative where it matters, and such floats compare as their bits do.
  int32_t best = -1;
  for (int i = 0; i < count; ++i) {
    const int64_t cell = cell_of(i);
    const float gl = float(int32_t(cell >> 32)) * s.scale_g;
    const float hl = float(int32_t(uint32_t(cell))) * s.scale_h;
    const float gr = G - gl, hr = H - hl;
    const float a = hl + s.lambda, c = hr + s.lambda;
    float gain = (gl * gl * c + gr * gr * a) / (a * c);
    gain = (hl >= h_low) & (hr >= h_low) ? gain : -1.0f;
    out[i] = gain;
    int32_t bits;
    std::memcpy(&bits, &gain, 4);
    best = bits > best ? bits : best;
  }
  float value;
  std::memcpy(&value, &best, 4);
  return best < 0 ? -1.0f : value;
}

DISPATCH float gains(const int64_t* hist, int64_t extra, int count, int64_t whole, Sums s,
                     float h_low, float* out) {
  return score_cuts([=](int i) { return hist[i] + extra; }, count, whole, s, h_low, out);
}

// As `gains` of parent - child, which takes the parent's place.
DISPATCH float gains_of_rest(int64_t* parent, const int64_t* child, int count, int64_t whole,
                             Sums s, float h_low, float* out) {
  return score_cuts(
      [=](int i) {
        const int64_t cell = parent[i] - child[i];
        parent[i] = cell;
        return cell;
      },
      count, whole, s, h_low, out);
}

// Where a value that is there stands first; `values` may be read up to 31 behind their end.
DISPATCH int first_place(const float* values, float wanted) {
  int at = 0;
  for (;; at += 32) {
    int found = 0;
    for (int i = 0; i < 32; ++i) found |= values[at + i] == wanted;
    if (found) break;
  }
  while (values[at] != wanted) ++at;
  return at;
}

struct Split {
  float gain = -1.0f;
  int feature = -1, bin = -1;
  bool missing_left = false;
};

struct Leaf {
  int begin, count, slot = -1;
  int64_t total;
  Split best;
  int node = -1;  // the node whose child this leaf is
  bool is_left = false;
};

struct Tree {
  std::vector<int32_t> feature, left, right;
  std::vector<uint8_t> missing;  // 1: NaN goes left
  std::vector<double> threshold;
  std::vector<double> value;
};

class Grower {
 public:
  // `histograms` is memory that is used again by the next group: fresh pages cost more than sums.
  Grower(const Bins& bins, int train, const Config& config, std::vector<int64_t>& histograms)
      : b_(bins), n_(train), c_(config), rows_(train), spare_(train + 16),
        gain_(bins.total + 32, -1.0f), scratch_(size_t(bins.features) << bins.shift),
        hist_(histograms) {
    const size_t cells = size_t(config.num_leaves) * bins.total;
    if (hist_.size() < cells) hist_.resize(cells);
    for (int f = 0; f < bins.features; ++f)
      if (bins.has_missing[f]) missing_.push_back(f);
  }

  // Grows one tree and adds its output to `score` of all rows, validation rows too.
  void grow(const float* g, const float* h, const int64_t* packed, Sums s, int all, float* score,
            Tree& tree);

 private:
  // Finds a leaf's best split; `other` is the slot that must be taken off its own first, or -1.
  void find(Leaf& leaf, Sums s, int other);
  int divide(const Leaf& leaf, const Split& split);

  const Bins& b_;
  int n_;
  const Config& c_;
  std::vector<int32_t> rows_, spare_;
  std::vector<float> gain_;
  std::vector<int64_t> scratch_;
  std::vector<int> missing_;  // features with a bin of missing values
  std::vector<int64_t>& hist_;
  std::vector<Leaf> leaves_;
};

void Grower::find(Leaf& leaf, Sums s, int other) {
  leaf.best = Split();
  int64_t* hist = hist_.data() + size_t(leaf.slot) * b_.total;
  const float H = float(uint32_t(leaf.total)) * s.scale_h;
  const float G = float(int32_t(leaf.total >> 32)) * s.scale_g;
  // As LightGBM does, rows on a side are estimated from their Hessian.
  const float per_row = H / float(leaf.count);
  const float h_low = std::max(std::max(float(c_.min_child_weight), 1e-30f),
                               (float(c_.min_child_samples) - 0.5f) * per_row);
  const float floor = G * G / (H + s.lambda) * (1.0f + 1e-6f) + 1e-10f;
  const float top =
      other < 0 ? gains(hist, 0, b_.total, leaf.total, s, h_low, gain_.data())
                : gains_of_rest(hist, hist_.data() + size_t(other) * b_.total, b_.total, leaf.total,
                                s, h_low, gain_.data());
  if (top > floor) {
    const int at = first_place(gain_.data(), top);
    const int f = int(std::upper_bound(b_.begin.begin(), b_.begin.end(), at) - b_.begin.begin()) - 1;
    // Before a bin of missing values the cut sends those right.
    leaf.best = {top, f, at - b_.begin[f], false};
  }
  for (int f : missing_) {
    const int begin = b_.begin[f], end = b_.begin[f + 1], cuts = end - begin - 2;
    if (cuts <= 0) continue;
    float* out = gain_.data() + begin;
    const int64_t missing = hist[end - 1] - hist[end - 2];
    const float best = gains(hist + begin, missing, cuts, leaf.total, s, h_low, out);
    if (best > leaf.best.gain && best > floor) {
      int at = 0;
      while (out[at] != best) ++at;
      leaf.best = {best, f, at, true};
    }
  }
}

// Moves the rows that go left to the front and the others behind them, both in their order; returns
// how many go left. `spare` has room for 16 more rows than there are.
int divide_rows(const uint8_t* column, int cut, int missing, bool missing_left, int count,
                int32_t* rows, int32_t* spare) {
  int left = 0, right = 0;
  for (int k = 0; k < count; ++k) {
    const int32_t row = rows[k];
    const int bin = column[row];
    // Bitwise: a branch here would be mispredicted for every other row.
    const int goes_left = int(bin <= cut) | (int(missing_left) & int(bin == missing));
    rows[left] = row;
    spare[right] = row;
    left += goes_left;
    right += 1 - goes_left;
  }
  std::memcpy(rows + left, spare, size_t(right) * 4);
  return left;
}

#if defined(WIDE)
// As `divide_rows`, sixteen rows at a time.
WIDE int divide_rows_wide(const uint8_t* column, int cut, int missing, bool missing_left, int count,
                          int32_t* rows, int32_t* spare) {
  int left = 0, right = 0, k = 0;
  const __m512i byte = _mm512_set1_epi32(255), edge = _mm512_set1_epi32(cut);
  // A bin that no row has, unless missing values go left.
  const __m512i hole = _mm512_set1_epi32(missing_left ? missing : 256);
  for (; k < count; k += 16) {
    const int here = count - k < 16 ? count - k : 16;
    const __mmask16 real = __mmask16((1u << here) - 1);
    const __m512i row = _mm512_maskz_loadu_epi32(real, rows + k);
    const __m512i bin =
        _mm512_and_si512(_mm512_mask_i32gather_epi32(byte, real, row, column, 1), byte);
    const __mmask16 goes_left =
        real & (_mm512_cmple_epi32_mask(bin, edge) | _mm512_cmpeq_epi32_mask(bin, hole));
    const __mmask16 goes_right = real & ~goes_left;
    const int to_left = __builtin_popcount(goes_left);
    _mm512_mask_storeu_epi32(rows + left, __mmask16((1u << to_left) - 1),
                             _mm512_maskz_compress_epi32(goes_left, row));
    _mm512_storeu_si512(spare + right, _mm512_maskz_compress_epi32(goes_right, row));
    left += to_left;
    right += here - to_left;
  }
  std::memcpy(rows + left, spare, size_t(right) * 4);
  return left;
}
#endif

int Grower::divide(const Leaf& leaf, const Split& split) {
  const uint8_t* column = b_.by_column.data() + size_t(split.feature) * b_.n;
  const int missing = b_.has_missing[split.feature]
                          ? b_.begin[split.feature + 1] - b_.begin[split.feature] - 1
                          : 256;
  int32_t* rows = rows_.data() + leaf.begin;
#if defined(WIDE)
  if (wide())
    return divide_rows_wide(column, split.bin, missing, split.missing_left, leaf.count, rows,
                            spare_.data());
#endif
  return divide_rows(column, split.bin, missing, split.missing_left, leaf.count, rows,
                     spare_.data());
}

void Grower::grow(const float* g, const float* h, const int64_t* packed, Sums s, int all,
                  float* score, Tree& tree) {
  for (int i = 0; i < n_; ++i) rows_[i] = i;
  leaves_.clear();
  leaves_.push_back({0, n_, 0, 0, {}});
  for (int i = 0; i < n_; ++i) leaves_[0].total += packed[i];
  build(b_, rows_.data(), n_, packed, scratch_.data(), hist_.data());
  find(leaves_[0], s, -1);
  int slots = 1;
  while (int(leaves_.size()) < c_.num_leaves) {
    int at = -1;
    for (int k = 0; k < int(leaves_.size()); ++k)
      if (leaves_[k].best.gain > (at < 0 ? 0.0f : leaves_[at].best.gain)) at = k;
    if (at < 0) break;
    Leaf parent = leaves_[at];
    const Split split = parent.best;
    const int left = divide(parent, split);
    const int node = int(tree.feature.size());
    tree.feature.push_back(split.feature);
    tree.threshold.push_back(b_.edge[b_.begin[split.feature] + split.bin]);
    tree.missing.push_back(split.missing_left);
    tree.left.push_back(0);
    tree.right.push_back(0);
    if (parent.node >= 0) (parent.is_left ? tree.left : tree.right)[parent.node] = node;
    Leaf one{parent.begin, left, -1, 0, {}};
    Leaf two{parent.begin + left, parent.count - left, -1, 0, {}};
    one.node = two.node = node;
    one.is_left = true;
    Leaf& small = one.count <= two.count ? one : two;
    Leaf& large = one.count <= two.count ? two : one;
    const bool last = int(leaves_.size()) + 1 >= c_.num_leaves;
    const int enough = 2 * c_.min_child_samples;
    if (!last && large.count >= enough) {
      int64_t* mine = hist_.data() + size_t(slots) * b_.total;
      build(b_, rows_.data() + small.begin, small.count, packed, scratch_.data(), mine);
      small.total = mine[b_.begin[1] - 1];  // every row is in a bin of the first feature
      large.total = parent.total - small.total;
      large.slot = parent.slot;
      small.slot = slots++;
      find(large, s, small.slot);
      if (small.count >= enough) find(small, s, -1);
    }
    leaves_[at] = one;
    leaves_.push_back(two);
  }
  // Leaf outputs come from exact sums, not from the packed ones.
  tree.value.resize(leaves_.size());
  for (int k = 0; k < int(leaves_.size()); ++k) {
    const Leaf& leaf = leaves_[k];
    // Two sums of each: an addition waits for the one before.
    double G = 0, H = 0, G2 = 0, H2 = 0;
    int r = leaf.begin;
    const int end = leaf.begin + leaf.count;
    for (; r + 1 < end; r += 2) {
      G += g[rows_[r]];
      G2 += g[rows_[r + 1]];
      H += h[rows_[r]];
      H2 += h[rows_[r + 1]];
    }
    if (r < end) {
      G += g[rows_[r]];
      H += h[rows_[r]];
    }
    tree.value[k] = -c_.learning_rate * (G + G2) / (H + H2 + c_.reg_lambda);
    if (leaf.node >= 0) (leaf.is_left ? tree.left : tree.right)[leaf.node] = ~k;
    const float add = float(tree.value[k]);
    for (int r = leaf.begin; r < end; ++r) score[rows_[r]] += add;
  }
  for (int i = n_; i < all; ++i) {
    int node = tree.feature.empty() ? ~0 : 0;
    while (node >= 0) {
      const int f = tree.feature[node];
      const int bin = b_.by_column[size_t(f) * b_.n + i];
      const int width = b_.begin[f + 1] - b_.begin[f];
      bool goes_left;
      if (b_.has_missing[f] && bin == width - 1) {
        goes_left = tree.missing[node];
      } else {
        goes_left = b_.edge[b_.begin[f] + bin] <= tree.threshold[node];
      }
      node = goes_left ? tree.left[node] : tree.right[node];
    }
    score[i] += float(tree.value[~node]);
  }
}

// ---- a model in bytes ---------------------------------------------------------------------------

template <class T>
void put(std::vector<uint8_t>& out, const T* values, size_t count) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(values);
  out.insert(out.end(), bytes, bytes + count * sizeof(T));
}

// int32 trees; then for each: int32 leaves, int32 feature[], int32 left[], int32 right[],
// int32 missing[], double threshold[], double value[]; eight-byte numbers are not aligned.
void serialize(const std::vector<Tree>& trees, std::vector<uint8_t>& out) {
  const int32_t count = int32_t(trees.size());
  put(out, &count, 1);
  for (const Tree& t : trees) {
    const int32_t leaves = int32_t(t.value.size());
    put(out, &leaves, 1);
    put(out, t.feature.data(), t.feature.size());
    put(out, t.left.data(), t.left.size());
    put(out, t.right.data(), t.right.size());
    for (uint8_t m : t.missing) {
      const int32_t wide = m;
      put(out, &wide, 1);
    }
    put(out, t.threshold.data(), t.threshold.size());
    put(out, t.value.data(), t.value.size());
  }
}

double loss_of(const float* score, const float* y, int begin, int end, bool binary) {
  double total = 0;
  for (int i = begin; i < end; ++i) {
    if (binary) {
      const double z = y[i] > 0.5f ? -double(score[i]) : double(score[i]);
      total += z > 0 ? z + std::log1p(std::exp(-z)) : std::log1p(std::exp(z));
    } else {
      const double d = double(score[i]) - y[i];
      total += d * d;
    }
  }
  return total;
}

void train_one(const Bins& b, const double* target, int train, bool binary, const Config& c,
               std::vector<int64_t>& histograms, std::vector<uint8_t>& out, double* fitted) {
  const int n = b.n;
  std::vector<float> y(target, target + n), score(n), g(train), h(train, 1.0f);
  std::vector<int64_t> packed(train);
  double mean = 0;
  for (int i = 0; i < train; ++i) mean += target[i];
  mean /= train;
  const double init = binary ? std::log(mean / (1 - mean)) : mean;
  if (!binary)  // small numbers keep their digits in float
    for (int i = 0; i < n; ++i) y[i] = float(target[i] - init);
  std::fill(score.begin(), score.end(), binary ? float(init) : 0.0f);
  Grower grower(b, train, c, histograms);
  std::vector<Tree> trees;
  double best = std::numeric_limits<double>::infinity();
  int best_at = 0;
  for (int t = 0; t < c.n_estimators; ++t) {
    if (binary) {
      binary_gradients(score.data(), y.data(), train, g.data(), h.data());
    } else {
      for (int i = 0; i < train; ++i) g[i] = score[i] - y[i];
    }
    const float top = binary ? 1.0f : std::max(largest_size(g.data(), train), 1e-30f);
    const float top_h = binary ? 0.25f : 1.0f;
    const float scale_g = float(double(1 << 30) / train) / top;
    const float scale_h = float(double(1 << 30) / train) / top_h;
    pack(g.data(), h.data(), train, scale_g, scale_h, packed.data());
    const Sums s{1.0f / scale_g, 1.0f / scale_h, float(c.reg_lambda)};
    Tree tree;
    grower.grow(g.data(), h.data(), packed.data(), s, n, score.data(), tree);
    const bool stump = tree.feature.empty();
    trees.push_back(std::move(tree));
    if (c.early_stopping_rounds > 0 && n > train) {
      const double loss = loss_of(score.data(), y.data(), train, n, binary);
      if (loss < best) {
        best = loss;
        best_at = t;
      } else if (t - best_at >= c.early_stopping_rounds) {
        break;
      }
    }
    if (stump) break;  // nothing is left to split, and no later tree would find more
  }
  if (c.early_stopping_rounds > 0 && n > train) trees.resize(best_at + 1);
  const bool cut = c.early_stopping_rounds > 0 && n > train;  // scores are of more trees
  for (int i = 0; i < n; ++i)
    fitted[i] = cut ? std::numeric_limits<double>::quiet_NaN()
                    : double(score[i]) + (binary ? 0.0 : init);
  // The first tree carries the constant, as LightGBM's do.
  for (double& value : trees[0].value) value += init;
  serialize(trees, out);
}

}  // namespace

// Trains every group under every configuration.
//
// X: (rows, features) doubles; y: (rows,) 0/1 or values; group k owns rows offsets[k] to
// offsets[k+1], the last of them from middle[k] on held out for early stopping. Models come back
// one behind another in *bytes, group by group, model k ending at ends[k]; `kp_free` frees them.
// fitted: (n_configs, rows) raw scores of the rows, NaN where trees were dropped again.
// Returns 0, or 1 when memory ran out.
EXPORT int kp_gbdt_train(const double* X, const double* y, const int64_t* offsets,
                         const int64_t* middle, int64_t groups, int32_t features, int32_t max_bin,
                         int32_t binary, const void* configs, int64_t n_configs, uint8_t** bytes,
                         int64_t* ends, double* fitted) {
  try {
    std::vector<uint8_t> out;
    std::vector<int64_t> histograms;
    Bins bins;
    const auto* config = static_cast<const Config*>(configs);
    for (int64_t k = 0; k < groups; ++k) {
      const int64_t begin = offsets[k];
      const int n = int(offsets[k + 1] - begin), train = int(middle[k] - begin);
      make_bins(X + begin * features, n, train, features, max_bin, bins);
      for (int64_t c = 0; c < n_configs; ++c) {
        train_one(bins, y + begin, train, binary != 0, config[c], histograms, out,
                  fitted + c * offsets[groups] + begin);
        ends[k * n_configs + c] = int64_t(out.size());
      }
    }
    *bytes = static_cast<uint8_t*>(std::malloc(std::max<size_t>(out.size(), 1)));
    if (!*bytes) return 1;
    std::memcpy(*bytes, out.data(), out.size());
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

EXPORT void kp_free(uint8_t* bytes) { std::free(bytes); }

// Adds the raw score of one model (as `serialize` wrote it) to out[rows[i]] for each of `count`.
EXPORT void kp_gbdt_predict(const uint8_t* model, const double* X, int32_t features,
                            const int64_t* rows, int64_t count, double* out) {
  auto number = [&](const uint8_t*& at) {
    int32_t value;
    std::memcpy(&value, at, 4);
    at += 4;
    return value;
  };
  const uint8_t* at = model;
  const int32_t trees = number(at);
  std::vector<int32_t> ints;
  std::vector<double> doubles;
  for (int32_t t = 0; t < trees; ++t) {
    const int32_t leaves = number(at), inner = leaves - 1;
    ints.resize(size_t(inner) * 4 + 1);
    std::memcpy(ints.data(), at, size_t(inner) * 16);
    at += size_t(inner) * 16;
    doubles.resize(size_t(inner) + leaves);
    std::memcpy(doubles.data(), at, doubles.size() * 8);
    at += doubles.size() * 8;
    const int32_t *feature = ints.data(), *left = feature + inner, *right = left + inner,
                  *missing = right + inner;
    const double *threshold = doubles.data(), *value = threshold + inner;
    for (int64_t i = 0; i < count; ++i) {
      const double* x = X + rows[i] * features;
      int32_t node = inner ? 0 : ~0;
      while (node >= 0) {
        const double v = x[feature[node]];
        const bool goes_left = std::isnan(v) ? missing[node] != 0 : v <= threshold[node];
        node = goes_left ? left[node] : right[node];
      }
      out[rows[i]] += value[~node];
    }
  }
}
