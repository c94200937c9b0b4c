/* CPU kernels: gather + unpack + dequantize, encode, and neighbour sampling.
 *
 * Plain C99 without Python's headers: loaded through ctypes, so one library serves every Python.
 * Row indices are checked once, by bf_check, before any other function is given them; codebook and
 * column indices are checked where they are read.
 *
 * Results are those of kernels/reference.py bit for bit. That needs -ffp-contract=off: a fused
 * multiply-add would round once where torch rounds twice.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(_WIN32)
#define API __declspec(dllexport)
#else
#define API __attribute__((visibility("default")))
#endif

/* One library for old and new x86: the loader picks the version for the CPU at hand. The build tries
 * what its compiler understands. (arch=haswell and the like would match that one model alone.)
 */
#if defined(BIFEAT_CLONES) && BIFEAT_CLONES == 2
#define WIDE __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#elif defined(BIFEAT_CLONES) && BIFEAT_CLONES == 1
#define WIDE __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define WIDE
#endif

#if defined(__GNUC__)
#define PREFETCH(p) __builtin_prefetch(p)
#else
#define PREFETCH(p) ((void)0)
#endif

#define AHEAD 16         /* a row is asked for while the row this many before it is worked on */
#define AHEAD_BYTES 1024 /* of a wider row the processor foresees the rest by itself */

API int32_t bf_abi(void) { return 2; }

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

#define ALWAYS static inline __attribute__((always_inline))

ALWAYS int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

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

/* Returns whether every code of the row is in the codebook; writes up to the first that is not. */
ALWAYS int row_vector(const uint8_t *restrict in, int64_t columns, const int code_bytes,
                      int64_t parts, int64_t length, const int64_t width,
                      const float *restrict book, float *restrict to) {
  int64_t whole = columns / width;
  for (int64_t s = 0; s < parts; s++) {
    int64_t code = 0;
    for (int c = 0; c < code_bytes; c++) code |= (int64_t)in[s * code_bytes + c] << (8 * c);
    if (code >= length) return 0;
    const float *entry = book + (s * length + code) * width;
    if (s < whole) memcpy(to + s * width, entry, (size_t)width * sizeof(float));
    else memcpy(to + s * width, entry, (size_t)(columns - s * width) * sizeof(float));
  }
  return 1;
}

ALWAYS int64_t rows_vector(const uint8_t *codes, int64_t stride, const int64_t *index, int64_t m,
                           int64_t columns, const int code_bytes, int64_t parts, int64_t length,
                           const int64_t width, const float *book, float *out) {
  EACH_ROW(parts * code_bytes,
           if (!row_vector(in, columns, code_bytes, parts, length, width, book, to)) return i);
  return -1;
}

/* Returns the first row that holds a code outside the codebook, or -1. */
WIDE API int64_t bf_vector(const uint8_t *codes, int64_t stride, const int64_t *index, int64_t m,
                           int64_t columns, int32_t code_bytes, int64_t parts, int64_t length,
                           int64_t width, const float *book, float *out) {
  /* The usual shapes as constants: each copy becomes one or two moves. */
#define VECTOR(b, w) \
  if (code_bytes == b && width == w) \
    return rows_vector(codes, stride, index, m, columns, b, parts, length, w, book, out)
  VECTOR(1, 4);
  VECTOR(1, 8);
  VECTOR(1, 16);
  VECTOR(2, 8);
  VECTOR(2, 16);
#undef VECTOR
  return rows_vector(codes, stride, index, m, columns, code_bytes, parts, length, width, book, out);
}

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

/* The nearest of `length` centroids for each row: least offset[k] - sum_w x[w] * book[w][k], the first
 * where several are equal. book is transposed, [width][padded], with `padded` a multiple of 16 and
 * offset infinite past `length`. score is room for `padded` floats.
 */
WIDE API void bf_assign(const float *x, int64_t stride, int64_t n, int64_t width, int64_t padded,
                        const float *book, const float *offset, float *score, int64_t *code,
                        float *least) {
  for (int64_t i = 0; i < n; i++) {
    const float *row = x + i * stride;
    memcpy(score, offset, (size_t)padded * sizeof(float));
    for (int64_t w = 0; w < width; w++) {
      const float *restrict column = book + w * padded;
      float value = row[w];
      for (int64_t k = 0; k < padded; k++) score[k] -= value * column[k];
    }
    float best[16];
    int32_t at[16];
    for (int l = 0; l < 16; l++) {
      best[l] = INFINITY;
      at[l] = 0;
    }
    for (int64_t k = 0; k < padded; k += 16)
      for (int l = 0; l < 16; l++) {
        int closer = score[k + l] < best[l];
        best[l] = closer ? score[k + l] : best[l];
        at[l] = closer ? (int32_t)(k + l) : at[l];
      }
    int chosen = 0;
    for (int l = 1; l < 16; l++)
      if (best[l] < best[chosen] || (best[l] == best[chosen] && at[l] < at[chosen])) chosen = l;
    code[i] = at[chosen];
    least[i] = best[chosen];
  }
}

/* ------------------------------------------------------------------ neighbour sampling
 * A table numbers the nodes of one type in order of first appearance. Its key is the node, and in
 * disjoint sampling the node together with the seed it belongs to.
 */
typedef struct {
  int64_t *node;   /* by local number */
  int64_t *batch;  /* by local number; NULL unless disjoint */
  int32_t *slot;   /* open addressing: local number + 1, or 0 */
  int64_t count, room, mask;
} Table;

/* The finalizer of splitmix64 (Steele, Lea, Flood 2014). */
static inline uint64_t mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
  return z ^ (z >> 31);
}

/* A number below `bound` (< 2^32), a pure function of key, who draws and the how-manieth draw. */
static inline int64_t draw(uint64_t key, int64_t who, int64_t which, int64_t bound) {
  uint64_t counter = ((uint64_t)who << 20) + (uint64_t)which + 1;
  uint64_t z = mix(key + counter * 0x9E3779B97F4A7C15ULL);
  return (int64_t)(((z >> 32) * (uint64_t)bound) >> 32);
}

static inline uint64_t place(int64_t node, int64_t batch) {
  return mix((uint64_t)node * 0x9E3779B97F4A7C15ULL + (uint64_t)batch);
}

API void bf_table_free(Table *t) {
  if (!t) return;
  free(t->node);
  free(t->batch);
  free(t->slot);
  free(t);
}

API Table *bf_table_new(int64_t room, int32_t disjoint) {
  Table *t = calloc(1, sizeof(Table));
  if (!t) return NULL;
  t->room = 64;
  while (t->room < room) t->room *= 2;
  t->mask = 2 * t->room - 1;
  t->node = malloc((size_t)t->room * sizeof(int64_t));
  t->batch = disjoint ? malloc((size_t)t->room * sizeof(int64_t)) : NULL;
  t->slot = calloc((size_t)(2 * t->room), sizeof(int32_t));
  if (!t->node || !t->slot || (disjoint && !t->batch)) {
    bf_table_free(t);
    return NULL;
  }
  return t;
}

static int grow(Table *t) {
  int64_t room = 2 * t->room;
  int64_t *node = realloc(t->node, (size_t)room * sizeof(int64_t));
  if (!node) return -1;
  t->node = node;
  if (t->batch) {
    int64_t *batch = realloc(t->batch, (size_t)room * sizeof(int64_t));
    if (!batch) return -1;
    t->batch = batch;
  }
  int32_t *slot = calloc((size_t)(2 * room), sizeof(int32_t));
  if (!slot) return -1;
  free(t->slot);
  t->slot = slot;
  t->room = room;
  t->mask = 2 * room - 1;
  for (int64_t i = 0; i < t->count; i++) {
    uint64_t at = place(t->node[i], t->batch ? t->batch[i] : 0) & (uint64_t)t->mask;
    while (t->slot[at]) at = (at + 1) & (uint64_t)t->mask;
    t->slot[at] = (int32_t)(i + 1);
  }
  return 0;
}

/* Returns the local number of a node, new or known; -2 when memory is out. */
static inline int64_t number(Table *t, int64_t node, int64_t batch) {
  uint64_t at = place(node, batch) & (uint64_t)t->mask;
  while (t->slot[at]) {
    int64_t i = t->slot[at] - 1;
    if (t->node[i] == node && (!t->batch || t->batch[i] == batch)) return i;
    at = (at + 1) & (uint64_t)t->mask;
  }
  if (t->count == t->room) {
    if (grow(t)) return -2;
    at = place(node, batch) & (uint64_t)t->mask;
    while (t->slot[at]) at = (at + 1) & (uint64_t)t->mask;
  }
  t->node[t->count] = node;
  if (t->batch) t->batch[t->count] = batch;
  t->slot[at] = (int32_t)(t->count + 1);
  return t->count++;
}

API int64_t bf_table_count(const Table *t) { return t->count; }

API void bf_table_read(const Table *t, int64_t from, int64_t *node, int64_t *batch) {
  size_t bytes = (size_t)(t->count - from) * sizeof(int64_t);
  memcpy(node, t->node + from, bytes);
  if (batch && t->batch) memcpy(batch, t->batch + from, bytes);
}

/* Numbers the seeds 0, 1, ... in their order; one that comes twice is found under its first number.
 * Returns 0, or -2 when memory is out.
 */
API int64_t bf_table_seed(Table *t, const int64_t *node, const int64_t *batch, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    int64_t before = t->count;
    int64_t at = number(t, node[i], t->batch ? batch[i] : 0);
    if (at < 0) return at;
    if (t->count > before) continue;
    if (t->count == t->room && grow(t)) return -2;
    t->node[t->count] = node[i];
    if (t->batch) t->batch[t->count] = batch[i];
    t->count++;
  }
  return 0;
}

/* How many entries of an ascending column are <= bound. */
static int64_t until(const int64_t *time, int64_t begin, int64_t end, int64_t bound) {
  int64_t low = begin, high = end;
  while (low < high) {
    int64_t middle = low + (high - low) / 2;
    if (time[middle] <= bound) low = middle + 1;
    else high = middle;
  }
  return low - begin;
}

/* Most edges one hop can give: the room its outputs need. */
API int64_t bf_hop_room(const int64_t *colptr, const int64_t *node, int64_t n, int64_t k) {
  if (k >= 0) return n * k;
  int64_t total = 0;
  for (int64_t i = 0; i < n; i++) total += colptr[node[i] + 1] - colptr[node[i]];
  return total;
}

/* One hop of one edge type: draws up to k in-neighbours (k < 0: all) of each frontier node.
 *
 * frontier: n nodes whose local numbers (in the table of their own type) are first, first + 1, ...
 * time/bound: ascending times of each column's edges and the latest allowed per frontier node, or
 * NULL. Writes local source, local destination and edge position; returns the number of edges, or
 * -2 when memory is out.
 */
API int64_t bf_hop(Table *sources, const int64_t *colptr, const int64_t *row,
                   const int64_t *frontier, const int64_t *batch, int64_t first, int64_t n,
                   int64_t k, int32_t replace, int32_t last, uint64_t key, const int64_t *time,
                   const int64_t *bound, int64_t *out_row, int64_t *out_col, int64_t *out_edge) {
  int64_t made = 0, room = 0;
  uint8_t *taken = NULL; /* one bit a neighbour, for large k; all zero between nodes */
  for (int64_t i = 0; i < n; i++) {
    int64_t begin = colptr[frontier[i]], end = colptr[frontier[i] + 1];
    int64_t degree = time ? until(time, begin, end, bound[i]) : end - begin;
    int64_t who = first + i, from = made;
    if (i + AHEAD < n) PREFETCH(colptr + frontier[i + AHEAD]);
    if (degree == 0) continue;
    if (k < 0 || ((last || !replace) && k >= degree)) {
      for (int64_t j = 0; j < degree; j++) out_edge[made++] = begin + j;
    } else if (last) {
      for (int64_t j = degree - k; j < degree; j++) out_edge[made++] = begin + j;
    } else if (replace) {
      for (int64_t j = 0; j < k; j++) out_edge[made++] = begin + draw(key, who, j, degree);
    } else if (k <= 32) { /* Floyd: k distinct of degree, in k draws */
      for (int64_t j = degree - k; j < degree; j++) {
        int64_t pick = begin + draw(key, who, j - (degree - k), j + 1);
        for (int64_t p = from; p < made; p++)
          if (out_edge[p] == pick) {
            pick = begin + j;
            break;
          }
        out_edge[made++] = pick;
      }
    } else {
      if (degree > room) {
        free(taken);
        taken = calloc((size_t)(degree + 7) / 8, 1);
        if (!taken) return -2;
        room = degree;
      }
      for (int64_t j = degree - k; j < degree; j++) {
        int64_t pick = draw(key, who, j - (degree - k), j + 1);
        if (taken[pick >> 3] >> (pick & 7) & 1) pick = j;
        taken[pick >> 3] |= (uint8_t)(1 << (pick & 7));
        out_edge[made++] = begin + pick;
      }
      for (int64_t p = from; p < made; p++) taken[(out_edge[p] - begin) >> 3] = 0;
    }
    for (int64_t p = from; p < made; p++) out_col[p] = who;
  }
  free(taken);
  /* Numbering in a second loop: its scattered reads do not wait for the draws. */
  for (int64_t p = 0; p < made; p++) {
    if (p + AHEAD < made) PREFETCH(row + out_edge[p + AHEAD]);
    int64_t local = number(sources, row[out_edge[p]], batch ? batch[out_col[p] - first] : 0);
    if (local < 0) return local;
    out_row[p] = local;
  }
  return made;
}

/* Compressed columns: stable counting sort of edges by destination. Returns -1 or the first bad. */
API int64_t bf_csc(const int64_t *source, const int64_t *target, int64_t edges, int64_t sources,
                   int64_t targets, int64_t *colptr, int64_t *row, int64_t *edge_id) {
  memset(colptr, 0, (size_t)(targets + 1) * sizeof(int64_t));
  for (int64_t e = 0; e < edges; e++) {
    if ((uint64_t)target[e] >= (uint64_t)targets || (uint64_t)source[e] >= (uint64_t)sources)
      return e;
    colptr[target[e] + 1]++;
  }
  for (int64_t v = 0; v < targets; v++) colptr[v + 1] += colptr[v];
  for (int64_t e = 0; e < edges; e++) {
    int64_t at = colptr[target[e]]++;
    row[at] = source[e];
    edge_id[at] = e;
  }
  for (int64_t v = targets; v > 0; v--) colptr[v] = colptr[v - 1];
  colptr[0] = 0;
  return -1;
}
