/* What the CPU kernels share.
 *
 * Plain C99 without Python's headers: loaded through ctypes, so one library serves every Python.
 * Row indices are checked once, by bf_check, before any other function is given them; codebook and
 * column indices are checked where they are read.
 *
 * Results are those of kernels/reference.py bit for bit. That needs -ffp-contract=off: a fused
 * multiply-add would round once where torch rounds twice.
 */
#ifndef BIFEAT_COMMON_H
#define BIFEAT_COMMON_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* Changes with every signature, so that a library left over from another version is not called. */
#define BIFEAT_ABI 3

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

#define AHEAD 16 /* an item is asked for while the one this many before it is worked on */

#define ALWAYS static inline __attribute__((always_inline))

ALWAYS int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

#endif
