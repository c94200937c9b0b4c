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
#define HELD 64  /* floats of scores that stay in registers over the columns */

/* Scores of `n` centroids (a constant) from number `from` on, and the least of them by lane. */
ALWAYS void closest(const float *row, int64_t width, int64_t padded, const float *book,
                    const float *offset, int64_t from, const int n, float *best, int32_t *at) {
  float score[HELD];
  for (int k = 0; k < n; k++) score[k] = offset[from + k];
  for (int64_t w = 0; w < width; w++) {
    const float value = row[w], *column = book + w * padded + from;
    for (int k = 0; k < n; k++) score[k] -= value * column[k];
  }
  for (int k = 0; k < n; k += LANES)
    for (int l = 0; l < LANES; l++) {
      int closer = score[k + l] < best[l];
      best[l] = closer ? score[k + l] : best[l];
      at[l] = closer ? (int32_t)(from + k + l) : at[l];
    }
}

/* The nearest of `length` centroids for each row: least offset[k] - sum_w x[w] * book[w][k], the first
 * where several are equal. book is transposed, [width][padded], with `padded` a multiple of 16 and
 * offset infinite past `length`.
 */
WIDE API void bf_assign(const float *x, int64_t stride, int64_t n, int64_t width, int64_t padded,
                        const float *book, const float *offset, int64_t *code, float *least_score) {
  for (int64_t i = 0; i < n; i++) {
    const float *row = x + i * stride;
    float best[LANES];
    int32_t at[LANES];
    for (int l = 0; l < LANES; l++) {
      best[l] = INFINITY;
      at[l] = 0;
    }
    int64_t k = 0;
    for (; k + HELD <= padded; k += HELD)
      closest(row, width, padded, book, offset, k, HELD, best, at);
    for (; k < padded; k += LANES)
      closest(row, width, padded, book, offset, k, LANES, best, at);
    int chosen = 0;
    for (int l = 1; l < LANES; l++)
      if (best[l] < best[chosen] || (best[l] == best[chosen] && at[l] < at[chosen])) chosen = l;
    code[i] = at[chosen];
    least_score[i] = best[chosen];
  }
}
