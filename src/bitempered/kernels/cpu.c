/* The loss of class indices and its gradient, in float32 on a CPU: core.py restated, with its symbols.

   A block is LANES rows side by side if there are few classes, or one row folded into LANES columns. Vectors run over
   it either way, and it is read from memory once: later passes find it in the cache. Numbers per row are float64, and
   sums are carried over to float64 every CHUNK vectors.

   The largest logit, the top, is left out of the float32 sums: its r is 1, and its gradient is computed in float64. So
   the small gradients of confident rows, right or wrong, have a relative error of 1e-5.

   Float32 is not enough for smoothed targets, whose divergence is a sum of small differences, for large weights, which
   magnify its rounding, and for gaps near its largest number. There float32 only finds m to about 1e-7, and the
   functions named _64 continue in float64. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "vectors.h"

#define FOLDED_FROM 512 /* classes */
#define CHUNK 32
#define GRAIN 4096  /* a thread takes blocks of at least this many logits at once */
#define MAGNIFIED 8 /* a gradient scaled by more than this needs float64: float32 is off by up to 2e-7 */

typedef struct {
    const float *logits, *weight; /* weight may be null */
    const int64_t *target;
    double *losses;
    float *gradient; /* may be null */
    int64_t stride, n, k, ignore_index;
    double t1, t2, s, smoothing, scale; /* scale: 1 over what a mean divides by */
    vd *z, *log_z, *z_power; /* the target w y without its label, its log, its power 1 - t1, as blocks; or null */
    double z_sum;
    int64_t next; /* the first row that no thread has taken */
    int out_of_memory;
} Job;

typedef struct { /* the state of a block, by lane; in a folded row all lanes hold the same */
    int folded, used, in_float64; /* used: how many lanes stand for a row each */
    int64_t length;               /* in vectors */
    vf *u, *low;                  /* the block: gaps, and what rounding took from them */
    vf *e, *v;                    /* the results of the last pass, */
    vd *e_64, *v_64;              /* or in float64, in the same memory */
    int64_t row[LANES], top[LANES], label[LANES];
    vl bad[2], is_top[2];           /* rows with NaN, +inf, or nothing but -inf; whose label is the top */
    Lanes max, count, m, W, scale;  /* scale: W over what a mean divides by */
    Lanes decay, p, p_power;        /* e^(-s m), y_hat of the top, its power t2 - t1 */
    Lanes r, h, e_sum, v_sum, loss; /* sums of the last pass, without the top */
    Lanes z_label, x, d, T; /* of the label: its z before smoothing, s u e^(-s m), -log y_hat, y_hat^(t2 - t1) */
} Rows;

typedef struct {
    Lanes r, r_t, r_2t;
} Powers;

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE void finish(const Rows *rows, vd *sums, double top) {
    double sum = 0;
    EACH(l) sum += lanes(sums)[l];
    HALVES(h) sums[h] = (rows->folded ? all64(sum) : sums[h]) + top;
}
INLINE int64_t place(const Rows *rows, int64_t class, int l) { return rows->folded ? class : class * LANES + l; }
INLINE double z_of(const Job *job, int64_t class) {
    return job->smoothing == 0 ? 0 : job->smoothing / job->k * (job->weight ? job->weight[class] : 1);
}

/* Gaps u; NaN marks the columns to leave out: masked classes, those beyond the last class, and the top. */
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
    Lanes sum = {0};
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
    if (largest(sum) >= limit) { /* low must also hold what the limit has cut off */
        rows->in_float64 = 1;
        EACH(l) for (int64_t i = 0; i < job->k; i++) {
            int64_t at = place(rows, i, l);
            if (scalars[at] < limit || scalars[at] != scalars[at]) continue;
            double gap = (double)max[l] - job->logits[rows->row[l] * job->stride + i];
            ((float *)rows->low)[at] = (float)(gap - limit);
        }
    }
    if (rows->folded) {
        int last = 0;
        EACH(l) last = top[l] > last ? top[l] : last;
        top = (vi){0} + last;
    }
    EACH(l) {
        rows->top[l] = top[l];
        scalars[place(rows, top[l], l)] = NAN;
        ((int64_t *)rows->bad)[l] = nan[l];
    }
    HALVES(h) {
        rows->max[h] = half(&max, h);
        rows->bad[h] = (rows->bad[h] != 0) | ~((rows->max[h] > -INFINITY) & (rows->max[h] < INFINITY));
        /* core.start */
        vd log_n = log_(rows->count[h]), v = sum[h] / rows->count[h] * exp_(-job->s * log_n);
        vd bound = log_n - psi(v, -job->s);
        rows->m[h] = keep64((job->s * v < 1.0) & (bound > 0.0) & ~rows->bad[h], bound);
    }
}

typedef struct { /* s e^(-s m), and its rounding error; log2(e) / -s */
    vf high, minus_high, low, to_log2;
} Factors;

INLINE Factors factors(const Job *job, Rows *rows) {
    Lanes high, low;
    double s = job->s;
    HALVES(h) {
        rows->decay[h] = exp_(-s * rows->m[h]);
        high[h] = s * rows->decay[h];
    }
    vf rounded = narrow(high);
    HALVES(h) low[h] = high[h] - half(&rounded, h);
    vf minus_high = -rounded;
    __asm__("" : "+m"(minus_high)); /* a compiler that knew it to be -high would not fuse 1 - u minus_high below */
    return (Factors){rounded, minus_high, narrow(low), all((float)(-1.4426950408889634 / (s == 0 ? 1 : s)))};
}

typedef struct { /* w = 1 + s u e^(-s m), y = log2 r, d = 1 / w = r^s; in: where r is not 0 */
    vf w, y, d;
    vi in;
} Ratios;

INLINE Ratios ratios(const Rows *rows, int64_t j, const Factors *c, const int KIND) { /* KIND is the sign of s */
    vf u = rows->u[j], x = u * c->high, w = 1 - u * c->minus_high;
    if (KIND < 0) { /* near the edge of the support rounding would show */
        w += u * c->low + rows->low[j] * c->high;
#ifndef __FP_FAST_FMAF
        w += lost(u, c->high, x);
#endif
    }
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

/* core.normalizer by Halley's method, whose third sum costs two multiplications. It may overshoot, so we fall back to
   the Newton step from a lower bound, which is a lower bound too. With h, half the curvature times the Newton step, the
   error after a step is of the order of h change^2. If the support is finite (s < 0) classes may have entered it, and
   only a small change shows that m has settled. */
INLINE void solve(const Job *job, Rows *rows, const int KIND) {
    double t = job->t2, s = job->s;
    Lanes bound = {0}, left;
    for (int step = 0; step < 30; step++) {
        Powers sums;
        sum_powers(job, rows, &sums, KIND);
        HALVES(i) {
            vd before = rows->m[i], log_z = log_(sums.r[i]) - before, R = sums.r[i] / sums.r_t[i];
            vd power = expm1_(s * log_z), h = all64(0);
            if (KIND) h = 0.5 * t / s * power * (1 - R * sums.r_2t[i] / sums.r_t[i]);
            power = pick64(power < 1e300, power / (1 + power), all64(1));
            h = pick64(h > -0.5, h, all64(-0.5));
            h = pick64(h < 0.5, h, all64(0.5));
            vd newton = before + log_z, halley = newton;
            if (KIND) newton += log1p_((R - 1) * power) / s, halley += log1p_((R / (1 + h) - 1) * power) / s;
            bound[i] = pick64((log_z >= 0.0) & (newton > bound[i]), newton, bound[i]);
            rows->m[i] = pick64(halley > bound[i], halley, bound[i]);
            vd change = abs64(rows->m[i] - before);
            left[i] = KIND == 0 ? all64(0) : KIND > 0 ? abs64(h) * change * change : 0.3 * change;
        }
        if (largest(left) < 3e-7) return;
    }
}

/* The last pass: e = r^t2, v = y_hat^(1 + t2 - t1) scaled, and the sums of Rows, h = r^(2 - t1). */
INLINE void last_pass(const Job *job, Rows *rows, const int KIND, const int GRADIENT) {
    double t1 = job->t1, t2 = job->t2;
    Lanes of_v;
    Factors c = factors(job, rows);
    HALVES(i) {
        rows->p[i] = exp_(-rows->m[i]);
        rows->p_power[i] = exp_((t1 - t2) * rows->m[i]);
        of_v[i] = rows->scale[i] * rows->p[i] * rows->p_power[i];
        rows->r[i] = rows->h[i] = rows->e_sum[i] = rows->v_sum[i] = all64(0);
    }
    vf v_factor = narrow(of_v);
    float h_power = (float)(2 - t1);
    for (int64_t start = 0; start < rows->length; start += CHUNK) {
        vf s_r = {0}, s_h = {0}, s_e = {0}, s_v = {0};
        for (int64_t j = start; j < least(start + CHUNK, rows->length); j++) {
            Ratios of = ratios(rows, j, &c, KIND);
            vf y = of.y, r = keep(of.in, exp2_v(y)), d = keep(of.in, of.d);
            vi some = y * h_power > -126.0f; /* not only where r is not 0: 2 - t1 may be small */
            vf h = keep(KIND < 0 ? some & (of.w > 0.0f) : some, exp2_v(y * h_power));
            s_r += r, s_h += h;
            if (!GRADIENT) continue;
            vf e = r * d, v = h * d * v_factor;
            if (KIND < 0 && t2 == 0) e = pick(of.w == 0.0f, all(1), e); /* the edge of the support is inside */
            rows->e[j] = e, rows->v[j] = v;
            s_e += e, s_v += v;
        }
        carry(s_r, rows->r), carry(s_h, rows->h);
        if (GRADIENT) carry(s_e, rows->e_sum), carry(s_v, rows->v_sum);
    }
    finish(rows, rows->r, 0), finish(rows, rows->h, 0), finish(rows, rows->e_sum, 0), finish(rows, rows->v_sum, 0);
}

typedef struct { /* as Ratios, in float64; left_out: the top, and for the last pass the label */
    vd w, log_r;
    vl inside, left_out;
} Ratios64;

INLINE Ratios64 ratios_64(const Rows *rows, int64_t j, int h, vd factor, double s, const int KIND) {
    vd u = half(&rows->u[j], h), low = half(&rows->low[j], h), gap = u + low, x = gap * factor, w = 1 + x;
    vd log_r = KIND ? log1p_(x) * (-1 / s) : -gap;
    return (Ratios64){KIND ? w : all64(1), log_r, KIND < 0 ? w > 0.0 : gap == gap, (u != u) & (low == low)};
}

/* core.normalizer, continued from float32. The error after a step is of the order of t2 change^2; but see `solve`. */
INLINE void solve_64(const Job *job, Rows *rows, const int KIND) {
    double s = job->s;
    for (int step = 0; step < 30; step++) {
        Lanes factor, r = {0}, r_t = {0}, left;
        HALVES(h) factor[h] = s * exp_(-s * rows->m[h]);
        for (int64_t j = 0; j < rows->length; j++) HALVES(h) {
            Ratios64 of = ratios_64(rows, j, h, factor[h], s, KIND);
            vd ratio = keep64(of.inside, exp_(of.log_r));
            r[h] += ratio, r_t[h] += keep64(of.inside, ratio / of.w);
        }
        finish(rows, r, 0), finish(rows, r_t, 0);
        HALVES(h) {
            vd before = rows->m[h], log_z = log1p_(r[h]) - before, excess = (r[h] - r_t[h]) / (1 + r_t[h]);
            vd m = before + log_z;
            if (KIND) m += log1p_(-excess * expm1_(-s * log_z)) / s;
            rows->m[h] = keep64(m > 0.0, m);
            vd change = abs64(rows->m[h] - before);
            left[h] = KIND == 0 ? all64(0) : KIND > 0 ? (1 + job->t2) * change * change : 1e-4 * change;
        }
        if (largest(left) < 1e-12) return;
    }
}

/* One class's part of the divergence, and v = (y_hat - q) y_hat^(t2 - t1). */
typedef struct {
    vd loss, v;
} Part;

#define LOG_0 -1e30 /* finite: 0 times it is 0 */

/* core.loss of a class without cancellation, for every t1 < 2. With d = log(q / y_hat), a = q^(1 - t1) and
   b = y_hat^(1 - t1) it is

       b (q phi_{1-t1}(d) - q + y_hat) / (2 - t1)  =  b (q - y_hat - y_hat phi_{2-t1}(d)) / (t1 - 1),

   the first for t1 away from 2, the second for t1 away from 1. `risen` is b q phi(d) or b y_hat phi(d), a difference of
   powers. Next to t1 = 1 or 2 these cancel, and it is computed as a power times expm1, with the larger power, since
   the other may overflow. Near d = 0 everything cancels, and both formulas are b q times a series in d.
   T = y_hat^(t2 - t1); inside: where y_hat is not 0. */
INLINE Part part(double t1, vd q, vd log_q, vd a, vd p, vd log_p, vd b, vd T, vl inside) {
    double tau = 1 - t1, kappa = 2 - t1, rate = t1 > 1.5 ? kappa : tau, speed = fabs(rate);
    vd d = log_q - log_p, size = abs64(d), q_or_p = t1 > 1.5 ? p : q, risen;
    if (speed > 1e-3) {
        risen = (q * a - q_or_p * b) / rate;
    } else {
        vd rise = speed == 0 ? size : expm1_(-speed * size) * (-1 / speed);
        risen = pick64(rate * d > 0.0, q * a, q_or_p * b) * pick64(d > 0.0, rise, -rise);
    }
    double c3 = tau - 1, c4 = tau * tau - c3, c5 = tau * tau * tau - c4, c6 = tau * tau * tau * tau - c5;
    vd series = 0.5 + d * (c3 / 6 + d * (c4 / 24 + d * (c5 / 120 + d * (c6 / 720))));
    vd away = (risen - b * (q - p)) * (t1 > 1.5 ? 1 / tau : 1 / kappa);
    vd of_0 = keep64(q > 0.0, tau > 0 ? q * a * (1 / (tau * kappa)) : all64(INFINITY));
    return (Part){pick64(inside, pick64(size < 0.03, b * q * d * d * series, away), of_0), (p - q) * T};
}

/* The same from q and log y_hat alone. */
INLINE Part part_of(double t1, vd q, vd log_p, vd T, vl inside) {
    vd log_q = pick64(q > 0.0, log_(q), all64(LOG_0)), a = keep64(q > 0.0, exp_((1 - t1) * log_q));
    return part(t1, q, log_q, a, keep64(inside, exp_(log_p)), log_p, exp_((1 - t1) * log_p), T, inside);
}

/* The last pass in float64, over all classes except the top and the label; the sum of their parts goes to `loss`. */
INLINE void last_pass_64(const Job *job, Rows *rows, const int KIND, const int SMOOTH) {
    double t1 = job->t1, t2 = job->t2, s = job->s, tau = 1 - t1;
    Lanes log_W, W_power, over_W;
    EACH(l) { /* as the top; masked classes have NaN in both */
        int64_t label = place(rows, rows->label[l], l);
        ((float *)rows->u)[label] = NAN, ((float *)rows->low)[label] = 0;
    }
    HALVES(h) {
        rows->decay[h] = exp_(-s * rows->m[h]);
        rows->p[h] = exp_(-rows->m[h]);
        rows->p_power[h] = exp_((t1 - t2) * rows->m[h]);
        log_W[h] = log_(rows->W[h]), W_power[h] = exp_(-tau * log_W[h]), over_W[h] = 1 / rows->W[h];
        rows->loss[h] = rows->e_sum[h] = rows->v_sum[h] = all64(0);
    }
    for (int64_t j = 0; j < rows->length; j++) HALVES(h) {
        Ratios64 r = ratios_64(rows, j, h, s * rows->decay[h], s, KIND);
        vd log_p = r.log_r - rows->m[h], p = keep64(r.inside, exp_(log_p));
        vd b = keep64(r.inside, tau == 0 ? all64(1) : exp_(tau * log_p));
        vd over_w = keep64(r.inside, 1 / r.w), e = p * over_w, T = b * rows->decay[h] * over_w;
        vl edge = r.w == 0.0; /* of the support, and inside: 0^0 is 1 */
        if (KIND < 0 && t2 == 0) e = pick64(edge, rows->p[h], e);
        if (t1 == t2) T = pick64(r.inside, T, KIND < 0 ? keep64(edge, all64(1)) : all64(1));
        Part of = {p * b * (1 / (2 - t1)), p * T};
        if (SMOOTH) {
            int64_t i = 2 * j + h;
            vd q = keep64(~r.left_out, job->z[i] * over_W[h]);
            of = part(t1, q, job->log_z[i] - log_W[h], job->z_power[i] * W_power[h], p, log_p, b, T, r.inside);
        }
        rows->e_64[2 * j + h] = e, rows->v_64[2 * j + h] = of.v;
        rows->loss[h] += of.loss, rows->e_sum[h] += e, rows->v_sum[h] += of.v;
    }
    finish(rows, rows->loss, 0), finish(rows, rows->e_sum, 0), finish(rows, rows->v_sum, 0);
}

#define FOR_KIND(name, KIND)                                                         \
    static __attribute__((noinline)) void name(const Job *job, Rows *rows) {         \
        solve(job, rows, KIND);                                                      \
        if (rows->in_float64) {                                                      \
            solve_64(job, rows, KIND);                                               \
            if (job->z) last_pass_64(job, rows, KIND, 1);                            \
            else last_pass_64(job, rows, KIND, 0);                                   \
        } else if (job->gradient) last_pass(job, rows, KIND, 1);                     \
        else last_pass(job, rows, KIND, 0);                                          \
    }
FOR_KIND(below_1, -1)
FOR_KIND(at_1, 0)
FOR_KIND(above_1, 1)

static void solve_and_sum(const Job *job, Rows *rows) {
    for (int attempt = 0; attempt < 3; attempt++) { /* once, unless rounding misled it */
        job->s < 0 ? below_1(job, rows) : job->s > 0 ? above_1(job, rows) : at_1(job, rows);
        if (rows->in_float64) return;
        Lanes off;
        HALVES(h) off[h] = abs64((1 + rows->r[h]) * rows->p[h] - 1);
        if (largest(off) < 1e-6) return;
    }
}

/* The losses and gradients from the results of a last pass. */
static float *conclude(const Job *job, Rows *rows) {
    float *gradient = (float *)rows->v;
    double t1 = job->t1;
    Lanes e_factor, top, label;
    HALVES(h) { /* core.label_loss */
        vd d = rows->d[h], of_label = expm1_((t1 - 2) * d); /* y_hat^(2 - t1), of the label less 1 */
        vd of_top = exp_((t1 - 2) * rows->m[h]);
        vd others = rows->h[h] * of_top + keep64(~rows->is_top[h], of_top - 1 - of_label);
        rows->loss[h] = phi(d, t1 - 1) + (of_label + others) / (2 - t1);
    }
    if (!job->gradient) return NULL;
    HALVES(h) {
        vd v_top = (rows->p[h] - keep64(rows->is_top[h], all64(1))) * rows->p_power[h] * rows->scale[h];
        label[h] = keep64(~rows->is_top[h], rows->T[h] * rows->scale[h]);
        vd v_sum = rows->v_sum[h] - label[h], e_sum = rows->e_sum[h];
        e_factor[h] = (v_top + v_sum) / (1 + e_sum);
        top[h] = (v_top * e_sum - v_sum) / (1 + e_sum);
    }
    vf factor = narrow(e_factor);
    for (int64_t j = 0; j < rows->length; j++) rows->v[j] -= rows->e[j] * factor;
    for (int l = 0; l < rows->used; l++) {
        gradient[place(rows, rows->label[l], l)] -= (float)lanes(label)[l];
        gradient[place(rows, rows->top[l], l)] = (float)lanes(top)[l];
    }
    return gradient;
}

static float *conclude_64(const Job *job, Rows *rows) {
    float *gradient = (float *)rows->u;
    double t1 = job->t1;
    Lanes z_top, z_label, e_factor, top, label;
    EACH(l) {
        lanes(z_top)[l] = z_of(job, rows->top[l]);
        lanes(z_label)[l] = z_of(job, rows->label[l]) + lanes(rows->z_label)[l];
    }
    HALVES(h) {
        vl is_top = rows->is_top[h], inside = rows->d[h] < INFINITY;
        vd p = rows->p[h], q_label = z_label[h] / rows->W[h], q_top = pick64(is_top, q_label, z_top[h] / rows->W[h]);
        vd e_label = keep64(inside, exp_(-rows->d[h]) / (1 + rows->x[h]));
        if (job->t2 == 0) e_label = pick64(rows->x[h] == -1.0, p, e_label);
        Part of_top = part_of(t1, q_top, -rows->m[h], rows->p_power[h], p > 0.0);
        Part of_label = part_of(t1, q_label, -rows->d[h], rows->T[h], inside);
        rows->loss[h] += of_top.loss + keep64(~is_top, of_label.loss);
        vd e_sum = rows->e_sum[h] + keep64(~is_top, e_label), v_sum = rows->v_sum[h] + keep64(~is_top, of_label.v);
        e_factor[h] = (of_top.v + v_sum) / (p + e_sum);
        label[h] = (of_label.v - e_label * e_factor[h]) * rows->scale[h];
        top[h] = (of_top.v * e_sum - p * v_sum) / (p + e_sum) * rows->scale[h];
    }
    if (!job->gradient) return NULL;
    for (int64_t j = 0; j < rows->length; j++) {
        Lanes x;
        HALVES(h) x[h] = (rows->v_64[2 * j + h] - rows->e_64[2 * j + h] * e_factor[h]) * rows->scale[h];
        rows->u[j] = narrow(x);
    }
    for (int l = 0; l < rows->used; l++) {
        gradient[place(rows, rows->label[l], l)] = (float)lanes(label)[l];
        gradient[place(rows, rows->top[l], l)] = (float)lanes(top)[l];
    }
    return gradient;
}

static void block(const Job *job, int64_t first, Rows *rows) {
    double t1 = job->t1, t2 = job->t2, s = job->s;
    Lanes gap;
    rows->used = rows->folded ? 1 : (int)least(LANES, job->n - first);
    rows->in_float64 = job->z != NULL;
    EACH(l) {
        rows->row[l] = rows->folded ? first : least(first + l, job->n - 1);
        int64_t y = job->target[rows->row[l]], ignored = y == job->ignore_index;
        double w = ignored ? 0 : job->weight ? job->weight[y] : 1, z_label = (1 - job->smoothing) * w;
        double W = ignored ? 0 : z_label + job->z_sum, scale = W * job->scale;
        rows->label[l] = ignored ? 0 : y;
        lanes(rows->z_label)[l] = z_label, lanes(rows->W)[l] = W, lanes(rows->scale)[l] = scale;
        rows->in_float64 |= scale > MAGNIFIED;
    }
    load(job, rows);
    solve_and_sum(job, rows);
    EACH(l) {
        ((int64_t *)rows->is_top)[l] = -(rows->label[l] == rows->top[l]);
        lanes(gap)[l] = lanes(rows->max)[l] - job->logits[rows->row[l] * job->stride + rows->label[l]];
    }
    HALVES(h) {
        vd x = s == 0 ? all64(0) : s * gap[h] * rows->decay[h], to_label = s == 0 ? gap[h] : log1p_(x) / s;
        vd d = pick64(gap[h] < INFINITY, rows->m[h] + to_label, all64(INFINITY)), one = all64(1);
        rows->x[h] = x, rows->d[h] = d;
        rows->T[h] = t1 < t2 ? exp_((t1 - t2) * d) : s < 0 ? keep64(x >= -1.0, one) : one;
    }
    float *gradient = rows->in_float64 ? conclude_64(job, rows) : conclude(job, rows);
    for (int l = 0; l < rows->used; l++) {
        int bad = ((int64_t *)rows->bad)[l] != 0;
        double W = lanes(rows->W)[l], loss = W * lanes(rows->loss)[l];
        job->losses[first + l] = W == 0 ? 0 : bad ? NAN : loss < 0 ? 0 : loss;
        if (!gradient) continue;
        float *out = job->gradient + (first + l) * job->k;
        if (W == 0 || bad)
            for (int64_t i = 0; i < job->k; i++) out[i] = W == 0 ? 0 : NAN;
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
    rows.u = aligned_alloc(sizeof(vf), 6 * rows.length * sizeof(vf));
    if (!rows.u) {
        __atomic_store_n(&job->out_of_memory, 1, __ATOMIC_RELAXED);
        return;
    }
    rows.low = rows.u + rows.length, rows.e = rows.low + rows.length, rows.v = rows.e + rows.length;
    rows.e_64 = (vd *)rows.e, rows.v_64 = rows.e_64 + 2 * rows.length;
    int64_t at_once = rows.folded ? 1 : LANES, grain = at_once * (1 + GRAIN / (rows.length * LANES));
    for (int64_t row; (row = __atomic_fetch_add(&job->next, grain, __ATOMIC_RELAXED)) < job->n;)
        for (int64_t i = row; i < least(row + grain, job->n); i += at_once) block(job, i, &rows);
    free(rows.u);
}

/* The share of the target that smoothing gives to every class. */
static void spread_label(Job *job) {
    int64_t size = 2 * block_length(job->k), times = job->k < FOLDED_FROM ? LANES : 1;
    job->log_z = job->z + size, job->z_power = job->log_z + size;
    memset(job->z, 0, size * sizeof(vd));
    for (int64_t i = 0; i < job->k; i++) {
        double z = z_of(job, i);
        job->z_sum += z;
        for (int64_t l = 0; l < times; l++) lanes(job->z)[i * times + l] = z;
    }
    for (int64_t i = 0; i < size; i++) {
        vl some = job->z[i] > 0.0;
        vd log_z = log_(job->z[i]);
        job->log_z[i] = pick64(some, log_z, all64(LOG_0));
        job->z_power[i] = keep64(some, exp_((1 - job->t1) * log_z));
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
               .t2 = t2, .s = t2 - 1, .smoothing = smoothing, .ignore_index = ignore_index,
               .losses = malloc((n + 1) * sizeof(double)), .gradient = gradient,
               .scale = reduction != MEAN ? 1 : weights > 0 ? 1 / weights : 0}; /* a mean of nothing has no gradient */
    if (smoothing > 0) job.z = aligned_alloc(sizeof(vd), 6 * block_length(k) * sizeof(vd));
    job.out_of_memory = !job.losses || (smoothing > 0 && !job.z);
    if (job.z && !job.out_of_memory) spread_label(&job);
    if (!job.out_of_memory && parallel && threads > 1 && n * k > GRAIN)
        parallel(work, &job, (unsigned)threads, 0);
    else if (!job.out_of_memory)
        work(&job);
    if (!job.out_of_memory) {
        for (int64_t i = 0; i < n; i++) {
            sum += job.losses[i];
            if (reduction == NONE) out[i] = (float)job.losses[i];
        }
        if (reduction != NONE) *out = (float)(reduction == SUM ? sum : weights == 0 ? NAN : sum / weights);
    }
    free(job.losses);
    free(job.z);
    return job.out_of_memory ? OUT_OF_MEMORY : FINE;
}
