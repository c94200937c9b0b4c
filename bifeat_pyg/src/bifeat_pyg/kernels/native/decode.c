/* Rows of a packed table: checked, gathered, and decoded as they are gathered. */
#include "common.h"

#define AHEAD_BYTES 1024 /* of a wider row the processor foresees the rest by itself */

API int32_t bf_abi(void) { return BIFEAT_ABI; }

/* Returns the first position whose index is outside [0, rows), or -1. */
API int64_t bf_check(const int64_t *index, int64_t m, int64_t rows) {
  for (int64_t i = 0; i < m; i++)
    if ((uint64_t)index[i] >= (uint64_t)rows) return i;
  return -1;
}

/* Row i of a gather, or of the table itself when there is no index. */
static inline const uint8_t *row_at(const uint8_t *codes, int64_t stride, const int64_t *index,
                                    int64_t i) {
  return codes + (index ? index[i] : i) * stride;
}

static inline void ask_ahead(const uint8_t *codes, int64_t stride, int64_t bytes,
                             const int64_t *index, int64_t i, int64_t m) {
  if (!index || i + AHEAD >= m) return;
  const uint8_t *next = codes + index[i + AHEAD] * stride;
  for (int64_t at = 0; at < bytes && at < AHEAD_BYTES; at += 64) PREFETCH(next + at);
}

API void bf_gather(const uint8_t *codes, int64_t stride, int64_t bytes, const int64_t *index,
                   int64_t m, uint8_t *out) {
  for (int64_t i = 0; i < m; i++) {
    ask_ahead(codes, stride, bytes, index, i, m);
    memcpy(out + i * bytes, codes + index[i] * stride, (size_t)bytes);
  }
}

/* Results larger than the caches are written past them: an ordinary store first reads each line of
 * memory that it is about to overwrite. Rows are decoded into a small buffer and leave it in whole
 * lines; this way the decoding itself is plain C, vectorized for each CPU by the compiler.
 */
#define HELD 2048 /* floats of the buffer: 8 KiB, a quarter of a small first-level cache */
#define LARGE (8 << 20)
#if defined(__SSE2__)
#include <emmintrin.h>
ALWAYS void leave(float *to, const float *from, int64_t n) {
  int64_t k = 0;
  for (; k + 4 <= n; k += 4) _mm_stream_ps(to + k, _mm_load_ps(from + k));
  for (; k < n; k++) to[k] = from[k];
}
ALWAYS void settle(void) { _mm_sfence(); }
#define STREAMS 1
#else
ALWAYS void leave(float *to, const float *from, int64_t n) { memcpy(to, from, (size_t)n * sizeof(float)); }
ALWAYS void settle(void) {}
#define STREAMS 0
#endif

/* Rows that are decoded together before they leave the buffer, or 0 to write results directly. A
 * multiple of four rows, or of four columns, so that each turn starts on 16 bytes.
 */
ALWAYS int64_t rows_held(const float *out, int64_t m, int64_t columns) {
  if (!STREAMS || columns < 1 || (uintptr_t)out % 16 || m * columns * 4 < LARGE) return 0;
  int64_t tall = HELD / columns;
  return columns % 4 ? tall & ~3LL : tall;
}

/* Runs `decode`, which reads the packed row `in` number i and writes the floats at `to`, for each. */
#define EACH_ROW(bytes, decode)                                             \
  do {                                                                      \
    __attribute__((aligned(64))) float held[HELD];                          \
    const int64_t tall = rows_held(out, m, columns), turn = tall ? tall : m; \
    for (int64_t first = 0; first < m; first += turn) {                     \
      const int64_t stop = least(m, first + turn);                          \
      float *to = tall ? held : out + first * columns;                      \
      for (int64_t i = first; i < stop; i++, to += columns) {               \
        ask_ahead(codes, stride, bytes, index, i, m);                       \
        const uint8_t *in = row_at(codes, stride, index, i);                \
        decode;                                                             \
      }                                                                     \
      if (tall) leave(out + first * columns, held, (stop - first) * columns); \
    }                                                                       \
    if (tall) settle();                                                     \
  } while (0)

/* How many bytes of a row hold a code in every plane: the last plane may be shorter. */
ALWAYS int64_t full_bytes(int64_t columns, int64_t plane, int planes) {
  int64_t last = columns - (planes - 1) * plane;
  return last < 0 ? 0 : least(last, plane);
}

/* Inner loops of a constant length become straight runs of vector instructions. `chunk` bytes: short
 * rows (128 columns of 1 bit are 16 bytes) must not fall to what a longer loop leaves over.
 */
ALWAYS void row_affine(const uint8_t *restrict in, int64_t columns, const int bits, const int chunk,
                       const float *restrict low, const float *restrict step, float *restrict to) {
  const int planes = 8 / bits, mask = (1 << bits) - 1;
  int64_t plane = (columns * bits + 7) / 8;
  int64_t full = full_bytes(columns, plane, planes) / chunk * chunk;
  for (int64_t j = 0; j < full; j += chunk)
    for (int p = 0; p < planes; p++) {
      const int64_t at = p * plane + j;
      const int shift = 8 - bits * (p + 1);
      for (int k = 0; k < chunk; k++)
        to[at + k] = (float)((in[j + k] >> shift) & mask) * step[at + k] + low[at + k];
    }
  for (int p = 0; p < planes; p++) {
    const int64_t start = p * plane, n = least(plane, columns - start);
    const int shift = 8 - bits * (p + 1);
    for (int64_t j = full; j < n; j++)
      to[start + j] = (float)((in[j] >> shift) & mask) * step[start + j] + low[start + j];
  }
}

WIDE API void bf_affine(const uint8_t *codes, int64_t stride, const int64_t *index, int64_t m,
                        int64_t columns, int32_t bits, const float *low, const float *step,
                        float *out) {
  int64_t bytes = bits == 16 ? 2 * columns : (columns * bits + 7) / 8;
  switch (bits) { /* constants, so that each loop is unrolled for its planes */
  case 1: EACH_ROW(bytes, row_affine(in, columns, 1, 16, low, step, to)); return;
  case 2: EACH_ROW(bytes, row_affine(in, columns, 2, 16, low, step, to)); return;
  case 4: EACH_ROW(bytes, row_affine(in, columns, 4, 64, low, step, to)); return;
  case 8: EACH_ROW(bytes, row_affine(in, columns, 8, 64, low, step, to)); return;
  }
  EACH_ROW(bytes, for (int64_t j = 0; j < columns; j++)
    to[j] = (float)(in[2 * j] | in[2 * j + 1] << 8) * step[j] + low[j]);
}

#if defined(__GNUC__) && !defined(__clang__)
#define SHUFFLES 1
typedef int32_t Ints __attribute__((vector_size(64)));
typedef float Floats __attribute__((vector_size(64)));
#else
#define SHUFFLES 0
#endif

ALWAYS void row_lut(const uint8_t *restrict in, int64_t columns, const int bits,
                    const float *restrict values, float *restrict to) {
  const int planes = 8 / bits, mask = (1 << bits) - 1;
  int64_t plane = (columns * bits + 7) / 8, full = 0;
#if SHUFFLES
  /* Up to 16 values stay in one register, and a look-up is a permutation of it. */
  if (bits <= 4) {
    Floats table = {0};
    memcpy(&table, values, (size_t)(mask + 1) * sizeof(float));
    full = full_bytes(columns, plane, planes) & ~15LL;
    for (int64_t j = 0; j < full; j += 16)
      for (int p = 0; p < planes; p++) {
        const int shift = 8 - bits * (p + 1);
        int32_t each[16];
        for (int k = 0; k < 16; k++) each[k] = (in[j + k] >> shift) & mask;
        Ints code;
        memcpy(&code, each, sizeof code);
        Floats value = __builtin_shuffle(table, code);
        memcpy(to + p * plane + j, &value, sizeof value);
      }
  }
#endif
  for (int p = 0; p < planes; p++) {
    int64_t start = p * plane, n = least(plane, columns - start);
    for (int64_t j = full; j < n; j++)
      to[start + j] = values[(in[j] >> (8 - bits * (p + 1))) & mask];
  }
}

WIDE API void bf_lut(const uint8_t *codes, int64_t stride, const int64_t *index, int64_t m,
                     int64_t columns, int32_t bits, const float *values, float *out) {
  int64_t bytes = bits == 16 ? 2 * columns : (columns * bits + 7) / 8;
  switch (bits) {
  case 1: EACH_ROW(bytes, row_lut(in, columns, 1, values, to)); return;
  case 2: EACH_ROW(bytes, row_lut(in, columns, 2, values, to)); return;
  case 4: EACH_ROW(bytes, row_lut(in, columns, 4, values, to)); return;
  case 8: EACH_ROW(bytes, row_lut(in, columns, 8, values, to)); return;
  }
  EACH_ROW(bytes, for (int64_t j = 0; j < columns; j++) to[j] = values[in[2 * j] | in[2 * j + 1] << 8]);
}

/* Reads one code, low byte first. */
ALWAYS int64_t code_at(const uint8_t *in, const int bytes) {
  int64_t code = 0;
  for (int c = 0; c < bytes; c++) code |= (int64_t)in[c] << (8 * c);
  return code;
}

/* Returns whether every code of the row is in the codebook; writes up to the first that is not.
 *
 * A part of the row has `stages` codes, each with a codebook of its own; their entries are added up
 * in that order.
 */
ALWAYS int row_vector(const uint8_t *restrict in, int64_t columns, const int code_bytes,
                      int64_t parts, const int64_t stages, int64_t length, const int64_t width,
                      const float *restrict book, float *restrict to) {
  const int64_t whole = columns / width, room = length * width;
  for (int64_t s = 0; s < parts; s++, to += width) {
    const int64_t n = s < whole ? width : columns - s * width;
    for (int64_t k = 0; k < stages; k++, in += code_bytes, book += room) {
      const int64_t code = code_at(in, code_bytes);
      if (code >= length) return 0;
      const float *entry = book + code * width;
      /* Whole parts have a length that the compiler may know. */
      if (k == 0 && s < whole) memcpy(to, entry, (size_t)width * sizeof(float));
      else if (k == 0) memcpy(to, entry, (size_t)n * sizeof(float));
      else if (s < whole) for (int64_t j = 0; j < width; j++) to[j] += entry[j];
      else for (int64_t j = 0; j < n; j++) to[j] += entry[j];
    }
  }
  return 1;
}

ALWAYS int64_t rows_vector(const uint8_t *codes, int64_t stride, const int64_t *index, int64_t m,
                           int64_t columns, const int code_bytes, int64_t parts,
                           const int64_t stages, int64_t length, const int64_t width,
                           const float *book, float *out) {
  EACH_ROW(parts * stages * code_bytes,
           if (!row_vector(in, columns, code_bytes, parts, stages, length, width, book, to))
             return i);
  return -1;
}

/* Returns the first row that holds a code outside the codebook, or -1. */
WIDE API int64_t bf_vector(const uint8_t *codes, int64_t stride, const int64_t *index, int64_t m,
                           int64_t columns, int32_t code_bytes, int64_t parts, int64_t stages,
                           int64_t length, int64_t width, const float *book, float *out) {
  /* The usual shapes as constants: each copy becomes one or two moves. */
#define VECTOR(b, k, w) \
  if (code_bytes == b && stages == k && width == w) \
    return rows_vector(codes, stride, index, m, columns, b, parts, k, length, w, book, out)
  VECTOR(1, 1, 4);
  VECTOR(1, 1, 8);
  VECTOR(1, 1, 16);
  VECTOR(2, 1, 8);
  VECTOR(2, 1, 16);
  VECTOR(1, 2, 16);
  VECTOR(1, 4, 32);
  VECTOR(1, 8, 64);
#undef VECTOR
  return rows_vector(codes, stride, index, m, columns, code_bytes, parts, stages, length, width,
                     book, out);
}
