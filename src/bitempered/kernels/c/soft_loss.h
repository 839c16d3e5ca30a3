/* core.loss and its gradient: for soft targets, whose divergence is a sum of small differences, for large weights,
   which magnify rounding, and in float64 for everything. */

#define MAGNIFIED 8 /* a gradient scaled by more than this needs float64: float32 is off by up to 2e-7 */
#define DEEP -100.0f /* log2 of the smallest r that float32 is enough for */

/* The same from q and log y_hat alone. */
INLINE Part_64 part_of(double t1, vd q, vd log_p, vd T, vl inside) {
    vd log_q = pick64(q > 0.0, log_(q), all64(LOG_0)), a = keep64(q > 0.0, exp_((1 - t1) * log_q));
    return part_64(t1, q, log_q, a, keep64(inside, exp_(log_p)), log_p, exp_((1 - t1) * log_p), T, inside, 1);
}

/* The last pass in float64, over all classes except the top and the label; the sum of their parts goes to `loss`. */
INLINE void wide_pass(const Loss *job, Block *b, const int KIND, const int SOFT, const int EXACT) {
    Rows *rows = &b->rows;
    double t1 = job->of.t1, t2 = job->of.t2, s = job->of.s, tau = 1 - t1;
    Lanes log_W, W_power, over_W;
    EACH(l) {
        lanes(rows->gap)[place(&rows->at, rows->top[l], l)] = NAN;
        lanes(rows->gap)[place(&rows->at, b->label[l], l)] = NAN;
    }
    HALVES(h) {
        rows->decay[h] = exp_(-s * rows->m[h]);
        rows->p[h] = exp_(-rows->m[h]);
        b->p_power[h] = exp_((t1 - t2) * rows->m[h]);
        log_W[h] = log_(b->W[h]), W_power[h] = exp_(-tau * log_W[h]), over_W[h] = 1 / b->W[h];
        b->loss[h] = b->e_sum[h] = b->v_sum[h] = all64(0);
    }
    for (int64_t j = 0; j < rows->at.length; j++) HALVES(h) {
        int64_t i = 2 * j + h;
        vd gap = rows->gap[i];
        Ratios64 r = ratios_64(gap, s * rows->decay[h], s, KIND);
        vd log_p = r.log_r - rows->m[h], p = keep64(r.inside, exp_(log_p));
        vd y_power = keep64(r.inside, tau == 0 ? all64(1) : exp_(tau * log_p));
        vd over_w = keep64(r.inside, 1 / r.w), e = p * over_w, T = y_power * rows->decay[h] * over_w;
        vl edge = is_edge(r.w); /* which is inside: 0^0 is 1 */
        if (KIND < 0 && t2 == 0) e = pick64(edge, rows->p[h], e);
        if (t1 == t2) T = pick64(r.inside, T, KIND < 0 ? keep64(edge, all64(1)) : all64(1));
        Part_64 of = {p * y_power * (1 / (2 - t1)), p * T};
        if (SOFT) {
            vd q = keep64(gap == gap, b->z[i] * over_W[h]), a = b->z_power[i] * W_power[h];
            of = part_64(t1, q, b->log_z[i] - log_W[h], a, p, log_p, y_power, T, r.inside, EXACT);
        }
        rows->e_64[i] = e, rows->v_64[i] = of.v;
        b->loss[h] += of.loss, b->e_sum[h] += e, b->v_sum[h] += of.v;
    }
    finish(rows, b->loss, 0), finish(rows, b->e_sum, 0), finish(rows, b->v_sum, 0);
}

/* The same in float32, for t2 >= 1. Next to d = 0 the divergence is a series in d, with terms up to 0.25^n / n!. */
INLINE void soft_pass(const Loss *job, Block *b, const int KIND) {
    Rows *rows = &b->rows;
    double t1 = job->of.t1, t2 = job->of.t2;
    float tau = (float)(1 - t1), over_tau = tau == 0 ? 1 : 1 / tau, over_kappa = (float)(1 / (2 - t1));
    float c3 = tau - 1, c4 = tau * tau - c3, c5 = tau * tau * tau - c4, c6 = tau * tau * tau * tau - c5;
    float kept[LANES], *u = (float *)rows->u;
    EACH(l) kept[l] = u[place(&rows->at, b->label[l], l)];
    EACH(l) u[place(&rows->at, b->label[l], l)] = NAN;
    Factors c = factors(&job->of, rows);
    Lanes minus_m, tops, logs, over;
    HALVES(h) {
        rows->p[h] = exp_(-rows->m[h]);
        b->p_power[h] = exp_((t1 - t2) * rows->m[h]);
        minus_m[h] = -rows->m[h], tops[h] = exp_(-(1 - t1) * rows->m[h]);
        logs[h] = log_(b->W[h]), over[h] = 1 / b->W[h];
        rows->r[h] = b->loss[h] = b->e_sum[h] = b->v_sum[h] = all64(0);
    }
    vf p_top = narrow(rows->p), log_top = narrow(minus_m), y_power_top = narrow(tops), decay = narrow(rows->decay);
    vf log_W = narrow(logs), over_W = narrow(over), lowest = all(0);
    for (int64_t start = 0; start < rows->at.length; start += CHUNK) {
        vf s_r = {0}, s_loss = {0}, s_e = {0}, s_v = {0};
        for (int64_t j = start; j < least(start + CHUNK, rows->at.length); j++) {
            Ratios of = ratios(rows, j, &c, KIND);
            vf y = pick(of.in, of.y, all(0)), r = keep(of.in, exp2_v(y)), over_w = keep(of.in, of.d), p = r * p_top;
            vf y_power = keep(of.in, tau == 0 ? all(1) : exp2_v(tau * y) * y_power_top);
            vf q = keep(of.in, b->z_32[j] * over_W), d = (b->log_z_32[j] - log_W) - (y * 0.693147182f + log_top);
            vf rise = tau == 0 ? d : expm1_v(tau * d) * over_tau;
            vf near = q * d * d * (0.5f + d * (c3 / 6 + d * (c4 / 24 + d * (c5 / 120 + d * (c6 / 720)))));
            vf away = (q * rise - (q - p)) * over_kappa;
            vf e = p * over_w, v = (p - q) * (y_power * decay * over_w);
            lowest = pick(of.y < lowest, of.y, lowest);
            rows->e[j] = e, rows->v[j] = v;
            s_r += r, s_e += e, s_v += v;
            s_loss += y_power * pick((d < 0.25f) & (d > -0.25f), near, away);
        }
        carry(s_r, rows->r), carry(s_loss, b->loss), carry(s_e, b->e_sum), carry(s_v, b->v_sum);
    }
    finish(rows, rows->r, 0), finish(rows, b->loss, 0), finish(rows, b->e_sum, 0), finish(rows, b->v_sum, 0);
    Lanes of_label;
    EACH(l) {
        u[place(&rows->at, b->label[l], l)] = lanes(of_label)[l] = kept[l];
        rows->in_float64 |= lowest[l] < DEEP;
    }
    HALVES(h) rows->r[h] += keep64(of_label[h] == of_label[h], exp_(-psi(of_label[h] * rows->decay[h], job->of.s)));
}

/* Which classes tie with the top, but for the label; and their z. */
INLINE void find_ties(const Loss *job, const Block *b, int64_t j, vl *tied, vd *z) {
    const Rows *rows = &b->rows;
    HALVES(h) {
        tied[h] = (rows->in_float64 ? rows->gap[2 * j + h] : half(&rows->u[j], h)) == 0.0;
        z[h] = !job->soft ? all64(0) : rows->in_float64 ? b->z[2 * j + h] : half(&b->z_32[j], h);
    }
}

/* As shift_ties, after either pass. Classes that tie differ in z alone: v - c e is exactly 0 for the least z. */
static __attribute__((noinline)) void shift_soft_ties(const Loss *job, Block *b, vd *v_top, vd *v_label,
                                                      const vd *e_label, const vl *where) {
    Rows *rows = &b->rows;
    Lanes z_top, z_label, z, low, c, of_z; /* low: the least z */
    vl tied[2], label_ties[2];
    EACH(l) ((float *)rows->u)[place(&rows->at, b->label[l], l)] = NAN;
    HALVES(h) z_top[h] = pick64(b->is_top[h], b->z_label[h], b->z_top[h]), z_label[h] = b->z_label[h];
    if (!rows->in_float64) { /* equal classes have equal z, if these are rounded as z_32 is */
        vf top = narrow(z_top), label = narrow(z_label);
        HALVES(h) z_top[h] = half(&top, h), z_label[h] = half(&label, h);
    }
    HALVES(h) {
        label_ties[h] = b->d[h] == rows->m[h];
        low[h] = pick64(label_ties[h] & (z_label[h] < z_top[h]), z_label[h], z_top[h]);
    }
    for (int64_t j = 0; j < rows->at.length; j++) {
        find_ties(job, b, j, tied, z);
        HALVES(h) low[h] = pick64(tied[h] & (z[h] < low[h]), z[h], low[h]);
    }
    if (rows->at.folded) {
        HALVES(h) z[h] = -low[h];
        low[0] = low[1] = all64(-most_of(lanes(z)));
    }
    HALVES(h) {
        of_z[h] = b->p_power[h] / b->W[h];
        c[h] = keep64(where[h], (rows->p[h] - low[h] / b->W[h]) * b->p_power[h] / rows->p[h]);
        v_top[h] = pick64(where[h], (low[h] - z_top[h]) * of_z[h], v_top[h]);
        vd tied_label = (low[h] - z_label[h]) * of_z[h];
        v_label[h] = pick64(where[h] & label_ties[h], tied_label, v_label[h] - e_label[h] * c[h]);
        b->v_sum[h] = all64(0);
    }
    for (int64_t j = 0; j < rows->at.length; j++) {
        Lanes v;
        find_ties(job, b, j, tied, z);
        HALVES(h) {
            int64_t i = 2 * j + h;
            v[h] = rows->in_float64 ? rows->v_64[i] - rows->e_64[i] * c[h]
                                    : half(&rows->v[j], h) - half(&rows->e[j], h) * c[h];
            v[h] = pick64(tied[h] & where[h], (low[h] - z[h]) * of_z[h], v[h]);
            b->v_sum[h] += v[h];
            if (rows->in_float64) rows->v_64[i] = v[h];
        }
        if (!rows->in_float64) rows->v[j] = narrow(v);
    }
    finish(rows, b->v_sum, 0);
}

/* The losses and gradients from the results of either pass. */
static void conclude_soft(const Loss *job, Block *b) {
    Rows *rows = &b->rows;
    double t1 = job->of.t1;
    Lanes e_factor, top, label, v_top, v_label, e_label;
    vl ties[2], label_ties[2];
    HALVES(h) {
        vl is_top = b->is_top[h], inside = b->d[h] < INFINITY;
        vd p = rows->p[h], q_label = b->z_label[h] / b->W[h], q_top = pick64(is_top, q_label, b->z_top[h] / b->W[h]);
        e_label[h] = keep64(inside, exp_(-b->d[h]) / (1 + b->x[h]));
        if (job->of.t2 == 0) e_label[h] = pick64(is_edge(1 + b->x[h]), p, e_label[h]);
        Part_64 of_top = part_of(t1, q_top, -rows->m[h], b->p_power[h], p > 0.0);
        Part_64 of_label = part_of(t1, q_label, -b->d[h], b->T[h], inside);
        b->loss[h] += of_top.loss + keep64(~is_top, of_label.loss);
        v_top[h] = of_top.v, v_label[h] = of_label.v;
        label_ties[h] = ~is_top & (b->d[h] == rows->m[h]);
    }
    if (!job->gradient.data) return;
    for (int shifted = 0; shifted < 2; shifted++) {
        HALVES(h) {
            vd p = rows->p[h], e_sum = b->e_sum[h] + keep64(~b->is_top[h], e_label[h]);
            vd v_sum = b->v_sum[h] + keep64(~b->is_top[h], v_label[h]), of_top = v_top[h] * e_sum - p * v_sum;
            e_factor[h] = (v_top[h] + v_sum) / (p + e_sum);
            label[h] = (v_label[h] - e_label[h] * e_factor[h]) * b->scale[h];
            top[h] = of_top / (p + e_sum) * b->scale[h];
            ties[h] = (e_sum > 0.9 * p) & (abs64(of_top) < 0.5 * abs64(v_top[h]) * (p + e_sum));
        }
        if (shifted || !any(ties) || !(any(label_ties) || has_ties(rows))) break;
        shift_soft_ties(job, b, v_top, v_label, e_label, ties);
    }
    if (rows->in_float64) {
        for (int64_t i = 0; i < 2 * rows->at.length; i++)
            rows->v_64[i] = (rows->v_64[i] - rows->e_64[i] * e_factor[i % 2]) * b->scale[i % 2];
    } else {
        vf factor = narrow(e_factor), scale = narrow(b->scale);
        for (int64_t j = 0; j < rows->at.length; j++) rows->v[j] = (rows->v[j] - rows->e[j] * factor) * scale;
    }
    for (int l = 0; l < rows->at.used; l++) {
        int64_t at_label = place(&rows->at, b->label[l], l), at_top = place(&rows->at, rows->top[l], l);
        if (rows->in_float64) {
            lanes(rows->v_64)[at_label] = lanes(label)[l], lanes(rows->v_64)[at_top] = lanes(top)[l];
        } else {
            ((float *)rows->v)[at_label] = (float)lanes(label)[l], ((float *)rows->v)[at_top] = (float)lanes(top)[l];
        }
    }
}
