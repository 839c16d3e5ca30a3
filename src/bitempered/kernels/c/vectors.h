/* Vectors of LANES floats, seen as two halves in float64, with log and exp. */

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif
#define LOG_0 -1e30 /* finite: 0 times it is 0 */
#define INLINE static inline __attribute__((always_inline))
#define EACH(l) for (int l = 0; l < LANES; l++)
#define GROUP 4
#define TOGETHER(i) for (int i = 0; i < GROUP; i++)
#define HALVES(h) for (int h = 0; h < 2; h++)

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint32_t vw __attribute__((vector_size(4 * LANES))); /* bits to add and shift: they may overflow */
typedef uint16_t vs __attribute__((vector_size(2 * LANES)));
typedef float vh __attribute__((vector_size(2 * LANES))); /* half of vf, */
typedef double vd __attribute__((vector_size(4 * LANES))); /* and the same in float64 */
typedef int64_t vl __attribute__((vector_size(4 * LANES)));
typedef uint64_t vu __attribute__((vector_size(4 * LANES)));
typedef vd Lanes[2]; /* one number per lane */

INLINE vf all(float x) { return (vf){0} + x; }
INLINE vf keep(vi where, vf x) { return (vf)(where & (vi)x); }
INLINE vf pick(vi where, vf x, vf y) { return (vf)((where & (vi)x) | (~where & (vi)y)); }

/* The rounding error of the product x y, where it cannot be fused with a sum. The halves of x and y have 12 bits. */
INLINE vf lost(vf x, vf y, vf product) {
    vf x_high = (vf)((vi)x & ~0xfff), x_low = x - x_high, y_high = (vf)((vi)y & ~0xfff), y_low = y - y_high;
    return ((x_high * y_high - product) + x_high * y_low + x_low * y_high) + x_low * y_low;
}

/* log w for w = 1 + x = 2^k (1 + f): f is taken from x, which the sum rounds, but from w where x is near -1. */
INLINE vf log1p_v(vf x, vf w, const int KIND) {
    vi k = (vi)((vw)w - 0x3f3504f3) >> 23;
    vf power = (vf)((127 - (vw)k) << 23), f = KIND < 0 ? pick(k == 0, x, w * power - 1) : x * power + (power - 1);
    vf q = f * -0.0762306079f + 0.129055038f;
    q = q * f - 0.132429808f;
    q = q * f + 0.141816348f;
    q = q * f - 0.166090563f;
    q = q * f + 0.200019851f;
    q = q * f - 0.250015855f;
    q = q * f + 0.333333254f;
    q = q * f - 0.499999881f;
    return __builtin_convertvector(k, vf) * 0.693147182f + (f + f * f * q);
}

/* 2^y for -126 < y < 128. */
INLINE vf exp2_v(vf y) {
    vf shifted = y + 0x1.8p23f, f = y - (shifted - 0x1.8p23f);
    vf q = f * 0.000153533605f + 0.0013398875f;
    q = q * f + 0.00961843692f;
    q = q * f + 0.0555033237f;
    q = q * f + 0.240226477f;
    q = q * f + 0.693147182f;
    return (vf)((vw)(q * f + 1) + ((vw)shifted << 23));
}

/* e^x + c for x < 88, for c of 0 or -1. */
INLINE vf exp_plus_v(vf x, const float c) {
    x = pick(x > -87.0f, x, all(-87));
    vf shifted = x * 1.44269504f + 0x1.8p23f, n = shifted - 0x1.8p23f, f = (x - n * 0.693359375f) + n * 0.000212194440f;
    vf q = f * 0.00139261836f + 0.00836317905f;
    q = q * f + 0.0416665546f;
    q = q * f + 0.16666577f;
    q = q * f + 0.5f;
    vf power = (vf)(((vw)shifted << 23) + (127U << 23));
    return power * (f + f * f * q) + (power + c);
}
INLINE vf expm1_v(vf x) { return exp_plus_v(x, -1); }
INLINE vf exp_v(vf x) { /* of any x */
    vf value = keep(x > -87.0f, exp_plus_v(pick(x < 88.0f, x, all(0)), 0));
    return pick(x < 88.0f, value, x * INFINITY);
}
INLINE vf log_v(vf x) { return log1p_v(x - 1, x, -1); } /* of a normal positive number */

/* The same in float64, to a few 1e-16. */
INLINE vd all64(double x) { return (vd){0} + x; }
INLINE vd keep64(vl where, vd x) { return (vd)(where & (vl)x); }
INLINE vd pick64(vl where, vd x, vd y) { return (vd)((where & (vl)x) | (~where & (vl)y)); }
INLINE vd abs64(vd x) { return (vd)((vl)x & INT64_MAX); }
INLINE vd log_plus(vd x, const double c) { /* log(x + c), for c of 0 or 1, of a number that is not subnormal */
    vu biased = ((vu)(x + c) - 0x3fe6a09e667f3bcd + (1024ULL << 52)) >> 52; /* k + 1024, for x + c = 2^k (1 + f) */
    vd k = (vd)(biased | 0x4330000000000000) - (0x1p52 + 1024), power = (vd)((2047 - biased) << 52);
    vd f = c == 0 ? x * power - 1 : x * power + (power - 1), z = f / (f + 2), y = z * z;
    vd q = y * 0.14616585424888623 + 0.15331710618210773;
    q = q * y + 0.18182889455674947;
    q = q * y + 0.22222211130259878;
    q = q * y + 0.2857142862600327;
    q = q * y + 0.39999999999899444;
    q = q * y + 0.666666666666667;
    vd log = k * 0.6931471805599453 + (2 * z + z * y * q);
    log = pick64(x > -c, log, all64(-INFINITY));
    return pick64(x < 6e307, log, x); /* inf, NaN */
}
INLINE vd exp_plus(vd x, const double c) { /* e^x + c, for c of 0 or -1 */
    vd inside = pick64(x > -700.0, x, all64(-700));
    inside = pick64(inside < 709.0, inside, all64(709));
    vd shifted = inside * 1.4426950408889634 + 0x1.8p52, n = shifted - 0x1.8p52;
    vd f = (inside - n * 0.6931471804855391) - n * 7.440617110012397e-11; /* the first product is exact */
    vd q = f * 2.510038549551032e-08 + 2.7620088445409746e-07;
    q = q * f + 2.7557268459997064e-06;
    q = q * f + 2.4801521295954376e-05;
    q = q * f + 0.00019841269863053618;
    q = q * f + 0.0013888888917213717;
    q = q * f + 0.008333333333330062;
    q = q * f + 0.04166666666662413;
    q = q * f + 0.16666666666666669;
    q = q * f + 0.5;
    vd power = (vd)(((vu)shifted << 52) + (1023ULL << 52));
    vd value = pick64(x > -700.0, power * (f + f * f * q) + (power + c), all64(c));
    return pick64(x < 709.0, value, x * INFINITY);
}
INLINE vd exp_(vd x) { return exp_plus(x, 0); }
INLINE vd expm1_(vd x) { return exp_plus(x, -1); }
INLINE vd log_(vd x) {
    vl tiny = x < 0x1p-1022; /* subnormal, or not positive */
    return log_plus(pick64(tiny, x * 0x1p54, x), 0) - keep64(tiny, all64(37.42994775023705));
}
INLINE vd log1p_(vd x) { return log_plus(x, 1); }
INLINE vd log1p_product(vd gap, vd factor) { /* log(1 + gap factor), even if the product overflows */
    vd x = gap * factor;
    vl huge = (x > 6e307) & (gap < INFINITY);
    return log1p_(pick64(huge, gap * 0x1p-64 * factor, x)) + keep64(huge, all64(44.36141955583649));
}
INLINE vd phi(vd v, double s) { return s == 0 ? v : expm1_(s * v) / s; }
INLINE vd psi(vd v, double s) { return s == 0 ? v : log1p_(s * v) / s; }

INLINE double *lanes(vd *values) { return (double *)values; }
INLINE vd half(const vf *x, int h) { return __builtin_convertvector(((const vh *)x)[h], vd); }
INLINE vf narrow(const vd *values) {
    vf x;
    HALVES(h) ((vh *)&x)[h] = __builtin_convertvector(values[h], vh);
    return x;
}
INLINE double largest(vd *values) {
    double most = 0;
    EACH(l) most = lanes(values)[l] > most ? lanes(values)[l] : most;
    return most;
}
INLINE int any(const vl *where) {
    vl either = where[0] | where[1];
    int64_t found = 0;
    for (int l = 0; l < LANES / 2; l++) found |= either[l];
    return found != 0;
}
INLINE void carry(vf sums, vd *to) { HALVES(h) to[h] += half(&sums, h); }
