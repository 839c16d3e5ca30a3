/* core.label_loss and its gradient in float32. */

/* The last pass: e = r^t2, v = y_hat^(1 + t2 - t1) scaled, and the sums of Block, h = r^(2 - t1). */
INLINE void label_pass(const Loss *job, Block *b, const int KIND, const int GRADIENT) {
    Rows *rows = &b->rows;
    double t1 = job->of.t1, t2 = job->of.t2;
    Lanes of_v;
    Factors c = factors(&job->of, rows);
    HALVES(i) {
        rows->p[i] = exp_(-rows->m[i]);
        b->p_power[i] = exp_((t1 - t2) * rows->m[i]);
        of_v[i] = rows->p[i] * b->p_power[i] * b->scale[i];
        rows->r[i] = b->h[i] = b->e_sum[i] = b->v_sum[i] = all64(0);
    }
    vf v_factor = narrow(of_v);
    vi near = {0};
    float h_power = (float)(2 - t1);
    for (int64_t start = 0; start < rows->at.length; start += CHUNK) {
        vf s_r = {0}, s_h = {0}, s_e = {0}, s_v = {0};
        for (int64_t j = start; j < least(start + CHUNK, rows->at.length); j++) {
            Ratios of = ratios(rows, j, &c, KIND);
            vf y = of.y, r = keep(of.in, exp2_v(y)), d = keep(of.in, of.d);
            vi some = y * h_power > -126.0f; /* not only where r is not 0: 2 - t1 may be small */
            vf h = keep(KIND < 0 ? some & (of.w > 0.0f) : some, exp2_v(y * h_power));
            s_r += r, s_h += h;
            if (!GRADIENT) continue;
            vf e = r * d, v = h * d * v_factor;
            if (KIND < 0 && t2 - t1 < 1 - t2) near |= (of.w < NEAR_EDGE) & (of.w > -NEAR_EDGE);
            rows->e[j] = e, rows->v[j] = v;
            s_e += e, s_v += v;
        }
        carry(s_r, rows->r), carry(s_h, b->h);
        if (GRADIENT) carry(s_e, b->e_sum), carry(s_v, b->v_sum);
    }
    finish(rows, rows->r, 0), finish(rows, b->h, 0), finish(rows, b->e_sum, 0), finish(rows, b->v_sum, 0);
    EACH(l) rows->in_float64 |= near[l] != 0;
}

/* Whether a class other than the top has the top's logit. */
static __attribute__((noinline)) int has_ties(const Rows *rows) {
    vi found = {0};
    vl found_64[2] = {{0}};
    if (rows->in_float64)
        for (int64_t i = 0; i < 2 * rows->at.length; i++) found_64[i % 2] |= rows->gap[i] == 0.0;
    else
        for (int64_t j = 0; j < rows->at.length; j++) found |= rows->u[j] == 0.0f;
    EACH(l) ((int64_t *)found_64)[l] |= found[l];
    return any(found_64);
}

/* Classes that tie with the top may share nearly all of e with it. Their gradient is then a small difference of v and
   e sum v / sum e. As in core.gradient, v - c e takes the place of v, `where` the gradient of the top is small beside
   its v: without the label's part it is exactly 0 for these classes. */
static __attribute__((noinline)) void shift_ties(Block *b, vd *v_top, const vl *where) {
    Rows *rows = &b->rows;
    Lanes c;
    HALVES(h) {
        c[h] = keep64(where[h], v_top[h]); /* their v, bit by bit: a top that is the label has v < 0, and no shift */
        v_top[h] -= c[h], b->v_sum[h] = all64(0);
    }
    vf shift = narrow(c);
    for (int64_t start = 0; start < rows->at.length; start += CHUNK) {
        vf s_v = {0};
        for (int64_t j = start; j < least(start + CHUNK, rows->at.length); j++) {
            rows->v[j] -= rows->e[j] * shift;
            s_v += rows->v[j];
        }
        carry(s_v, b->v_sum);
    }
    finish(rows, b->v_sum, 0);
}

static void conclude_label(const Loss *job, Block *b) {
    Rows *rows = &b->rows;
    float *gradient = (float *)rows->v;
    double t1 = job->of.t1;
    Lanes e_factor, v_top, top, label;
    vl ties[2];
    HALVES(h) {
        vd d = b->d[h], of_label = expm1_((t1 - 2) * d); /* y_hat^(2 - t1), of the label less 1 */
        vd of_top = exp_((t1 - 2) * rows->m[h]);
        vd others = b->h[h] * of_top + keep64(~b->is_top[h], of_top - 1 - of_label);
        b->loss[h] = phi(d, t1 - 1) + (of_label + others) / (2 - t1);
    }
    if (!job->gradient.data) return;
    HALVES(h) {
        v_top[h] = (rows->p[h] - keep64(b->is_top[h], all64(1))) * b->p_power[h] * b->scale[h];
        label[h] = keep64(~b->is_top[h], b->T[h] * b->scale[h]);
    }
    for (int shifted = 0; shifted < 2; shifted++) {
        HALVES(h) {
            vd v_sum = b->v_sum[h] - label[h], e_sum = b->e_sum[h];
            e_factor[h] = (v_top[h] + v_sum) / (1 + e_sum);
            top[h] = (v_top[h] * e_sum - v_sum) / (1 + e_sum);
            ties[h] = (e_sum > 0.9) & (abs64(top[h]) < 0.5 * v_top[h]);
        }
        if (shifted || !any(ties) || !has_ties(rows)) break;
        shift_ties(b, v_top, ties);
    }
    vf factor = narrow(e_factor);
    for (int64_t j = 0; j < rows->at.length; j++) rows->v[j] -= rows->e[j] * factor;
    for (int l = 0; l < rows->at.used; l++) {
        gradient[place(&rows->at, b->label[l], l)] -= (float)lanes(label)[l];
        gradient[place(&rows->at, rows->top[l], l)] = (float)lanes(top)[l];
    }
}
