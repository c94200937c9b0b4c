// Least squares and two-class logistic regression of many small groups, one call for all of them.
//
// A group of a few hundred rows fits the cache, so everything is done to one group before the next
// one is touched: rows are centred into a padded buffer, products of columns are summed in
// registers, and small systems are solved for eight penalties side by side.
// Plain C++17 with a C interface for ctypes; `least_squares.py` and `newton.py` are its reference.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <vector>

#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__) && defined(__ELF__)
#define DISPATCH __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define DISPATCH
#endif
#define INLINE inline __attribute__((always_inline))
#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kLanes = 8;   // doubles of a vector; two or four machine vectors where they are short
constexpr int kChunk = 64;  // rows whose products are summed in one go
typedef double Vec __attribute__((vector_size(64), aligned(8), may_alias));

int padded(int count) { return (count + kLanes - 1) / kLanes * kLanes; }

// ---- sums of products ---------------------------------------------------------------------------

// Adds left^T right of `rows` rows (row length `width`, a multiple of kLanes) to `sums`
// (width, width), on and above the diagonal blocks.
DISPATCH void add_products(const double* left, const double* right, int rows, int width,
                           double* sums) {
  for (int i = 0; i < width; i += 4) {
    for (int j = i / kLanes * kLanes; j < width; j += kLanes) {
      Vec a = {0}, b = {0}, c = {0}, d = {0};
      const double* x = left + i;
      const double* z = right + j;
      for (int r = 0; r < rows; ++r, x += width, z += width) {
        Vec v;
        std::memcpy(&v, z, sizeof v);
        a += x[0] * v;
        b += x[1] * v;
        c += x[2] * v;
        d += x[3] * v;
      }
      for (int k = 0; k < kLanes; ++k) {
        sums[size_t(i) * width + j + k] += a[k];
        sums[size_t(i + 1) * width + j + k] += b[k];
        sums[size_t(i + 2) * width + j + k] += c[k];
        sums[size_t(i + 3) * width + j + k] += d[k];
      }
    }
  }
}

template <class T>
DISPATCH void add_rows(const T* x, int64_t rows, int features, double* sums) {
  for (int64_t r = 0; r < rows; ++r, x += features)
    for (int j = 0; j < features; ++j) sums[j] += double(x[j]);
}

template <class T>
void gram(const T* X, const double* y, int64_t rows, int features, const int64_t* folds, int parts,
          bool centre, double* shift, double* out, std::vector<double>& buffer,
          std::vector<double>& sums) {
  const int q = features + 2, width = padded(q);
  std::fill(shift, shift + features + 1, 0.0);
  if (centre && rows > 0) {
    add_rows(X, rows, features, shift);
    for (int64_t r = 0; r < rows; ++r) shift[features] += y[r];
    for (int j = 0; j <= features; ++j) shift[j] /= double(rows);
  }
  buffer.assign(size_t(parts) * kChunk * width, 0.0);
  sums.assign(size_t(parts) * width * width, 0.0);
  std::vector<int> held(parts, 0);
  auto flush = [&](int p) {
    const double* z = buffer.data() + size_t(p) * kChunk * width;
    add_products(z, z, held[p], width, sums.data() + size_t(p) * width * width);
    held[p] = 0;
  };
  for (int64_t r = 0; r < rows; ++r) {
    const int p = folds ? int(folds[r]) : 0;
    double* z = buffer.data() + (size_t(p) * kChunk + held[p]) * width;
    const T* x = X + r * features;
    for (int j = 0; j < features; ++j) z[j] = double(x[j]) - shift[j];
    z[features] = y[r] - shift[features];
    z[features + 1] = 1.0;
    if (++held[p] == kChunk) flush(p);
  }
  for (int p = 0; p < parts; ++p) {
    flush(p);
    const double* from = sums.data() + size_t(p) * width * width;
    double* to = out + size_t(p) * q * q;
    for (int i = 0; i < q; ++i)
      for (int j = i; j < q; ++j)
        to[size_t(i) * q + j] = to[size_t(j) * q + i] = from[size_t(i) * width + j];
  }
}

// ---- ridge, eight penalties at a time -----------------------------------------------------------

// Solves (system + penalty) w = right by Cholesky for the eight penalties of `penalty`, and returns
// in `residual` the squared error of each solution on the Gram matrix `held` (q, q).
DISPATCH void solve_lanes(const double* system, const double* right, const double* total,
                          double rows, bool free, int features, const double* held,
                          const double* penalty, double* residual, double* factor) {
  const int d = features, q = d + 2;
  Vec alpha;
  std::memcpy(&alpha, penalty, sizeof alpha);
  Vec* L = reinterpret_cast<Vec*>(factor);  // (d, d) lower triangle
  Vec* w = L + size_t(d) * d;               // (d,) and then the row v = [-w, 1, -constant]
  for (int j = 0; j < d; ++j) {
    for (int i = j; i < d; ++i) {
      Vec sum = Vec{} + system[size_t(i) * d + j];
      if (i == j) sum += alpha;
      const Vec *a = L + size_t(i) * d, *b = L + size_t(j) * d;
      for (int k = 0; k < j; ++k) sum -= a[k] * b[k];
      if (i == j) {
        for (int k = 0; k < kLanes; ++k) sum[k] = 1.0 / std::sqrt(sum[k]);
        L[size_t(j) * d + j] = sum;  // the reciprocal of the pivot
      } else {
        L[size_t(i) * d + j] = sum * L[size_t(j) * d + j];
      }
    }
  }
  for (int i = 0; i < d; ++i) {
    Vec sum = Vec{} + right[i];
    for (int k = 0; k < i; ++k) sum -= L[size_t(i) * d + k] * w[k];
    w[i] = sum * L[size_t(i) * d + i];
  }
  for (int i = d - 1; i >= 0; --i) {
    Vec sum = w[i];
    for (int k = i + 1; k < d; ++k) sum -= L[size_t(k) * d + i] * w[k];
    w[i] = sum * L[size_t(i) * d + i];
  }
  Vec constant = {0};
  if (free) {
    constant = constant + total[d];
    for (int j = 0; j < d; ++j) constant -= w[j] * total[j];
    constant /= rows;
  }
  for (int j = 0; j < d; ++j) w[j] = -w[j];
  w[d] = Vec{} + 1.0;
  w[d + 1] = -constant;
  Vec sum = {0};
  for (int i = 0; i < q; ++i) {
    Vec row = Vec{} + 0.5 * held[size_t(i) * q + i];
    row *= w[i];
    for (int j = i + 1; j < q; ++j) row += held[size_t(i) * q + j] * w[j];
    sum += 2.0 * row * w[i];
  }
  std::memcpy(residual, &sum, sizeof sum);
}

// ---- logistic -----------------------------------------------------------------------------------

// e^x for x <= 0, relative error below 1e-15.
INLINE Vec exp_negative(Vec x) {
  for (int k = 0; k < kLanes; ++k) x[k] = x[k] < -708.0 ? -708.0 : x[k];
  Vec whole = x * 1.4426950408889634;
  typedef int64_t Ints __attribute__((vector_size(64)));
  // Adding and taking off 1.5 * 2^52 rounds to a whole number, whose bits are then in the low half.
  const Vec magic = Vec{} + 6755399441055744.0;
  Vec shifted = whole + magic;
  whole = shifted - magic;
  Vec r = x - whole * 0.693147180369123816490;
  r -= whole * 1.90821492927058770002e-10;
  Vec p = Vec{} + 1.0 / 479001600.0;
  p = p * r + 1.0 / 39916800.0;
  p = p * r + 1.0 / 3628800.0;
  p = p * r + 1.0 / 362880.0;
  p = p * r + 1.0 / 40320.0;
  p = p * r + 1.0 / 5040.0;
  p = p * r + 1.0 / 720.0;
  p = p * r + 1.0 / 120.0;
  p = p * r + 1.0 / 24.0;
  p = p * r + 1.0 / 6.0;
  p = p * r + 0.5;
  p = p * r + 1.0;
  p = p * r + 1.0;
  Ints bits = (Ints)shifted;
  Ints power = (bits << 52) + (int64_t(1023) << 52);
  return p * (Vec)power;
}

// Loss, gradient and Hessian (upper blocks) at w of padded rows; both of the latter are set.
DISPATCH double evaluate(const double* design, const double* target, int64_t rows, int width,
                         const double* w, double* gradient, double* hessian, double* weighted) {
  std::fill(gradient, gradient + width, 0.0);
  std::fill(hessian, hessian + size_t(width) * width, 0.0);
  double loss = 0;
  double z[kChunk], rest[kChunk], curve[kChunk];
  for (int64_t begin = 0; begin < rows; begin += kChunk) {
    const int count = int(std::min<int64_t>(kChunk, rows - begin));
    const double* x = design + begin * width;
    for (int r = 0; r < count; ++r) {
      Vec sum = {0};
      for (int j = 0; j < width; j += kLanes) {
        Vec a, b;
        std::memcpy(&a, x + size_t(r) * width + j, sizeof a);
        std::memcpy(&b, w + j, sizeof b);
        sum += a * b;
      }
      z[r] = ((sum[0] + sum[1]) + (sum[2] + sum[3])) + ((sum[4] + sum[5]) + (sum[6] + sum[7]));
    }
    for (int r = count; r < kChunk; ++r) z[r] = 0;
    Vec product = Vec{} + 1.0;  // of at most 8 numbers up to 2 in each lane
    const double* t = target + begin;
    for (int r = 0; r < count; r += kLanes) {
      Vec v, size;
      std::memcpy(&v, z + r, sizeof v);
      for (int k = 0; k < kLanes; ++k) size[k] = -std::fabs(v[k]);
      const Vec e = exp_negative(size);
      const Vec below = 1.0 / (1.0 + e);
      const int real = std::min(kLanes, count - r);
      for (int k = 0; k < kLanes; ++k) {
        const bool counts = k < real;
        const double y = counts ? t[r + k] : 0.0;
        product[k] *= counts ? 1.0 + e[k] : 1.0;
        const double p = (v[k] >= 0 ? 1.0 : e[k]) * below[k];
        rest[r + k] = p - y;
        curve[r + k] = e[k] * below[k] * below[k];
        loss += counts ? std::max(v[k], 0.0) - v[k] * y : 0.0;
      }
    }
    for (int k = 0; k < kLanes; ++k) loss += std::log(product[k]);
    for (int j = 0; j < width; j += kLanes) {
      Vec sum;
      std::memcpy(&sum, gradient + j, sizeof sum);
      for (int r = 0; r < count; ++r) {
        Vec a;
        std::memcpy(&a, x + size_t(r) * width + j, sizeof a);
        sum += rest[r] * a;
        a *= curve[r];
        std::memcpy(weighted + size_t(r) * width + j, &a, sizeof a);
      }
      std::memcpy(gradient + j, &sum, sizeof sum);
    }
    add_products(x, weighted, count, width, hessian);
  }
  return loss;
}

// The Newton step of `size` coefficients; returns half of what it promises to gain.
DISPATCH double newton_step(double* hessian, int width, int size, const double* gradient,
                            double* step, double* scale) {
  for (int i = 0; i < size; ++i) {
    const double own = hessian[size_t(i) * width + i];
    scale[i] = own > 0 ? 1.0 / std::sqrt(std::max(own, 1e-300)) : 0.0;
  }
  // Columns below the diagonal take the factor; the jitter is far below the tolerance.
  for (int j = 0; j < size; ++j) {
    for (int i = j; i < size; ++i) {
      double sum = hessian[size_t(j) * width + i] * scale[i] * scale[j] + (i == j ? 1e-13 : 0.0);
      for (int k = 0; k < j; ++k)
        sum -= hessian[size_t(i) * width + k] * hessian[size_t(j) * width + k];
      if (i == j) {
        // What nothing determines keeps its value.
        hessian[size_t(j) * width + j] = scale[j] > 0 && sum > 1e-14 ? 1.0 / std::sqrt(sum) : 0.0;
      } else {
        hessian[size_t(i) * width + j] = sum * hessian[size_t(j) * width + j];
      }
    }
  }
  for (int i = 0; i < size; ++i) {
    double sum = gradient[i] * scale[i];
    for (int k = 0; k < i; ++k) sum -= hessian[size_t(i) * width + k] * step[k];
    step[i] = sum * hessian[size_t(i) * width + i];
  }
  double promise = 0;
  for (int i = 0; i < size; ++i) promise += step[i] * step[i];
  for (int i = size - 1; i >= 0; --i) {
    double sum = step[i];
    for (int k = i + 1; k < size; ++k) sum -= hessian[size_t(k) * width + i] * step[k];
    step[i] = sum * hessian[size_t(i) * width + i];
  }
  for (int i = 0; i < size; ++i) step[i] *= scale[i];
  return 0.5 * promise;
}

struct Logistic {
  std::vector<double> design, target, mean, scale, ridge, w, good, step, gradient, hessian,
      weighted, spare;

  template <class T>
  void load(const T* X, const int64_t* codes, int64_t rows, int features, bool free) {
    const int width = padded(features + free);
    design.assign(size_t(rows) * width, 0.0);
    target.resize(rows);
    mean.assign(features, 0.0);
    scale.assign(features, 0.0);
    if (free) {
      add_rows(X, rows, features, mean.data());
      for (double& m : mean) m /= double(rows);
    }
    for (int64_t r = 0; r < rows; ++r) {
      double* z = design.data() + r * width;
      const T* x = X + r * features;
      for (int j = 0; j < features; ++j) {
        z[j] = double(x[j]) - mean[j];
        scale[j] += z[j] * z[j];
      }
      if (free) z[features] = 1.0;
      target[r] = double(codes[r]);
    }
    std::vector<double> factor(width, 1.0);
    ridge.assign(width, 0.0);
    for (int j = 0; j < features; ++j) {
      scale[j] = std::sqrt(scale[j] / double(rows));
      // A constant column leaves rounding noise after centring; its optimal weight is zero.
      const bool flat = scale[j] <= 1e-13 * std::fabs(mean[j]);
      factor[j] = flat ? 0.0 : 1.0;
      if (flat || scale[j] == 0) scale[j] = 1.0;
      factor[j] /= scale[j];
      ridge[j] = 1.0 / (scale[j] * scale[j]);
    }
    for (int64_t r = 0; r < rows; ++r) {
      double* z = design.data() + r * width;
      for (int j = 0; j < width; ++j) z[j] *= factor[j];
    }
    w.assign(width, 0.0);
    good.assign(width, 0.0);
    step.assign(width, 0.0);
    gradient.resize(width);
    hessian.resize(size_t(width) * width);
    weighted.resize(size_t(kChunk) * width);
    spare.resize(width);
  }

  // Newton from `good` on; the steps are those of `_newton` in newton.py.
  bool solve(int64_t rows, int size, double weight, double tol, int max_iter, int64_t& steps) {
    constexpr int kHalvings = 30;
    const int width = padded(size);
    double value = std::numeric_limits<double>::infinity();
    int halvings = 0;
    w = good;
    for (int pass = 0; pass < max_iter + kHalvings; ++pass) {
      double loss = evaluate(design.data(), target.data(), rows, width, w.data(), gradient.data(),
                             hessian.data(), weighted.data());
      for (int j = 0; j < size; ++j) loss += 0.5 * weight * ridge[j] * w[j] * w[j];
      if (loss <= value + 1e-12 * std::fabs(value)) {
        good = w;
        value = loss;
        halvings = 0;
        for (int j = 0; j < size; ++j) {
          gradient[j] += weight * ridge[j] * w[j];
          hessian[size_t(j) * width + j] += weight * ridge[j];
        }
        const double promise = newton_step(hessian.data(), width, size, gradient.data(),
                                           step.data(), spare.data());
        ++steps;
        const bool enough = promise <= tol * (1.0 + std::fabs(loss));
        if (enough || steps >= max_iter) {
          // The promise of a last step is its own error bound: take it and be done.
          if (enough)
            for (int j = 0; j < size; ++j) good[j] -= step[j];
          return enough;
        }
      } else if (++halvings > kHalvings) {
        return false;
      } else {
        for (double& s : step) s *= 0.5;
      }
      for (int j = 0; j < size; ++j) w[j] = good[j] - step[j];
    }
    return false;
  }
};

}  // namespace

// Gram matrices of [x - mean, y - mean, 1] of each group, in `parts` folds.
//
// X: (rows, features) floats when `single`, else doubles; folds: (rows,) part of each row, or null
// for one part; shift: (groups, features + 1) the means, zero unless `centre`;
// out: (groups, parts, features + 2, features + 2). Returns 0, or 1 when memory ran out.
EXPORT int kp_grams(const void* X, int32_t single, const double* y, const int64_t* offsets,
                    const int64_t* folds, int64_t groups, int32_t features, int32_t parts,
                    int32_t centre, double* shift, double* out) {
  try {
    std::vector<double> buffer, sums;
    const int q = features + 2;
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t begin = offsets[g], rows = offsets[g + 1] - begin;
      const int64_t* f = folds ? folds + begin : nullptr;
      double* s = shift + g * (features + 1);
      double* o = out + g * int64_t(parts) * q * q;
      if (single)
        gram(static_cast<const float*>(X) + begin * features, y + begin, rows, features, f, parts,
             centre != 0, s, o, buffer, sums);
      else
        gram(static_cast<const double*>(X) + begin * features, y + begin, rows, features, f, parts,
             centre != 0, s, o, buffer, sums);
    }
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

// Held-out squared error of ridge for each group, penalty and fold.
//
// held: (groups, parts, q, q) Gram matrices, q = features + 2, of which the first `folds` are held
// out in turn; alphas: (n,); residual: (groups, n, folds); NaN where alpha is too small beside the
// columns for normal equations to be trusted. Returns 0, or 1 when memory ran out.
EXPORT int kp_ridge_search(const double* held, int64_t groups, int32_t parts, int32_t folds,
                           int32_t features, int32_t free, const double* alphas, int64_t n,
                           double safe, double* residual) {
  try {
    const int d = features, q = d + 2;
    const int64_t lanes = (n + kLanes - 1) / kLanes;
    std::vector<double> penalty(lanes * kLanes), whole(size_t(q) * q), train(size_t(q) * q),
        system(size_t(d) * d), right(d), total(d + 1), factor((size_t(d) * d + q) * kLanes);
    for (int64_t c = 0; c < lanes * kLanes; ++c) penalty[c] = alphas[std::min(c, n - 1)];
    double found[kLanes];
    for (int64_t g = 0; g < groups; ++g) {
      const double* mine = held + g * int64_t(parts) * q * q;
      std::fill(whole.begin(), whole.end(), 0.0);
      for (int p = 0; p < parts; ++p)
        for (int i = 0; i < q * q; ++i) whole[i] += mine[size_t(p) * q * q + i];
      for (int f = 0; f < folds; ++f) {
        const double* out = mine + size_t(f) * q * q;
        for (int i = 0; i < q * q; ++i) train[i] = whole[i] - out[i];
        const double rows = std::max(train[size_t(q) * q - 1], 1.0);
        for (int j = 0; j <= d; ++j) total[j] = train[size_t(j) * q + q - 1];
        double largest = 0;
        for (int i = 0; i < d; ++i) {
          for (int j = 0; j < d; ++j)
            system[size_t(i) * d + j] =
                train[size_t(i) * q + j] - (free ? total[i] * total[j] / rows : 0.0);
          right[i] = train[size_t(i) * q + d] - (free ? total[i] * total[d] / rows : 0.0);
          largest = std::max(largest, system[size_t(i) * d + i]);
        }
        for (int64_t lane = 0; lane < lanes; ++lane) {
          solve_lanes(system.data(), right.data(), total.data(), rows, free != 0, d, out,
                      penalty.data() + lane * kLanes, found, factor.data());
          for (int k = 0; k < kLanes; ++k) {
            const int64_t c = lane * kLanes + k;
            if (c >= n) break;
            const bool good = penalty[c] >= safe * (largest + penalty[c]) && penalty[c] > 0;
            residual[(g * n + c) * folds + f] =
                good ? std::max(found[k], 0.0) : std::numeric_limits<double>::quiet_NaN();
          }
        }
      }
    }
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

// Loss, gradient and Hessian of the rows of each group at its own w, for groups of which other
// workers hold more rows.
//
// design: (rows, padded(size)) with zeros behind the first `size`; target: (rows,) 0 and 1; group k
// has the rows begin[k] to end[k]; w: (groups, size); out: (groups, 1 + size + size * size).
// Returns 0, or 1 when memory ran out.
EXPORT int kp_logistic_terms(const double* design, const double* target, const int64_t* begin,
                             const int64_t* end, int64_t groups, int32_t size, const double* w,
                             double* out) {
  try {
    const int width = padded(size);
    std::vector<double> at(width), gradient(width), hessian(size_t(width) * width),
        weighted(size_t(kChunk) * width);
    for (int64_t g = 0; g < groups; ++g) {
      std::copy(w + g * size, w + (g + 1) * size, at.begin());
      double* to = out + g * (1 + size + int64_t(size) * size);
      *to++ = evaluate(design + begin[g] * width, target + begin[g], end[g] - begin[g], width,
                       at.data(), gradient.data(), hessian.data(), weighted.data());
      for (int j = 0; j < size; ++j) *to++ = gradient[j];
      for (int i = 0; i < size; ++i)
        for (int j = 0; j < size; ++j)
          *to++ = hessian[size_t(std::min(i, j)) * width + std::max(i, j)];
    }
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

// Two-class logistic regression of each group under each penalty, from strong to weak.
//
// codes: (rows,) 0 and 1; weights: (n,) 1 / C, falling; coef: (n, groups, features) and intercept:
// (n, groups) in the units of the data; steps, converged: (n, groups). Returns 0, or 1 when memory
// ran out.
EXPORT int kp_logistic(const void* X, int32_t single, const int64_t* codes, const int64_t* offsets,
                       int64_t groups, int32_t features, int32_t free, const double* weights,
                       int64_t n, double tol, int32_t max_iter, double* coef, double* intercept,
                       int64_t* steps, uint8_t* converged) {
  try {
    Logistic model;
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t begin = offsets[g], rows = offsets[g + 1] - begin;
      if (single)
        model.load(static_cast<const float*>(X) + begin * features, codes + begin, rows, features,
                   free != 0);
      else
        model.load(static_cast<const double*>(X) + begin * features, codes + begin, rows, features,
                   free != 0);
      for (int64_t c = 0; c < n; ++c) {
        const int64_t at = c * groups + g;
        steps[at] = 0;
        converged[at] =
            model.solve(rows, features + (free != 0), weights[c], tol, max_iter, steps[at]);
        double constant = free ? model.good[features] : 0.0;
        for (int j = 0; j < features; ++j) {
          const double w = model.good[j] / model.scale[j];
          coef[at * features + j] = w;
          constant -= free ? w * model.mean[j] : 0.0;
        }
        intercept[at] = constant;
      }
    }
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}
