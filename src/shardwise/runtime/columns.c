/* Passes over a tensor of samples x channels x pixels that torch has no single operator for.

   Every function comes for float and double, and for two orders in memory:

       first   element (i, j, k) at i * channels * pixels + j * pixels + k        one plane after another
       last    element (i, j, k) at (i * pixels + k) * channels + j               one pixel after another

   Sums run in blocks that stay in the nearest cache, in the precision of the tensor inside a block and in
   double from block to block. Nothing here allocates; `scratch` has room for two rows of channels. */

#include <stddef.h>

#if !defined(__x86_64__) || !defined(__GNUC__) || defined(__clang__)
#define WIDE
#elif __GNUC__ >= 12
#define WIDE __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define WIDE __attribute__((target_clones("avx512f", "avx2", "default")))
#endif

#if defined(__GNUC__)
#define INLINE static inline __attribute__((always_inline))
#else
#define INLINE static inline
#endif

typedef ptrdiff_t index;

enum { BLOCK = 4096, FEWEST = 32, MOST = 256 };

static inline index least(index a, index b) { return a < b ? a : b; }

/* Rows of a block: enough to pay for adding it up, few enough for a cache and for the sums' last digits. */
static inline index rows_of(index c) {
    index rows = 8 * BLOCK / c;
    return rows < FEWEST ? FEWEST : rows > MOST ? MOST : rows;
}

/* Add a block of e values to the sums of a channel: their distance from a pivot sums up to s, and q is the
   sum of squares around the pivot plus the rounded mean distance. Constant channels have none of either. */
static inline void fold(double pivot, double s, double q, double mean, index e, double *total,
                        double *squares, double *outer) {
    double exact = s / (double)e, rest = exact - mean, around = q - rest * rest * (double)e;
    *total += s + pivot * (double)e;
    *squares += around < 0 ? 0 : around;
    *outer += (pivot + exact) * (s + pivot * (double)e);
}

#define DEFINE(T, NAME)                                                                                    \
                                                                                                           \
/* sums[0] = sum of x, sums[1] = centred squares of each block, sums[2] = sum of n m m over blocks */      \
WIDE void moments_first_##NAME(const T *x, index n, index c, index m, double *sums) {                      \
    for (index j = 0; j < c; j++) {                                                                        \
        double total = 0, squares = 0, outer = 0;                                                          \
        for (index i = 0; i < n; i++)                                                                      \
            for (index at = 0; at < m; at += BLOCK) {                                                      \
                const T *p = x + (i * c + j) * m + at;                                                     \
                index e = least(m - at, BLOCK);                                                            \
                T pivot = p[0], s = 0, q = 0;                                                              \
                _Pragma("omp simd reduction(+ : s)")                                                       \
                for (index k = 0; k < e; k++) s += p[k] - pivot;                                           \
                T mean = s / (T)e;                                                                         \
                _Pragma("omp simd reduction(+ : q)")                                                       \
                for (index k = 0; k < e; k++) {                                                            \
                    T d = p[k] - pivot - mean;                                                             \
                    q += d * d;                                                                            \
                }                                                                                          \
                fold((double)pivot, (double)s, (double)q, (double)mean, e, &total, &squares, &outer);      \
            }                                                                                              \
        sums[j] = total, sums[c + j] = squares, sums[2 * c + j] = outer;                                   \
    }                                                                                                      \
}                                                                                                          \
                                                                                                           \
WIDE void moments_last_##NAME(const T *x, index rows, index c, double *sums, T *scratch) {                 \
    T *s = scratch, *q = scratch + c;                                                                      \
    index step = rows_of(c);                                                                               \
    for (index j = 0; j < 3 * c; j++) sums[j] = 0;                                                         \
    for (index at = 0; at < rows; at += step) {                                                            \
        const T *p = x + at * c;                                                                           \
        index e = least(rows - at, step);                                                                  \
        for (index j = 0; j < c; j++) s[j] = q[j] = 0;                                                     \
        for (index i = 1; i < e; i++) {                                                                    \
            _Pragma("omp simd")                                                                            \
            for (index j = 0; j < c; j++) s[j] += p[i * c + j] - p[j];                                     \
        }                                                                                                  \
        T share = (T)1 / (T)e;                                                                             \
        for (index i = 0; i < e; i++) {                                                                    \
            _Pragma("omp simd")                                                                            \
            for (index j = 0; j < c; j++) {                                                                \
                T d = p[i * c + j] - p[j] - s[j] * share;                                                  \
                q[j] += d * d;                                                                             \
            }                                                                                              \
        }                                                                                                  \
        for (index j = 0; j < c; j++)                                                                      \
            fold((double)p[j], (double)s[j], (double)q[j], (double)(s[j] * share), e, sums + j,            \
                 sums + c + j, sums + 2 * c + j);                                                          \
    }                                                                                                      \
}                                                                                                          \
/* y = x * scale + shift; rectified: where that is larger than zero */                                     \
INLINE void write_first_##NAME(const T *x, index n, index c, index m, const T *scale, const T *shift,      \
                               T *y, int rectify) {                                                        \
    for (index i = 0; i < n * c; i++) {                                                                    \
        T a = scale[i % c], b = shift[i % c];                                                              \
        _Pragma("omp simd")                                                                                \
        for (index k = 0; k < m; k++) {                                                                    \
            T v = x[i * m + k] * a + b;                                                                    \
            y[i * m + k] = rectify && v < 0 ? 0 : v;                                                       \
        }                                                                                                  \
    }                                                                                                      \
}                                                                                                          \
                                                                                                           \
INLINE void write_last_##NAME(const T *x, index rows, index c, const T *scale, const T *shift, T *y,       \
                              int rectify) {                                                               \
    for (index i = 0; i < rows; i++) {                                                                     \
        _Pragma("omp simd")                                                                                \
        for (index j = 0; j < c; j++) {                                                                    \
            T v = x[i * c + j] * scale[j] + shift[j];                                                      \
            y[i * c + j] = rectify && v < 0 ? 0 : v;                                                       \
        }                                                                                                  \
    }                                                                                                      \
}                                                                                                          \
                                                                                                           \
WIDE void affine_first_##NAME(const T *x, index n, index c, index m, const T *scale, const T *shift,       \
                              T *y) {                                                                      \
    write_first_##NAME(x, n, c, m, scale, shift, y, 0);                                                    \
}                                                                                                          \
                                                                                                           \
WIDE void affine_last_##NAME(const T *x, index rows, index c, const T *scale, const T *shift, T *y) {      \
    write_last_##NAME(x, rows, c, scale, shift, y, 0);                                                     \
}                                                                                                          \
                                                                                                           \
WIDE void rectified_first_##NAME(const T *x, index n, index c, index m, const T *scale, const T *shift,    \
                                 T *y) {                                                                   \
    write_first_##NAME(x, n, c, m, scale, shift, y, 1);                                                    \
}                                                                                                          \
                                                                                                           \
WIDE void rectified_last_##NAME(const T *x, index rows, index c, const T *scale, const T *shift, T *y) {   \
    write_last_##NAME(x, rows, c, scale, shift, y, 1);                                                     \
}                                                                                                          \
                                                                                                           \
/* sums[0] = sum of g, sums[1] = sum of g (x - mean); gated: of g where x * gain + level is above zero */  \
INLINE void sum_first_##NAME(const T *g, const T *x, index n, index c, index m, const T *mean,             \
                             double *sums, const T *gain, const T *level, int gate) {                      \
    for (index j = 0; j < c; j++) {                                                                        \
        double first = 0, second = 0;                                                                      \
        T centre = mean[j], a = gate ? gain[j] : 0, b = gate ? level[j] : 0;                               \
        for (index i = 0; i < n; i++)                                                                      \
            for (index at = 0; at < m; at += BLOCK) {                                                      \
                const T *p = x + (i * c + j) * m + at, *h = g + (i * c + j) * m + at;                      \
                index e = least(m - at, BLOCK);                                                            \
                T s = 0, q = 0;                                                                            \
                _Pragma("omp simd reduction(+ : s, q)")                                                    \
                for (index k = 0; k < e; k++) {                                                            \
                    T d = gate && p[k] * a + b <= 0 ? 0 : h[k];                                            \
                    s += d;                                                                                \
                    q += d * (p[k] - centre);                                                              \
                }                                                                                          \
                first += (double)s, second += (double)q;                                                   \
            }                                                                                              \
        sums[j] = first, sums[c + j] = second;                                                             \
    }                                                                                                      \
}                                                                                                          \
                                                                                                           \
INLINE void sum_last_##NAME(const T *g, const T *x, index rows, index c, const T *mean, double *sums,      \
                            T *scratch, const T *gain, const T *level, int gate) {                         \
    T *s = scratch, *q = scratch + c;                                                                      \
    index step = rows_of(c);                                                                               \
    for (index j = 0; j < 2 * c; j++) sums[j] = 0;                                                         \
    for (index at = 0; at < rows; at += step) {                                                            \
        index end = least(rows, at + step);                                                                \
        for (index j = 0; j < c; j++) s[j] = q[j] = 0;                                                     \
        for (index i = at; i < end; i++) {                                                                 \
            _Pragma("omp simd")                                                                            \
            for (index j = 0; j < c; j++) {                                                                \
                T v = x[i * c + j];                                                                        \
                T d = gate && v * gain[j] + level[j] <= 0 ? 0 : g[i * c + j];                              \
                s[j] += d;                                                                                 \
                q[j] += d * (v - mean[j]);                                                                 \
            }                                                                                              \
        }                                                                                                  \
        for (index j = 0; j < c; j++) sums[j] += (double)s[j], sums[c + j] += (double)q[j];                \
    }                                                                                                      \
}                                                                                                          \
                                                                                                           \
WIDE void products_first_##NAME(const T *g, const T *x, index n, index c, index m, const T *mean,          \
                                double *sums) {                                                            \
    sum_first_##NAME(g, x, n, c, m, mean, sums, 0, 0, 0);                                                  \
}                                                                                                          \
                                                                                                           \
WIDE void products_last_##NAME(const T *g, const T *x, index rows, index c, const T *mean, double *sums,   \
                               T *scratch) {                                                               \
    sum_last_##NAME(g, x, rows, c, mean, sums, scratch, 0, 0, 0);                                          \
}                                                                                                          \
                                                                                                           \
WIDE void gated_products_first_##NAME(const T *g, const T *x, index n, index c, index m, const T *mean,    \
                                      double *sums, const T *gain, const T *level) {                       \
    sum_first_##NAME(g, x, n, c, m, mean, sums, gain, level, 1);                                           \
}                                                                                                          \
                                                                                                           \
WIDE void gated_products_last_##NAME(const T *g, const T *x, index rows, index c, const T *mean,           \
                                     double *sums, T *scratch, const T *gain, const T *level) {            \
    sum_last_##NAME(g, x, rows, c, mean, sums, scratch, gain, level, 1);                                   \
}                                                                                                          \
                                                                                                           \
/* y = g * scale - x * slope - offset, g gated as above; y may be g */                                     \
INLINE void join_first_##NAME(const T *g, const T *x, index n, index c, index m, const T *scale,           \
                              const T *slope, const T *offset, T *y, const T *gain, const T *level,        \
                              int gate) {                                                                  \
    for (index i = 0; i < n * c; i++) {                                                                    \
        T a = scale[i % c], b = slope[i % c], d = offset[i % c];                                           \
        T e = gate ? gain[i % c] : 0, f = gate ? level[i % c] : 0;                                         \
        _Pragma("omp simd")                                                                                \
        for (index k = 0; k < m; k++) {                                                                    \
            T v = x[i * m + k], h = gate && v * e + f <= 0 ? 0 : g[i * m + k];                             \
            y[i * m + k] = h * a - v * b - d;                                                              \
        }                                                                                                  \
    }                                                                                                      \
}                                                                                                          \
                                                                                                           \
INLINE void join_last_##NAME(const T *g, const T *x, index rows, index c, const T *scale,                  \
                             const T *slope, const T *offset, T *y, const T *gain, const T *level,         \
                             int gate) {                                                                   \
    for (index i = 0; i < rows; i++) {                                                                     \
        _Pragma("omp simd")                                                                                \
        for (index j = 0; j < c; j++) {                                                                    \
            T v = x[i * c + j], h = gate && v * gain[j] + level[j] <= 0 ? 0 : g[i * c + j];                \
            y[i * c + j] = h * scale[j] - v * slope[j] - offset[j];                                        \
        }                                                                                                  \
    }                                                                                                      \
}                                                                                                          \
                                                                                                           \
WIDE void combine_first_##NAME(const T *g, const T *x, index n, index c, index m, const T *scale,          \
                               const T *slope, const T *offset, T *y) {                                    \
    join_first_##NAME(g, x, n, c, m, scale, slope, offset, y, 0, 0, 0);                                    \
}                                                                                                          \
                                                                                                           \
WIDE void combine_last_##NAME(const T *g, const T *x, index rows, index c, const T *scale,                 \
                              const T *slope, const T *offset, T *y) {                                     \
    join_last_##NAME(g, x, rows, c, scale, slope, offset, y, 0, 0, 0);                                     \
}                                                                                                          \
                                                                                                           \
WIDE void gated_combine_first_##NAME(const T *g, const T *x, index n, index c, index m, const T *scale,    \
                                     const T *slope, const T *offset, T *y, const T *gain,                 \
                                     const T *level) {                                                     \
    join_first_##NAME(g, x, n, c, m, scale, slope, offset, y, gain, level, 1);                             \
}                                                                                                          \
                                                                                                           \
WIDE void gated_combine_last_##NAME(const T *g, const T *x, index rows, index c, const T *scale,           \
                                    const T *slope, const T *offset, T *y, const T *gain,                  \
                                    const T *level) {                                                      \
    join_last_##NAME(g, x, rows, c, scale, slope, offset, y, gain, level, 1);                              \
}

DEFINE(float, float32)
DEFINE(double, float64)
