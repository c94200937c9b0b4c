/* @TITLE@ */
HP_EXPORT void @NAME@_encode(float *grad, float *residual, float scale,
                             const uint8_t *incoming, int64_t stride, int64_t messages,
                             uint8_t *out, const int64_t *table, int64_t segments,
                             const float *options, uint64_t stream, int32_t *bad) {
    float y[@BLOCK@];
    @KIND@ code[@BLOCK@ + 64];
    (void)options;
    (void)stream;
    for (int64_t s = 0; s < segments; s++) {
        const int64_t *t = table + HP_FIELDS * s;
        const int64_t count = t[HP_COUNT], blocks = (count + @BLOCK@ - 1) / @BLOCK@;
        uint8_t *const wire = out + t[HP_WIRE];
        @KEYS@
        bad[s] = 0;
        for (int64_t b = 0; b < blocks; b++) {
            const int64_t first = b * @BLOCK@;
            const int64_t m = count - first < @BLOCK@ ? count - first : @BLOCK@;
            const int64_t place = 4 * @SIDES@ * blocks + first * @BITS@ / 8;
            float *const g = grad + t[HP_GRAD] + first;
            float *const r = residual ? residual + t[HP_RESIDUAL] + first : 0;
            uint8_t *const bytes = wire + place;
            int32_t top = 0; /* the largest magnitude met, as bits */
            @TUNED@
            @POSITION@
            if (messages) {
                if (r)
                    for (int64_t i = 0; i < m; i++) y[i] = g[i] * scale + r[i];
                else
                    for (int64_t i = 0; i < m; i++) y[i] = g[i] * scale;
            }
            for (int64_t w = 0; w < messages; w++) {
                const uint8_t *const in = incoming + w * stride + t[HP_WIRE];
                @UNPACK@(code, in + place, m);
                {
                    @MERGE@
                }
            }
            {
                @ENCODE@
            }
            if (top >= HP_INFINITE) { /* not finite, or too large for a sum over the block */
                bad[s] = 1;
                for (int64_t i = 0; i < m; i++) g[i] = NAN;
                memset(wire + 4 * @SIDES@ * b, 0, 4 * @SIDES@);
                memset(bytes, 0, (size_t)((m * @BITS@ + 7) / 8));
                continue;
            }
            @PAD@
            @PACK@(bytes, code, m);
            @RESIDUAL@
        }
        const int64_t used = 4 * @SIDES@ * blocks + (count * @BITS@ + 7) / 8;
        memset(wire + used, 0, (size_t)((16 - used % 16) % 16));
    }
}

HP_EXPORT void @NAME@_decode(const uint8_t *in, float *out, const int64_t *table, int64_t segments,
                             const float *options) {
    @KIND@ code[@BLOCK@ + 64];
    (void)options;
    for (int64_t s = 0; s < segments; s++) {
        const int64_t *t = table + HP_FIELDS * s;
        const int64_t count = t[HP_COUNT], blocks = (count + @BLOCK@ - 1) / @BLOCK@;
        const uint8_t *const wire = in + t[HP_WIRE], *const codes = wire + 4 * @SIDES@ * blocks;
        for (int64_t b = 0; b < blocks; b++) {
            const int64_t first = b * @BLOCK@;
            const int64_t m = count - first < @BLOCK@ ? count - first : @BLOCK@;
            float *const x = out + t[HP_GRAD] + first;
            @UNPACK@(code, codes + first * @BITS@ / 8, m);
            @DECODE@
        }
    }
}
