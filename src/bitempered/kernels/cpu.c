/* The loss of class indices and its gradient, in float32 on a CPU: core.py restated, with its symbols.

   A block is LANES rows side by side where classes are few, or one row folded into LANES columns. Vectors run over it
   either way, and it is read from memory once: all that follows happens while it is in cache. What there is one of per
   row is float64, and sums are carried over to float64 every CHUNK vectors.

   The largest logit, the top, is left out of the float32 sums: its r is 1, and its gradient is made of float64. So the
   small gradients of rows that are sure, of the right class or of a wrong one, are right to 1e-5 of themselves. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef __AVX__
#define LANES 8
#else
#define LANES 4
#endif
#define FOLDED_FROM 512 /* classes */
#define CHUNK 32
#define GRAIN 4096 /* a thread takes blocks of at least that many logits at once */
#define INLINE static inline __attribute__((always_inline))
#define EACH(l) for (int l = 0; l < LANES; l++)

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));

typedef struct {
    const float *logits, *weight; /* weight may be null */
    const int64_t *target;
    float *losses, *gradient; /* gradient may be null */
    int64_t stride, n, k, ignore_index;
    double t1, t2, s, smoothing, scale;
    vf *z;                      /* the target w y without its label, as a block; null where there is no smoothing */
    double z_sum, z_log, z_pow; /* sums of z, of z log_t1 z, of z^(2 - t1) */
    int64_t next;               /* the first row that no thread has taken */
    int out_of_memory;
} Job;

typedef struct { /* what is known of a block, by lane; in a folded row all lanes know the same */
    int folded, used; /* used: how many lanes stand for a row each */
    int64_t length;   /* in vectors */
    vf *u, *low, *e, *v; /* the block: gaps, what rounding took from them, and what the last pass makes of them */
    int64_t row[LANES], top[LANES], label[LANES], bad[LANES]; /* bad: NaN, +inf, or nothing but -inf */
    double max[LANES], count[LANES], m[LANES], W[LANES], z_label[LANES]; /* z_label: what the label adds to z */
    double decay[LANES], p[LANES], p_power[LANES]; /* e^(-s m), y_hat of the top, its power t2 - t1 */
    double r[LANES], h[LANES], e_sum[LANES], v_sum[LANES], z_log_r[LANES]; /* sums of the last pass, without the top */
} Rows;

typedef struct {
    double r[LANES], r_t[LANES], r_2t[LANES];
} Powers;

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE vf all(float x) { return (vf){0} + x; }
INLINE vf keep(vi where, vf x) { return (vf)(where & (vi)x); }
INLINE vf pick(vi where, vf x, vf y) { return (vf)((where & (vi)x) | (~where & (vi)y)); }

/* log w for w = 1 + x = 2^k (1 + f): f is taken from x, which the sum rounds, but from w where x is near -1. */
INLINE vf log1p_v(vf x, vf w, const int KIND) {
    vi k = ((vi)w - 0x3f3504f3) >> 23;
    vf power = (vf)((127 - k) << 23), f = KIND < 0 ? pick(k == 0, x, w * power - 1) : x * power + (power - 1);
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
    return (vf)((vi)(q * f + 1) + ((vi)shifted << 23));
}

/* e^x - 1 */
INLINE vf expm1_v(vf x) {
    vf inside = pick(x > -87.0f, x, all(-87));
    inside = pick(inside < 88.0f, inside, all(88));
    vf shifted = inside * 1.44269504f + 0x1.8p23f, n = shifted - 0x1.8p23f;
    vf f = inside - n * 0.693359375f + n * 2.12194440e-4f;
    vf q = f * 0.00138825201f + 0.008366514f;
    q = q * f + 0.0416672006f;
    q = q * f + 0.166665435f;
    q = q * f + 0.49999997f;
    vf power = (vf)(((vi)shifted << 23) + (127 << 23));
    return pick(x < 88.0f, power * (f + f * f * q) + (power - 1), x * INFINITY);
}

/* The same in float64 to 1e-13, for rows; without branches, so that the compiler vectorises loops over lanes. */
INLINE double from_bits(uint64_t bits) {
    double x;
    memcpy(&x, &bits, sizeof x);
    return x;
}
INLINE uint64_t to_bits(double x) {
    uint64_t bits;
    memcpy(&bits, &x, sizeof x);
    return bits;
}
INLINE double log1p_(double x) {
    uint64_t biased = (to_bits(x + 1) - to_bits(0x1.6a09e667f3bcdp-1) + (1024ULL << 52)) >> 52; /* k + 1024 */
    double k = from_bits(biased | to_bits(0x1p52)) - (0x1p52 + 1024), power = from_bits((2047 - biased) << 52);
    double f = x * power + (power - 1), z = f / (f + 2), y = z * z;
    double q = y * 0.19584056463685906 + 0.22176194227213364;
    q = q * y + 0.2857210905471799;
    q = q * y + 0.39999995622504314;
    q = q * y + 0.6666666667580006;
    double log = k * 0.6931471805599453 + (2 * z + z * y * q);
    log = x > -1 ? log : -INFINITY;
    return x < 1e300 ? log : x; /* inf, NaN */
}
INLINE double exp_plus(double x, double c) { /* e^x + c, for c of 0 or -1 */
    double inside = x > -700 ? x : -700;
    inside = inside < 700 ? inside : 700;
    double shifted = inside * 1.4426950408889634 + 0x1.8p52, n = shifted - 0x1.8p52;
    double f = inside - n * 0.6931471805599453 - n * 2.3190468138462996e-17;
    double q = f * 2.756048656241334e-06 + 2.4875678008159214e-05;
    q = q * f + 0.0001984135983287491;
    q = q * f + 0.0013888822783478614;
    q = q * f + 0.008333333246305624;
    q = q * f + 0.04166666688339413;
    q = q * f + 0.16666666666869032;
    q = q * f + 0.4999999999981251;
    double power = from_bits((to_bits(shifted) << 52) + (1023ULL << 52));
    double value = power * (f + f * f * q) + (power + c);
    value = x > -700 ? value : c;
    return x < 700 ? value : x * INFINITY;
}
INLINE double exp_(double x) { return exp_plus(x, 0); }
INLINE double expm1_(double x) { return exp_plus(x, -1); }
INLINE double log_(double x) { return log1p_(x - 1); }
INLINE double phi(double v, double s) { return s == 0 ? v : expm1_(s * v) / s; }
INLINE double psi(double v, double s) { return s == 0 ? v : log1p_(s * v) / s; }

INLINE void carry(vf sums, double *to) { EACH(l) to[l] += sums[l]; }
INLINE void finish(const Rows *rows, double *sums, double top) {
    double sum = 0;
    EACH(l) sum += sums[l];
    EACH(l) sums[l] = (rows->folded ? sum : sums[l]) + top;
}
INLINE vf narrow(const double *values) {
    vf x;
    EACH(l) x[l] = (float)values[l];
    return x;
}
INLINE int64_t place(const Rows *rows, int64_t class, int l) { return rows->folded ? class : class * LANES + l; }
INLINE double log_t_of_0(double t) { return t < 1 ? -1 / (1 - t) : 0; } /* where it is -inf, `smoothed_loss` adds it */
INLINE double z_of(const Job *job, int64_t class) {
    return job->smoothing / job->k * (job->weight ? job->weight[class] : 1);
}

/* Gaps u, NaN for what is left out: masked classes, columns beyond the last class, and the top. */
static void load(const Job *job, Rows *rows) {
    vf *u = rows->u, max = all(-INFINITY);
    float *scalars = (float *)u, limit = 0x1p126f / (job->s > 1 ? (float)job->s : 1); /* s u must be finite */
    if (rows->folded) {
        memcpy(u, job->logits + rows->row[0] * job->stride, job->k * sizeof(float));
        for (int64_t i = job->k; i < rows->length * LANES; i++) scalars[i] = -INFINITY;
    } else
        EACH(l)
            for (int64_t i = 0; i < job->k; i++) scalars[i * LANES + l] = job->logits[rows->row[l] * job->stride + i];
    vi nan = {0}, top = {0}, here = {0};
    for (int64_t j = 0; j < rows->length; j++) {
        max = pick(u[j] > max, u[j], max);
        nan |= u[j] != u[j];
    }
    if (rows->folded) {
        float most = -INFINITY;
        int any = 0;
        EACH(l) most = max[l] > most ? max[l] : most, any |= nan[l], here[l] = l;
        max = all(most), nan = (vi){0} + any;
    }
    double sum[LANES] = {0};
    memset(rows->count, 0, sizeof rows->count);
    for (int64_t start = 0; start < rows->length; start += CHUNK) {
        vf part = {0};
        vi kept = {0};
        for (int64_t j = start; j < least(start + CHUNK, rows->length); j++) {
            vf gap = max - u[j];
            vi finite = gap < INFINITY, zero = gap == 0;
            top = (zero & here) | (~zero & top);
            here += rows->folded ? LANES : 1;
            vf back = gap - max;
            rows->low[j] = (max - (gap - back)) - (u[j] + back);
            gap = pick(gap < limit, gap, all(limit));
            part += keep(finite, gap);
            kept -= finite;
            u[j] = pick(finite, gap, all(NAN));
        }
        carry(part, sum);
        carry(__builtin_convertvector(kept, vf), rows->count);
    }
    finish(rows, sum, 0);
    finish(rows, rows->count, 0);
    if (rows->folded) {
        int last = 0;
        EACH(l) last = top[l] > last ? top[l] : last;
        top = (vi){0} + last;
    }
    EACH(l) {
        rows->max[l] = max[l];
        rows->bad[l] = nan[l] || !(max[l] > -INFINITY && max[l] < INFINITY);
        rows->top[l] = top[l];
        scalars[place(rows, top[l], l)] = NAN;
    }
    EACH(l) { /* core.lower_bound */
        double log_n = log_(rows->count[l]), v = sum[l] / rows->count[l] * exp_(-job->s * log_n);
        double bound = log_n - psi(v, -job->s);
        bound = job->s * v < 1 && bound > 0 ? bound : 0;
        rows->m[l] = rows->bad[l] ? 0 : bound;
    }
}

typedef struct { /* s e^(-s m) and what is left of it after rounding; log2(e) / -s */
    vf high, minus_high, low, to_log2;
} Factors;

INLINE Factors factors(const Job *job, Rows *rows) {
    double high[LANES], low[LANES], s = job->s;
    EACH(l) {
        rows->decay[l] = exp_(-s * rows->m[l]);
        high[l] = (float)(s * rows->decay[l]);
        low[l] = s * rows->decay[l] - high[l];
    }
    vf minus_high = -narrow(high);
    __asm__("" : "+m"(minus_high)); /* a compiler that knew it to be -high would not fuse 1 - u minus_high below */
    return (Factors){narrow(high), minus_high, narrow(low), all((float)(-1.4426950408889634 / (s == 0 ? 1 : s)))};
}

typedef struct { /* w = 1 + s u e^(-s m), y = log2 r, d = 1 / w = r^s; in: where r is not 0 */
    vf w, y, d;
    vi in;
} Ratios;

INLINE Ratios ratios(const Rows *rows, int64_t j, const Factors *c, const int KIND) { /* KIND is the sign of s */
    vf u = rows->u[j], x = u * c->high, w = 1 - u * c->minus_high;
    if (KIND < 0) w += u * c->low + rows->low[j] * c->high; /* near the edge of the support rounding would show */
    vf y = (KIND ? log1p_v(x, w, KIND) : u) * c->to_log2;
    return (Ratios){w, y, KIND ? 1 / w : all(1), KIND < 0 ? (y > -126.0f) & (w > 0.0f) : y > -126.0f};
}

INLINE void sum_powers(const Job *job, Rows *rows, Powers *sums, const int KIND) {
    Factors c = factors(job, rows);
    memset(sums, 0, sizeof *sums);
    for (int64_t start = 0; start < rows->length; start += CHUNK) {
        vf s1 = {0}, s2 = {0}, s3 = {0};
        for (int64_t j = start; j < least(start + CHUNK, rows->length); j++) {
            Ratios of = ratios(rows, j, &c, KIND);
            vf r = keep(of.in, exp2_v(of.y)), d = keep(of.in, of.d);
            s1 += r, s2 += r * d, s3 += r * d * d;
        }
        carry(s1, sums->r), carry(s2, sums->r_t), carry(s3, sums->r_2t);
    }
    finish(rows, sums->r, 1), finish(rows, sums->r_t, 1), finish(rows, sums->r_2t, 1);
}

/* core.normalizer by Halley's method, whose third sum costs two multiplications. It may overshoot; so the Newton step
   from a lower bound, which is a lower bound too, is kept to fall back to. With h, half the curvature times the Newton
   step, what a step leaves is of the order of h change^2. Where the support is finite (s < 0) classes may have entered
   it, and only a small change says that m has settled. */
INLINE void solve(const Job *job, Rows *rows, const int KIND) {
    double t = job->t2, s = job->s, bound[LANES] = {0}, left[LANES];
    for (int step = 0; step < 30; step++) {
        Powers sums;
        sum_powers(job, rows, &sums, KIND);
        EACH(l) {
            double before = rows->m[l], log_z = log_(sums.r[l]) - before, R = sums.r[l] / sums.r_t[l];
            double power = expm1_(s * log_z), h = KIND ? 0.5 * t / s * power * (1 - R * sums.r_2t[l] / sums.r_t[l]) : 0;
            power = power < 1e300 ? power / (1 + power) : 1;
            h = h > -0.5 ? h : -0.5;
            h = h < 0.5 ? h : 0.5;
            double newton = before + log_z + (KIND ? log1p_((R - 1) * power) / s : 0);
            double halley = before + log_z + (KIND ? log1p_((R / (1 + h) - 1) * power) / s : 0);
            bound[l] = log_z >= 0 && newton > bound[l] ? newton : bound[l];
            rows->m[l] = halley > bound[l] ? halley : bound[l];
            double change = rows->m[l] - before;
            left[l] = KIND == 0 ? 0 : KIND > 0 ? fabs(h) * change * change : 0.3 * fabs(change);
        }
        double most = 0;
        EACH(l) most = left[l] > most ? left[l] : most;
        if (most < 3e-7) return;
    }
}

/* The last pass: e = r^t2, v = (W y_hat - z) y_hat^(t2 - t1), and the sums of Rows, h = r^(2 - t1). */
INLINE void last_pass(const Job *job, Rows *rows, const int KIND, const int GRADIENT, const int SMOOTH) {
    double t1 = job->t1, t2 = job->t2, of_v[LANES];
    Factors c = factors(job, rows);
    EACH(l) {
        rows->p[l] = exp_(-rows->m[l]);
        rows->p_power[l] = exp_((t1 - t2) * rows->m[l]);
        of_v[l] = rows->W[l] * rows->p[l] * rows->p_power[l];
    }
    vf v_factor = narrow(of_v), z_factor = narrow(rows->p_power), log_none = all((float)log_t_of_0(t1));
    float h_power = (float)(2 - t1), b_power = (float)(t2 - t1), tau = (float)(1 - t1);
    EACH(l) rows->r[l] = rows->h[l] = rows->e_sum[l] = rows->v_sum[l] = rows->z_log_r[l] = 0;
    for (int64_t start = 0; start < rows->length; start += CHUNK) {
        vf s_r = {0}, s_h = {0}, s_e = {0}, s_v = {0}, s_z = {0};
        for (int64_t j = start; j < least(start + CHUNK, rows->length); j++) {
            Ratios of = ratios(rows, j, &c, KIND);
            vf y = of.y, r = keep(of.in, exp2_v(y)), d = keep(of.in, of.d);
            vf h = keep(of.in & (y * h_power > -126.0f), exp2_v(y * h_power));
            s_r += r, s_h += h;
            vi present = KIND < 0 ? of.w > 0.0f : y == y;
            if (SMOOTH) {
                vf log_r = tau == 0 ? y * 0.693147182f : expm1_v(y * (0.693147182f * tau)) / tau; /* log_t1 r */
                s_z += job->z[j] * pick(present, log_r, log_none);
            }
            if (!GRADIENT) continue;
            vf e = r * d, v = h * d * v_factor;
            if (KIND < 0 && t2 == 0) e = pick(of.w == 0.0f, all(1), e); /* the edge of the support is inside */
            if (SMOOTH && t1 < t2)
                v -= job->z[j] * z_factor * keep(present & (y * b_power > -126.0f), exp2_v(y * b_power));
            else if (SMOOTH) /* y_hat^0 is 1, for masked classes too unless the support is finite */
                v -= job->z[j] * (KIND < 0 ? keep(of.w >= 0.0f, all(1)) : all(1));
            rows->e[j] = e, rows->v[j] = v;
            s_e += e, s_v += v;
        }
        carry(s_r, rows->r), carry(s_h, rows->h);
        if (SMOOTH) carry(s_z, rows->z_log_r);
        if (GRADIENT) carry(s_e, rows->e_sum), carry(s_v, rows->v_sum);
    }
    finish(rows, rows->r, 0), finish(rows, rows->h, 0), finish(rows, rows->z_log_r, 0);
    finish(rows, rows->e_sum, 0), finish(rows, rows->v_sum, 0);
}

#define FOR_KIND(name, KIND)                                                         \
    static __attribute__((noinline)) void name(const Job *job, Rows *rows) {         \
        solve(job, rows, KIND);                                                      \
        if (job->z) last_pass(job, rows, KIND, 1, 1);                                \
        else if (job->gradient) last_pass(job, rows, KIND, 1, 0);                    \
        else last_pass(job, rows, KIND, 0, 0);                                       \
    }
FOR_KIND(below_1, -1)
FOR_KIND(at_1, 0)
FOR_KIND(above_1, 1)

static void solve_and_sum(const Job *job, Rows *rows) {
    for (int attempt = 0; attempt < 3; attempt++) { /* once, unless rounding misled it */
        job->s < 0 ? below_1(job, rows) : job->s > 0 ? above_1(job, rows) : at_1(job, rows);
        double most = 0;
        EACH(l) most = fmax(most, fabs((1 + rows->r[l]) * rows->p[l] - 1));
        if (most < 1e-6) return;
    }
}

/* The divergence of a smoothed target, sum z (log_t1(z / W) - log_t1 y_hat) - (sum z^(2 - t1) W^(t1 - 1) - W sum
   y_hat^(2 - t1)) / (2 - t1), with log_t(z / W) = log_t z + z^(1 - t) log_t(1 / W). d is -log y_hat of the label. */
static double smoothed_loss(const Job *job, const Rows *rows, int l, double d) {
    double t1 = job->t1, W = rows->W[l], m = rows->m[l], label = rows->z_label[l], top = z_of(job, rows->top[l]);
    double before = z_of(job, rows->label[l]), z[2] = {before, before + label}, z_log = job->z_log, z_pow = job->z_pow;
    for (int i = 0; i < 2; i++) { /* the label's z is put in place of what was there */
        double log_z = log_(z[i] > 0 ? z[i] : 1), sign = i ? 1 : -1;
        z_log += sign * z[i] * phi(log_z, 1 - t1);
        z_pow += z[i] > 0 ? sign * exp_((2 - t1) * log_z) : 0;
    }
    /* log_t(p r) = log_t p + p^(1 - t) log_t r, p that of the top, whose own r the pass took for 0. */
    double log_p = job->z_sum * phi(-m, 1 - t1) + (label > 0 ? label * phi(-d, 1 - t1) : 0);
    log_p += exp_((t1 - 1) * m) * (rows->z_log_r[l] - top * log_t_of_0(t1));
    if (t1 >= 1 && rows->count[l] < job->k)
        for (int64_t i = 0; i < job->k; i++)
            if (z_of(job, i) > 0 && (float)rows->max[l] - job->logits[rows->row[l] * job->stride + i] == INFINITY)
                return INFINITY;
    double log_W = log_(W), p_pow = (1 + rows->h[l]) * exp_((t1 - 2) * m);
    return z_log + z_pow * phi(-log_W, 1 - t1) - log_p - (z_pow * exp_((t1 - 1) * log_W) - W * p_pow) / (2 - t1);
}

static void block(const Job *job, int64_t first, Rows *rows) {
    double t1 = job->t1, t2 = job->t2, s = job->s, gap[LANES], d[LANES], T[LANES], loss[LANES];
    double is_top[LANES], z_top[LANES];
    EACH(l) {
        rows->row[l] = rows->folded ? first : least(first + l, job->n - 1);
        int64_t y = job->target[rows->row[l]], ignored = y == job->ignore_index;
        double w = ignored ? 0 : job->weight ? job->weight[y] : 1;
        rows->label[l] = ignored ? 0 : y;
        rows->z_label[l] = (1 - job->smoothing) * w;
        rows->W[l] = ignored ? 0 : rows->z_label[l] + job->z_sum;
    }
    rows->used = rows->folded ? 1 : (int)least(LANES, job->n - first);
    load(job, rows);
    solve_and_sum(job, rows);

    EACH(l) {
        is_top[l] = rows->label[l] == rows->top[l];
        gap[l] = rows->max[l] - job->logits[rows->row[l] * job->stride + rows->label[l]];
        z_top[l] = z_of(job, rows->top[l]) + (is_top[l] ? rows->z_label[l] : 0);
    }
    EACH(l) { /* d = -log y_hat of the label, T = y_hat^(t2 - t1), and core.label_loss */
        double m = rows->m[l], x = s * gap[l] * rows->decay[l], to_label = s == 0 ? gap[l] : log1p_(x) / s;
        d[l] = gap[l] < INFINITY ? m + to_label : INFINITY;
        T[l] = t1 < t2 ? exp_((t1 - t2) * d[l]) : s >= 0 || x >= -1 ? 1.0 : 0.0;
        double of_label = expm1_((t1 - 2) * d[l]), top = exp_((t1 - 2) * m); /* y_hat^(2 - t1), of the label less 1 */
        double others = rows->h[l] * top + (is_top[l] ? 0 : top - 1 - of_label);
        loss[l] = rows->W[l] * (phi(d[l], t1 - 1) + (of_label + others) / (2 - t1));
    }
    for (int l = 0; l < rows->used; l++) {
        if (job->z) loss[l] = smoothed_loss(job, rows, l, d[l]);
        job->losses[first + l] = rows->W[l] == 0 ? 0 : rows->bad[l] ? NAN : loss[l] < 0 ? 0 : (float)loss[l];
    }
    if (!job->gradient) return;

    float *gradient = (float *)rows->v;
    double e_factor[LANES], top[LANES], label[LANES];
    EACH(l) rows->v_sum[l] -= gradient[place(rows, rows->top[l], l)];
    EACH(l) {
        double v_top = (rows->W[l] * rows->p[l] - z_top[l]) * rows->p_power[l] * job->scale;
        label[l] = is_top[l] ? 0 : rows->z_label[l] * T[l] * job->scale;
        e_factor[l] = (v_top + rows->v_sum[l] * job->scale - label[l]) / (1 + rows->e_sum[l]);
        top[l] = v_top - e_factor[l];
    }
    vf factor = narrow(e_factor);
    for (int64_t j = 0; j < rows->length; j++) rows->v[j] = rows->v[j] * (float)job->scale - rows->e[j] * factor;
    for (int l = 0; l < rows->used; l++) {
        float *out = job->gradient + (first + l) * job->k;
        gradient[place(rows, rows->label[l], l)] -= (float)label[l];
        gradient[place(rows, rows->top[l], l)] = (float)top[l];
        if (rows->W[l] == 0 || rows->bad[l])
            for (int64_t i = 0; i < job->k; i++) out[i] = rows->W[l] == 0 ? 0 : NAN;
        else if (rows->folded)
            memcpy(out, gradient, job->k * sizeof(float));
        else
            for (int64_t i = 0; i < job->k; i++) out[i] = gradient[i * LANES + l];
    }
}

static int64_t block_length(int64_t k) { return k < FOLDED_FROM ? k : (k + LANES - 1) / LANES; }

static void work(void *data) {
    Job *job = data;
    Rows rows = {.folded = job->k >= FOLDED_FROM, .length = block_length(job->k)};
    rows.u = aligned_alloc(sizeof(vf), 4 * rows.length * sizeof(vf));
    if (!rows.u) {
        __atomic_store_n(&job->out_of_memory, 1, __ATOMIC_RELAXED);
        return;
    }
    rows.low = rows.u + rows.length, rows.e = rows.low + rows.length, rows.v = rows.e + rows.length;
    int64_t at_once = rows.folded ? 1 : LANES, grain = at_once * (1 + GRAIN / (rows.length * LANES));
    for (int64_t row; (row = __atomic_fetch_add(&job->next, grain, __ATOMIC_RELAXED)) < job->n;)
        for (int64_t i = row; i < least(row + grain, job->n); i += at_once) block(job, i, &rows);
    free(rows.u);
}

/* What smoothing gives to every class, and its sums. */
static void spread_label(Job *job) {
    float *z = (float *)job->z;
    int lanes = job->k < FOLDED_FROM ? LANES : 1;
    memset(z, 0, block_length(job->k) * sizeof(vf));
    for (int64_t i = 0; i < job->k; i++) {
        double zi = z_of(job, i), log_z = log_(zi > 0 ? zi : 1);
        for (int l = 0; l < lanes; l++) z[i * lanes + l] = (float)zi;
        job->z_sum += zi;
        job->z_log += zi * phi(log_z, 1 - job->t1);
        job->z_pow += zi > 0 ? exp_((2 - job->t1) * log_z) : 0;
    }
}

/* OpenMP's entry point, from the library that torch itself uses; null for one thread. */
typedef void Parallel(void (*work)(void *), void *data, unsigned threads, unsigned flags);

enum { NONE, SUM, MEAN };
enum { FINE, BAD_INDEX, OUT_OF_MEMORY };

/* Rows of logits are `stride` apart; weight and gradient may be null. out takes n numbers, or the one they are reduced
   to: a mean divides by the summed weights of the targets. */
int bitempered_loss(const float *logits, int64_t stride, const int64_t *target, const float *weight, int64_t n,
                    int64_t k, double t1, double t2, double smoothing, int64_t ignore_index, int reduction, float *out,
                    float *gradient, Parallel *parallel, int threads) {
    double weights = 0, sum = 0;
    for (int64_t i = 0; i < n; i++) {
        if (target[i] == ignore_index) continue;
        if (target[i] < 0 || target[i] >= k) return BAD_INDEX;
        weights += weight ? weight[target[i]] : 1;
    }
    Job job = {.logits = logits, .stride = stride, .target = target, .weight = weight, .n = n, .k = k, .t1 = t1,
               .t2 = t2, .s = t2 - 1, .smoothing = smoothing, .ignore_index = ignore_index, .losses = out,
               .gradient = gradient, .scale = reduction == MEAN ? 1 / weights : 1};
    if (reduction != NONE) job.losses = malloc((n + 1) * sizeof(float));
    if (smoothing > 0) job.z = aligned_alloc(sizeof(vf), block_length(k) * sizeof(vf));
    job.out_of_memory = (reduction != NONE && !job.losses) || (smoothing > 0 && !job.z);
    if (job.z && !job.out_of_memory) spread_label(&job);
    if (!job.out_of_memory && parallel && threads > 1 && n * k > GRAIN)
        parallel(work, &job, (unsigned)threads, 0);
    else if (!job.out_of_memory)
        work(&job);
    if (reduction != NONE && !job.out_of_memory) {
        for (int64_t i = 0; i < n; i++) sum += job.losses[i];
        *out = (float)(reduction == MEAN ? sum / weights : sum);
    }
    if (reduction != NONE) free(job.losses);
    free(job.z);
    return job.out_of_memory ? OUT_OF_MEMORY : FINE;
}
