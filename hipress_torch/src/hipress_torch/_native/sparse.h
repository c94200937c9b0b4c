/* Selection of the largest elements, for the sparse codecs.
 *
 * A message: the number of pairs (int32), 12 bytes of nothing, `capacity` int32 indices within the
 * segment in rising order, `capacity` float32 values. What is sent is taken out of the residual.
 */
#include <stdlib.h>

enum { HP_SAMPLE = 8192 };

/* The m-th largest of n values, m from 1; reorders them. */
static float hp_kth_largest(float *a, int64_t n, int64_t m) {
    int64_t low = 0, high = n - 1, want = m - 1;
    while (low < high) {
        float pivot = a[(low + high) / 2];
        int64_t i = low, j = high;
        while (i <= j) {
            while (a[i] > pivot) i++;
            while (a[j] < pivot) j--;
            if (i <= j) {
                float t = a[i];
                a[i++] = a[j];
                a[j--] = t;
            }
        }
        if (want <= j) high = j;
        else if (want >= i) low = i;
        else break;
    }
    return a[want];
}

/* The m-th largest of n values as above; for a small m the m largest ones found so far are kept in
 * order, and almost every value costs one comparison, which is foreseen. */
enum { HP_FEW = 64 };
static float hp_mth_largest(float *a, int64_t n, int64_t m) {
    if (m > HP_FEW) return hp_kth_largest(a, n, m);
    float best[HP_FEW];
    for (int64_t i = 0; i < m; i++) best[i] = -1.0f;
    for (int64_t i = 0; i < n; i++) {
        if (!(a[i] > best[m - 1])) continue;
        int64_t at = m - 1;
        for (; at > 0 && best[at - 1] < a[i]; at--) best[at] = best[at - 1];
        best[at] = a[i];
    }
    return best[m - 1];
}

/* Adds a message's values to y; `before` takes what was there, to put it back. */
static inline void hp_scatter_add(float *y, const uint8_t *in, int64_t n, int64_t capacity,
                                  float *before) {
    int32_t pairs;
    memcpy(&pairs, in, 4);
    for (int64_t i = 0; i < pairs && i < capacity; i++) {
        int32_t at;
        float value;
        memcpy(&at, in + 16 + 4 * i, 4);
        memcpy(&value, in + 16 + 4 * capacity + 4 * i, 4);
        if (at < 0 || at >= n) continue;
        if (before) before[i] = y[at];
        y[at] += value;
    }
}

static inline void hp_scatter_back(float *y, const uint8_t *in, int64_t n, int64_t capacity,
                                   const float *before) {
    int32_t pairs;
    memcpy(&pairs, in, 4);
    for (int64_t i = 0; i < pairs && i < capacity; i++) {
        int32_t at;
        memcpy(&at, in + 16 + 4 * i, 4);
        if (at >= 0 && at < n) y[at] = before[i];
    }
}

/* The largest magnitude of g * scale + y, as bits: whether all of it is finite. */
static int32_t hp_largest_sum(const float *restrict g, const float *restrict y, float scale,
                              int64_t n) {
    int32_t top = 0;
#pragma omp simd reduction(max : top)
    for (int64_t i = 0; i < n; i++) {
        const int32_t u = hp_magnitude(g[i] * scale + y[i]);
        top = u > top ? u : top;
    }
    return top;
}

/* Adds the gradient to y and lists the elements of at least the threshold; returns how many. */
static int64_t hp_add_and_list(float *restrict y, const float *restrict g, float scale, int64_t n,
                               float threshold, int32_t *restrict list) {
    int64_t found = 0, i = 0;
#if defined(__AVX512F__)
    const __m512 s = _mm512_set1_ps(scale), t = _mm512_set1_ps(threshold);
    __m512i index = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    for (; i + 16 <= n; i += 16) {
        __m512 v = _mm512_add_ps(_mm512_mul_ps(_mm512_loadu_ps(g + i), s), _mm512_loadu_ps(y + i));
        _mm512_storeu_ps(y + i, v);
        __mmask16 m = _mm512_cmp_ps_mask(_mm512_abs_ps(v), t, _CMP_GE_OQ);
        if (m) {
            _mm512_mask_compressstoreu_epi32(list + found, m, index);
            found += __builtin_popcount(m);
        }
        index = _mm512_add_epi32(index, _mm512_set1_epi32(16));
    }
#else
    for (; i + 64 <= n; i += 64) {
        int any = 0;
#pragma omp simd reduction(| : any)
        for (int64_t j = i; j < i + 64; j++) {
            y[j] = g[j] * scale + y[j];
            any |= fabsf(y[j]) >= threshold;
        }
        if (any)
            for (int64_t j = i; j < i + 64; j++)
                if (fabsf(y[j]) >= threshold) list[found++] = (int32_t)j;
    }
#endif
    for (; i < n; i++) {
        y[i] = g[i] * scale + y[i];
        if (fabsf(y[i]) >= threshold) list[found++] = (int32_t)i;
    }
    return found;
}

HP_EXPORT int32_t hp_sparse_encode(float *grad, float *residual, float scale,
                                   const uint8_t *incoming, int64_t stride, int64_t messages,
                                   uint8_t *out, const int64_t *table, int64_t segments,
                                   const int64_t *capacities, double ratio, int32_t *bad) {
    int64_t longest = 0, widest = 0;
    for (int64_t s = 0; s < segments; s++) {
        if (table[HP_FIELDS * s + HP_COUNT] > longest) longest = table[HP_FIELDS * s + HP_COUNT];
        if (capacities[s] > widest) widest = capacities[s];
    }
    int32_t *list = malloc((size_t)(longest + 16) * 4);
    float *size = malloc((size_t)(longest > HP_SAMPLE * 2 ? longest : HP_SAMPLE * 2) * 4);
    float *own = residual ? 0 : malloc((size_t)longest * 4);
    float *before = malloc((size_t)(messages * widest + 1) * 4);
    if (!list || !size || !before || !(residual || own)) {
        free(list), free(size), free(own), free(before);
        return 1;
    }
    for (int64_t s = 0; s < segments; s++) {
        const int64_t *t = table + HP_FIELDS * s;
        const int64_t n = t[HP_COUNT], k = capacities[s];
        float *g = grad + t[HP_GRAD];
        float *y = residual ? residual + t[HP_RESIDUAL] : own;
        uint8_t *wire = out + t[HP_WIRE];
        int32_t pairs = 0;
        memset(wire, 0, (size_t)(16 + 8 * k + (k % 2 ? 8 : 0)));
        if (!residual) memset(y, 0, (size_t)n * 4);
        for (int64_t w = 0; w < messages; w++)
            hp_scatter_add(y, incoming + w * stride + t[HP_WIRE], n, k, before + w * widest);
        /* A segment fits the second-level cache: looking through it first costs little. */
        bad[s] = hp_largest_sum(g, y, scale, n) >= HP_INFINITE;
        if (bad[s]) {
            for (int64_t w = messages - 1; w >= 0; w--)
                hp_scatter_back(y, incoming + w * stride + t[HP_WIRE], n, k, before + w * widest);
            for (int64_t i = 0; i < n; i++) g[i] = NAN;
            continue;
        }
        const int64_t step = n > HP_SAMPLE ? n / HP_SAMPLE : 1;
        int64_t sampled = 0;
        for (int64_t i = 0; i < n; i += step) size[sampled++] = fabsf(g[i] * scale + y[i]);
        int64_t rank = (int64_t)((double)sampled * ratio * 1.25);
        rank = rank < 1 ? 1 : rank > sampled ? sampled : rank;
        float threshold = hp_mth_largest(size, sampled, rank);
        if (threshold == 0.0f) threshold = 0x1p-149f; /* nothing is sent for zeros */
        int64_t found = hp_add_and_list(y, g, scale, n, threshold, list);
        float least = threshold;
        int64_t ties = k;
        if (found > k) {
            for (int64_t i = 0; i < found; i++) size[i] = fabsf(y[list[i]]);
            least = hp_kth_largest(size, found, k);
            for (int64_t i = 0; i < found; i++) ties -= fabsf(y[list[i]]) > least;
        }
        for (int64_t i = 0; i < found; i++) {
            const int32_t at = list[i];
            const float value = y[at];
            if (fabsf(value) < least) continue;
            if (found > k && fabsf(value) == least && ties-- <= 0) continue;
            memcpy(wire + 16 + 4 * pairs, &at, 4);
            memcpy(wire + 16 + 4 * k + 4 * pairs, &value, 4);
            y[at] = 0.0f;
            pairs++;
        }
        memcpy(wire, &pairs, 4);
    }
    free(list), free(size), free(own), free(before);
    return 0;
}

HP_EXPORT void hp_sparse_decode(const uint8_t *in, float *out, const int64_t *table,
                                int64_t segments, const int64_t *capacities) {
    for (int64_t s = 0; s < segments; s++) {
        const int64_t *t = table + HP_FIELDS * s;
        float *x = out + t[HP_GRAD];
        memset(x, 0, (size_t)t[HP_COUNT] * 4);
        hp_scatter_add(x, in + t[HP_WIRE], t[HP_COUNT], capacities[s], 0);
    }
}
