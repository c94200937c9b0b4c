/* What the generated kernels share: packing of small codes, number formats, random numbers.
 *
 * Compiled once for each instruction set; the intrinsics are chosen by what the compiler was told to
 * use. Floating-point contraction is off, so that every instruction set decodes to the same bits and all
 * ranks of a job keep the same parameters.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(_WIN32)
#define HP_EXPORT __declspec(dllexport)
#else
#define HP_EXPORT __attribute__((visibility("default")))
#endif

/* A row of the table: where a segment lies in the gradient, the residual and the message, how many
 * elements it has, its parameter's key and its place within the parameter. */
enum { HP_GRAD, HP_RESIDUAL, HP_COUNT, HP_WIRE, HP_PARAMETER, HP_POSITION, HP_FIELDS };

/* The bits of a magnitude are in the order of the magnitudes; infinities and NaN are above all. As
 * integers their maximum takes one cycle an element, where a sum of floats takes four. */
enum { HP_INFINITE = 0x7F800000 };

static inline int32_t hp_magnitude(float x) {
    int32_t u;
    memcpy(&u, &x, 4);
    return u & 0x7FFFFFFF;
}

static inline uint64_t hp_splitmix64(uint64_t x) {
    x += UINT64_C(0x9E3779B97F4A7C15);
    x = (x ^ (x >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94D049BB133111EB);
    return x ^ (x >> 31);
}

static inline uint32_t hp_lowbias32(uint32_t x) {
    x ^= x >> 16;
    x *= UINT32_C(0x7FEB352D);
    x ^= x >> 15;
    x *= UINT32_C(0x846CA68B);
    return x ^ (x >> 16);
}

static inline float hp_uniform(uint32_t position, uint32_t low, uint32_t high) {
    uint32_t x = hp_lowbias32(hp_lowbias32(position + low) ^ high);
    /* 24 bits fit an int32: a signed conversion is one instruction everywhere. */
    return (float)(int32_t)(x >> 8) * 0x1p-24f;
}

/* Codes are bytes in memory and `bits` each on the wire, first code in the lowest bits. The caller pads
 * the codes with zeros to a multiple of 64. */
static inline void hp_pack1(uint8_t *restrict out, const uint8_t *restrict code, int64_t n) {
    int64_t bytes = (n + 7) / 8, i = 0;
#if defined(__AVX512BW__)
    for (; i + 8 <= bytes; i += 8) {
        __m512i v = _mm512_loadu_si512(code + 8 * i);
        uint64_t word = _cvtmask64_u64(_mm512_test_epi8_mask(v, v));
        memcpy(out + i, &word, 8);
    }
#elif defined(__AVX2__)
    for (; i + 4 <= bytes; i += 4) {
        __m256i v = _mm256_loadu_si256((const __m256i *)(code + 8 * i));
        uint32_t word = (uint32_t)_mm256_movemask_epi8(_mm256_slli_epi16(v, 7));
        memcpy(out + i, &word, 4);
    }
#endif
    for (; i < bytes; i++) {
        uint64_t word;
        memcpy(&word, code + 8 * i, 8);
        out[i] = (uint8_t)((word * UINT64_C(0x0102040810204080)) >> 56);
    }
}

static inline void hp_pack2(uint8_t *restrict out, const uint8_t *restrict code, int64_t n) {
    for (int64_t i = 0; i < (n + 3) / 4; i++)
        out[i] = (uint8_t)(code[4 * i] | code[4 * i + 1] << 2 | code[4 * i + 2] << 4 |
                           code[4 * i + 3] << 6);
}

static inline void hp_pack4(uint8_t *restrict out, const uint8_t *restrict code, int64_t n) {
    for (int64_t i = 0; i < (n + 1) / 2; i++)
        out[i] = (uint8_t)(code[2 * i] | code[2 * i + 1] << 4);
}

static inline void hp_pack8(uint8_t *restrict out, const uint8_t *restrict code, int64_t n) {
    memcpy(out, code, (size_t)n);
}

/* Unpacking may write up to 63 codes past n, never past the block's buffer. */
static inline void hp_unpack1(uint8_t *restrict code, const uint8_t *restrict in, int64_t n) {
    int64_t bytes = (n + 7) / 8, i = 0;
#if defined(__AVX512BW__)
    const __m512i one = _mm512_set1_epi8(1);
    for (; i + 8 <= bytes; i += 8) {
        uint64_t word;
        memcpy(&word, in + i, 8);
        _mm512_storeu_si512(code + 8 * i, _mm512_maskz_mov_epi8(_cvtu64_mask64(word), one));
    }
#elif defined(__AVX2__)
    const __m256i spread = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2,
                                            2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3);
    const __m256i bit = _mm256_set1_epi64x((int64_t)UINT64_C(0x8040201008040201));
    for (; i + 4 <= bytes; i += 4) {
        int32_t word;
        memcpy(&word, in + i, 4);
        __m256i v = _mm256_shuffle_epi8(_mm256_set1_epi32(word), spread);
        v = _mm256_cmpeq_epi8(_mm256_and_si256(v, bit), bit);
        _mm256_storeu_si256((__m256i *)(code + 8 * i), _mm256_and_si256(v, _mm256_set1_epi8(1)));
    }
#endif
    for (; i < bytes; i++) {
        uint64_t word = (in[i] * UINT64_C(0x0101010101010101)) & UINT64_C(0x8040201008040201);
        word = ((word + UINT64_C(0x00406070787C7E7F)) >> 7) & UINT64_C(0x0101010101010101);
        memcpy(code + 8 * i, &word, 8);
    }
}

static inline void hp_unpack2(uint8_t *restrict code, const uint8_t *restrict in, int64_t n) {
    for (int64_t i = 0; i < (n + 3) / 4; i++) {
        code[4 * i] = in[i] & 3;
        code[4 * i + 1] = in[i] >> 2 & 3;
        code[4 * i + 2] = in[i] >> 4 & 3;
        code[4 * i + 3] = in[i] >> 6;
    }
}

static inline void hp_unpack4(uint8_t *restrict code, const uint8_t *restrict in, int64_t n) {
    for (int64_t i = 0; i < (n + 1) / 2; i++) {
        code[2 * i] = in[i] & 15;
        code[2 * i + 1] = in[i] >> 4;
    }
}

static inline void hp_unpack8(uint8_t *restrict code, const uint8_t *restrict in, int64_t n) {
    memcpy(code, in, (size_t)n);
}

static inline uint32_t hp_bits(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    return u;
}

static inline float hp_float(uint32_t u) {
    float x;
    memcpy(&x, &u, 4);
    return x;
}

/* Round to nearest even, by way of the float32 addition that rounds at the right bit. */
static inline uint16_t hp_half_of(float x) {
    uint32_t u = hp_bits(x), sign = u >> 16 & 0x8000;
    u &= 0x7FFFFFFF;
    if (u < 0x38800000) /* below the smallest normal half: an integer number of 2**-24 */
        return (uint16_t)(sign | (hp_bits(hp_float(u) + 0.5f) - 0x3F000000));
    u += 0xC8000FFF + (u >> 13 & 1);
    return (uint16_t)(sign | u >> 13);
}

static inline float hp_of_half(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, u = (uint32_t)(h & 0x7FFF) << 13;
    if (u >= 0x0F800000) /* infinity or NaN */
        return hp_float(sign | (u + 0x70000000));
    return hp_float(sign | hp_bits(hp_float(u) * 0x1p112f));
}

static inline void hp_store_float16(uint8_t *restrict out, const float *restrict x, int64_t n) {
    int64_t i = 0;
#if defined(__F16C__)
    for (; i + 8 <= n; i += 8)
        _mm_storeu_si128((__m128i *)(out + 2 * i), _mm256_cvtps_ph(_mm256_loadu_ps(x + i), 0));
#endif
    for (; i < n; i++) {
        uint16_t h = hp_half_of(x[i]);
        memcpy(out + 2 * i, &h, 2);
    }
}

static inline void hp_load_float16(float *restrict x, const uint8_t *restrict in, int64_t n) {
    int64_t i = 0;
#if defined(__F16C__)
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(x + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(in + 2 * i))));
#endif
    for (; i < n; i++) {
        uint16_t h;
        memcpy(&h, in + 2 * i, 2);
        x[i] = hp_of_half(h);
    }
}

static inline void hp_store_bfloat16(uint8_t *restrict out, const float *restrict x, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        uint32_t u = hp_bits(x[i]);
        uint16_t h = (uint16_t)((u + 0x7FFF + (u >> 16 & 1)) >> 16);
        memcpy(out + 2 * i, &h, 2);
    }
}

static inline void hp_load_bfloat16(float *restrict x, const uint8_t *restrict in, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        uint16_t h;
        memcpy(&h, in + 2 * i, 2);
        x[i] = hp_float((uint32_t)h << 16);
    }
}

static inline void hp_store_float32(uint8_t *restrict out, const float *restrict x, int64_t n) {
    memcpy(out, x, 4 * (size_t)n);
}

static inline void hp_load_float32(float *restrict x, const uint8_t *restrict in, int64_t n) {
    memcpy(x, in, 4 * (size_t)n);
}
