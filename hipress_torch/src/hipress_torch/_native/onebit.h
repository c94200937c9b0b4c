/* A full block of the codec `onebit`, tuned by hand: the sign bits come straight out of the
 * comparison, no byte is spent on a code, and the next block is fetched while this one is coded.
 *
 * Returns 0, with the residual untouched, for a block whose values are not finite or so large that
 * a sum could overflow: the generated code that follows then decides.
 */
#if defined(__AVX512BW__)
#define HP_TUNED_ONEBIT 1

enum { HP_ONEBIT_LIMIT = (112 + 127) << 23 }; /* the bits of 2**112: a sum of 65536 stays finite */

static inline __attribute__((always_inline)) int hp_onebit_block_of(
    const float *restrict g, float *restrict r, float scale, const uint8_t *incoming,
    int64_t stride, int64_t messages, int64_t place, int64_t b, uint8_t *restrict sides,
    uint8_t *restrict bytes, int64_t block, int64_t ahead) {
    float y[block] __attribute__((aligned(64)));
    const __m512 factor = _mm512_set1_ps(scale), zero = _mm512_setzero_ps();
    const __m512i magnitude = _mm512_set1_epi32(0x7FFFFFFF);
    __m512 above[4] = {zero, zero, zero, zero}, below[4] = {zero, zero, zero, zero};
    __m512i top[4] = {_mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512(),
                      _mm512_setzero_si512()};
    int64_t count = 0;
    for (int64_t i = 0; i < block; i += 64) {
        uint64_t word = 0;
        for (int k = 0; k < 4; k++) {
            const int64_t at = i + 16 * k;
            _mm_prefetch((const char *)(g + ahead + at), _MM_HINT_T1);
            __m512 v = _mm512_mul_ps(_mm512_loadu_ps(g + at), factor);
            if (r) v = _mm512_add_ps(v, _mm512_loadu_ps(r + at));
            for (int64_t w = 0; w < messages; w++) {
                const uint8_t *const in = incoming + w * stride;
                float high, low;
                uint16_t signs;
                memcpy(&high, in + 8 * b, 4);
                memcpy(&low, in + 8 * b + 4, 4);
                memcpy(&signs, in + place + at / 8, 2);
                v = _mm512_add_ps(v, _mm512_mask_blend_ps(_cvtu32_mask16(signs),
                                                          _mm512_set1_ps(low),
                                                          _mm512_set1_ps(high)));
            }
            _mm512_store_ps(y + at, v);
            top[k] = _mm512_max_epi32(top[k], _mm512_and_si512(_mm512_castps_si512(v), magnitude));
            const __mmask16 p = _mm512_cmp_ps_mask(v, zero, _CMP_GE_OQ);
            above[k] = _mm512_mask_add_ps(above[k], p, above[k], v);
            below[k] = _mm512_mask_add_ps(below[k], _knot_mask16(p), below[k], v);
            word |= (uint64_t)_cvtmask16_u32(p) << (16 * k);
        }
        count += __builtin_popcountll(word);
        memcpy(bytes + i / 8, &word, 8);
    }
    const __m512i largest = _mm512_max_epi32(_mm512_max_epi32(top[0], top[1]),
                                             _mm512_max_epi32(top[2], top[3]));
    if (_mm512_reduce_max_epi32(largest) >= HP_ONEBIT_LIMIT) return 0;
    const float positive = _mm512_reduce_add_ps(_mm512_add_ps(_mm512_add_ps(above[0], above[1]),
                                                              _mm512_add_ps(above[2], above[3])));
    const float negative = _mm512_reduce_add_ps(_mm512_add_ps(_mm512_add_ps(below[0], below[1]),
                                                              _mm512_add_ps(below[2], below[3])));
    const float high = positive / (float)(count > 1 ? count : 1);
    const float low = negative / (float)(block - count > 1 ? block - count : 1);
    memcpy(sides, &high, 4);
    memcpy(sides + 4, &low, 4);
    if (!r) return 1;
    const __m512 h = _mm512_set1_ps(high), l = _mm512_set1_ps(low);
    for (int64_t i = 0; i < block; i += 64) {
        uint64_t word;
        memcpy(&word, bytes + i / 8, 8);
        for (int k = 0; k < 4; k++) {
            const int64_t at = i + 16 * k;
            _mm_prefetch((const char *)(r + ahead + at), _MM_HINT_T1);
            const __m512 sent = _mm512_mask_blend_ps(_cvtu32_mask16((uint32_t)(word >> (16 * k))), l, h);
            _mm512_storeu_ps(r + at, _mm512_sub_ps(_mm512_load_ps(y + at), sent));
        }
    }
    return 1;
}

/* Loops without messages and without a residual are compiled for themselves. */
static inline int hp_onebit_block(const float *g, float *r, float scale, const uint8_t *incoming,
                                  int64_t stride, int64_t messages, int64_t place, int64_t b,
                                  uint8_t *sides, uint8_t *bytes, int64_t block, int64_t ahead) {
    if (messages)
        return hp_onebit_block_of(g, r, scale, incoming, stride, messages, place, b, sides, bytes,
                                  block, ahead);
    if (r)
        return hp_onebit_block_of(g, r, scale, 0, 0, 0, place, b, sides, bytes, block, ahead);
    return hp_onebit_block_of(g, 0, scale, 0, 0, 0, place, b, sides, bytes, block, ahead);
}
#endif
