/* Neighbour sampling, and the columns of edges that it reads. */
#include "common.h"

/* A table numbers the nodes of one type in order of first appearance. Its key is the node, and in
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
