/* core.normalizer: m, such that the probabilities e^(-m) r sum to 1.

   Float32 finds it to about 1e-7. Where that is not enough it is continued in float64, by the functions named _64. */

typedef struct { /* s e^(-s m), and its rounding error; log2(e) / -s */
    vf high, minus_high, low, to_log2;
} Factors;

INLINE Factors factors(const Problem *of, Rows *rows) {
    Lanes high, low;
    double s = of->s;
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

typedef struct {
    Lanes r, r_t, r_2t;
} Powers;

INLINE void sum_powers(const Problem *of, Rows *rows, Powers *sums, const int KIND) {
    Factors c = factors(of, rows);
    memset(sums, 0, sizeof *sums);
    for (int64_t start = 0; start < rows->at.length; start += CHUNK) {
        vf s1 = {0}, s2 = {0}, s3 = {0};
        for (int64_t j = start; j < least(start + CHUNK, rows->at.length); j++) {
            Ratios at = ratios(rows, j, &c, KIND);
            vf r = keep(at.in, exp2_v(at.y)), d = keep(at.in, at.d);
            s1 += r, s2 += r * d, s3 += r * d * d;
        }
        carry(s1, sums->r), carry(s2, sums->r_t), carry(s3, sums->r_2t);
    }
    finish(rows, sums->r, 1), finish(rows, sums->r_t, 1), finish(rows, sums->r_2t, 1);
}

/* Halley's method, whose third sum costs two multiplications. It may overshoot, so we fall back to
   the Newton step from a lower bound, which is a lower bound too. With h, half the curvature times the Newton step, the
   error after a step is of the order of h change^2. If the support is finite (s < 0) classes may have entered it, and
   only a small change shows that m has settled. */
INLINE void solve(const Problem *of, Rows *rows, const int KIND) {
    double t = of->t2, s = of->s;
    Lanes bound = {0}, left;
    for (int step = 0; step < 30; step++) {
        Powers sums;
        sum_powers(of, rows, &sums, KIND);
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

typedef struct { /* as Ratios, in float64 */
    vd w, log_r;
    vl inside;
} Ratios64;

/* At the edge of a support w is 0. The gradient has a factor y_hat^(t2-t1), that is w^((t2-t1)/(1-t2)): it jumps there
   for t1 = t2, and has an infinite slope if the exponent is below 1. So the side on which a class lies matters. In
   float32 m is too inexact to tell for a w as small as NEAR_EDGE. In float64 rounding leaves up to 4e-15 of a w that is
   0, as tried for 65,536 classes: what is outside by no more than ON_EDGE is taken for an edge, which is inside. */
#define NEAR_EDGE 1e-5f
#define ON_EDGE 8e-15
INLINE vl is_edge(vd w) { return (w <= 0.0) & (w > -ON_EDGE); }

INLINE Ratios64 ratios_64(vd gap, vd factor, double s, const int KIND) {
    vd x = gap * factor, w = 1 + x, log_r = KIND ? log1p_product(gap, factor) * (-1 / s) : -gap;
    return (Ratios64){KIND ? w : all64(1), log_r, KIND < 0 ? w > 0.0 : gap < INFINITY};
}

/* Continue from float32, which is close: by Halley's method, or by Newton's where the curvature h is not small. */
INLINE void solve_64(const Problem *of, Rows *rows, const int KIND) {
    double t = of->t2, s = of->s, enough = is_64(of) ? 1e-16 : 1e-12;
    for (int step = 0; step < 30; step++) {
        Lanes factor, r = {0}, r_t = {0}, r_2t = {0}, left;
        HALVES(i) factor[i] = s * exp_(-s * rows->m[i]);
        for (int64_t j = 0; j < rows->at.length; j++) HALVES(i) {
            Ratios64 at = ratios_64(rows->gap[2 * j + i], factor[i], s, KIND);
            vd ratio = keep64(at.inside, exp_(at.log_r));
            r[i] += ratio;
            if (!KIND) continue;
            vd over_w = keep64(at.inside, 1 / at.w);
            r_t[i] += ratio * over_w, r_2t[i] += ratio * over_w * over_w;
        }
        finish(rows, r, 0), finish(rows, r_t, 0), finish(rows, r_2t, 1);
        HALVES(i) {
            vd before = rows->m[i], log_z = log1p_(r[i]) - before, m = before + log_z, h = all64(0);
            if (KIND) {
                vd over = 1 / (1 + r_t[i]), excess = (r[i] - r_t[i]) * over;
                if (KIND > 0) h = 0.5 * t / s * expm1_(s * log_z) * (1 - (1 + r[i]) * over * r_2t[i] * over);
                h = keep64(abs64(h) < 0.01, h);
                m += log1p_((excess - h) / (1 + h) * -expm1_(-s * log_z)) / s;
            }
            rows->m[i] = keep64(m > 0.0, m);
            vd change = abs64(rows->m[i] - before), curvature = pick64(h == 0.0, all64(1 + t), abs64(h));
            left[i] = KIND == 0 ? all64(0) : KIND > 0 ? curvature * change * change : 1e-4 * change;
        }
        if (largest(left) < enough) return;
    }
}
