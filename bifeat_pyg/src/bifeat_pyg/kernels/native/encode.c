/* From floats to codes, and what that lost. */
#include "common.h"

static inline void plane_encode(const float *restrict x, int64_t n, int shift, float top,
                                const float *restrict low, const float *restrict inverse,
                                uint8_t *restrict out) {
  for (int64_t j = 0; j < n; j++) {
    float code = rintf((x[j] - low[j]) * inverse[j]);
    code = code < 0 ? 0 : code;
    code = code > top ? top : code;
    out[j] |= (uint8_t)((int32_t)code << shift);
  }
}

WIDE API void bf_affine_encode(const float *x, int64_t n, int64_t columns, int32_t bits,
                               const float *low, const float *inverse, uint8_t *out,
                               int64_t stride) {
  int64_t bytes = bits == 16 ? 2 * columns : (columns * bits + 7) / 8;
  float top = (float)((1 << bits) - 1);
  for (int64_t i = 0; i < n; i++) {
    const float *from = x + i * columns;
    uint8_t *to = out + i * stride;
    if (bits == 16) {
      for (int64_t j = 0; j < columns; j++) {
        float code = rintf((from[j] - low[j]) * inverse[j]);
        code = code < 0 ? 0 : code;
        code = code > top ? top : code;
        to[2 * j] = (uint8_t)((int32_t)code & 0xFF);
        to[2 * j + 1] = (uint8_t)((int32_t)code >> 8);
      }
      continue;
    }
    memset(to, 0, (size_t)bytes);
    int shift = 8 - bits;
    for (int64_t start = 0; start < columns; start += bytes, shift -= bits) {
      int64_t part = columns - start < bytes ? columns - start : bytes;
      plane_encode(from + start, part, shift, top, low + start, inverse + start, to);
    }
  }
}

/* Adds up by column, in double: squares of y - x, and squares of x. */
WIDE API void bf_errors(const float *restrict x, const float *restrict y, int64_t n, int64_t columns,
                        double *restrict squared, double *restrict power) {
  for (int64_t i = 0; i < n; i++, x += columns, y += columns)
    for (int64_t j = 0; j < columns; j++) {
      double value = x[j], difference = y[j] - x[j];
      squared[j] += difference * difference;
      power[j] += value * value;
    }
}

#define LANES 16 /* floats of a run of scores; `padded` is a multiple of it */
#define RUNS 4   /* runs of scores that stay in registers over the columns */

#if defined(__GNUC__)
/* As vectors, because a compiler keeps these in registers, and an array of floats in memory. */
typedef float Run __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t Mask __attribute__((vector_size(4 * LANES), aligned(4)));
typedef struct {
  Run least;
  Mask at;
} Best;

ALWAYS Run run_at(const float *from) {
  Run made;
  memcpy(&made, from, sizeof made);
  return made;
}

/* Takes the scores from centroid number `from` on where they are less than the best so far. */
ALWAYS void keep(Best *best, Run score, int32_t from, Mask lanes) {
  const Mask closer = score < best->least;
  best->least = (Run)(((Mask)score & closer) | ((Mask)best->least & ~closer));
  best->at = ((lanes + from) & closer) | (best->at & ~closer);
}

/* Scores of `runs` runs of centroids (a constant) from number `from` on. */
ALWAYS void closest(const float *row, int64_t width, int64_t padded, const float *book,
                    const float *offset, int64_t from, const int runs, Mask lanes, Best *best) {
  Run score[RUNS];
  for (int r = 0; r < runs; r++) score[r] = run_at(offset + from + r * LANES);
  for (int64_t w = 0; w < width; w++) {
    const float *column = book + w * padded + from;
    for (int r = 0; r < runs; r++) score[r] -= row[w] * run_at(column + r * LANES);
  }
  for (int r = 0; r < runs; r++) keep(best, score[r], (int32_t)from + r * LANES, lanes);
}
#else
typedef int Mask;
typedef struct {
  float least[LANES];
  int32_t at[LANES];
} Best;

ALWAYS void closest(const float *row, int64_t width, int64_t padded, const float *book,
                    const float *offset, int64_t from, const int runs, Mask lanes, Best *best) {
  (void)lanes;
  for (int k = 0; k < runs * LANES; k++) {
    float score = offset[from + k];
    for (int64_t w = 0; w < width; w++) score -= row[w] * book[w * padded + from + k];
    if (score < best->least[k % LANES]) {
      best->least[k % LANES] = score;
      best->at[k % LANES] = (int32_t)(from + k);
    }
  }
}
#endif

/* The nearest of `length` centroids for each row: least offset[k] - sum_w x[w] * book[w][k], the first
 * where several are equal. book is transposed, [width][padded], with `padded` a multiple of 16 and
 * offset infinite past `length`.
 */
WIDE API void bf_assign(const float *x, int64_t stride, int64_t n, int64_t width, int64_t padded,
                        const float *book, const float *offset, int64_t *code, float *least_score) {
  Mask lanes = {0};
#if defined(__GNUC__)
  for (int l = 0; l < LANES; l++) lanes[l] = l;
#endif
  for (int64_t i = 0; i < n; i++) {
    const float *row = x + i * stride;
    Best best;
    for (int l = 0; l < LANES; l++) {
      best.least[l] = INFINITY;
      best.at[l] = 0;
    }
    int64_t k = 0;
    for (; k + RUNS * LANES <= padded; k += RUNS * LANES)
      closest(row, width, padded, book, offset, k, RUNS, lanes, &best);
    for (; k < padded; k += LANES) closest(row, width, padded, book, offset, k, 1, lanes, &best);
    int chosen = 0;
    for (int l = 1; l < LANES; l++)
      if (best.least[l] < best.least[chosen] ||
          (best.least[l] == best.least[chosen] && best.at[l] < best.at[chosen]))
        chosen = l;
    code[i] = best.at[chosen];
    least_score[i] = best.least[chosen];
  }
}
