/* The tempered softmax, its logarithm, lambda_t, and the gradient of each in the logits. */

enum { PROBABILITIES, LOGARITHMS, PARTITION };

typedef struct {
    Problem of;
    View out, g, gradient; /* with a gradient, backward: from m, and g of every result */
    double *m, *partition; /* per row; the partition may be null */
    int64_t what, next;
    int out_of_memory;
} Softmax;

static void leave_out_top(Rows *rows, int left_out) {
    EACH(l) lanes(rows->gap)[place(&rows->at, rows->top[l], l)] = left_out ? NAN : 0;
}

/* Probabilities or their logarithms into `v`, and the sum of r. */
INLINE void softmax_pass(const Softmax *job, Rows *rows, const int KIND) {
    double s = job->of.s;
    int logs = job->what == LOGARITHMS;
    HALVES(h) rows->decay[h] = exp_(-s * rows->m[h]), rows->p[h] = exp_(-rows->m[h]), rows->r[h] = all64(0);
    if (rows->in_float64) {
        leave_out_top(rows, 0);
        for (int64_t i = 0; i < 2 * rows->at.length; i++) {
            Ratios64 of = ratios_64(rows->gap[i], s * rows->decay[i % 2], s, KIND);
            vd log_p = of.log_r - rows->m[i % 2];
            rows->v_64[i] = logs ? pick64(of.inside, log_p, all64(-INFINITY)) : keep64(of.inside, exp_(log_p));
        }
        return;
    }
    Factors c = factors(&job->of, rows);
    Lanes log_tops;
    HALVES(h) log_tops[h] = -rows->m[h];
    vf p_top = narrow(rows->p), log_top = narrow(log_tops);
    for (int64_t start = 0; start < rows->at.length; start += CHUNK) {
        vf sum = {0};
        for (int64_t j = start; j < least(start + CHUNK, rows->at.length); j++) {
            Ratios of = ratios(rows, j, &c, KIND);
            vi kept = KIND < 0 ? of.w > 0.0f : rows->u[j] == rows->u[j];
            vf r = keep(of.in, exp2_v(of.y));
            sum += r;
            rows->v[j] = logs ? pick(kept, of.y * 0.693147182f + log_top, all(-INFINITY)) : r * p_top;
        }
        carry(sum, rows->r);
    }
    finish(rows, rows->r, 0);
    vd *tops = logs ? log_tops : rows->p;
    EACH(l) ((float *)rows->v)[place(&rows->at, rows->top[l], l)] = (float)lanes(tops)[l];
}

/* With e = r^t and v = g y_hat^t (of a logarithm g y_hat^s; of lambda_t 0), the gradient is
   v - e (sum v - g_lambda) / sum e. */
INLINE void softmax_backward(const Softmax *job, Rows *rows, const int KIND) {
    double s = job->of.s;
    int logs = job->what == LOGARITHMS, partition = job->what == PARTITION;
    Lanes e_sum = {0}, v_sum = {0}, g_top, g_lambda, share, top;
    HALVES(h) rows->decay[h] = exp_(-s * rows->m[h]), rows->p[h] = exp_(-rows->m[h]);
    EACH(l) {
        double g = number_at(&job->g, &rows->at, rows->top[l], l);
        lanes(g_top)[l] = partition ? 0 : g, lanes(g_lambda)[l] = partition ? g : 0;
    }
    if (rows->in_float64) {
        fetch_64(&job->g, &rows->at, rows->v_64, 0);
        for (int64_t i = 0; i < 2 * rows->at.length; i++) {
            int h = i % 2;
            Ratios64 of = ratios_64(rows->gap[i], s * rows->decay[h], s, KIND);
            vd r = keep64(of.inside, exp_(of.log_r)), over_w = keep64(of.inside, 1 / of.w), e = r * over_w;
            vd v = rows->v_64[i] * rows->decay[h] * (logs ? over_w : e * rows->p[h]);
            v = keep64(of.inside & ~(vl)(partition ? (vl){0} - 1 : (vl){0}), v);
            rows->e_64[i] = e, rows->v_64[i] = v;
            e_sum[h] += e, v_sum[h] += v;
        }
    } else {
        Factors c = factors(&job->of, rows);
        vf p_top = narrow(rows->p), decay = narrow(rows->decay);
        fetch(&job->g, &rows->at, rows->v, 0);
        for (int64_t start = 0; start < rows->at.length; start += CHUNK) {
            vf s_e = {0}, s_v = {0};
            for (int64_t j = start; j < least(start + CHUNK, rows->at.length); j++) {
                Ratios of = ratios(rows, j, &c, KIND);
                vi kept = KIND < 0 ? of.w > 2e-38f : rows->u[j] == rows->u[j];  // d is infinite below
                vf over_w = keep(kept, of.d), e = keep(of.in, exp2_v(of.y)) * over_w;
                vf v = keep(kept, rows->v[j] * decay * (logs ? over_w : e * p_top));
                v = partition ? all(0) : v;
                rows->e[j] = e, rows->v[j] = v;
                s_e += e, s_v += v;
            }
            carry(s_e, e_sum), carry(s_v, v_sum);
        }
    }
    finish(rows, e_sum, 0), finish(rows, v_sum, 0);
    HALVES(h) {
        vd v_top = g_top[h] * rows->decay[h] * (logs ? all64(1) : rows->p[h]);
        share[h] = (v_top + v_sum[h] - g_lambda[h]) / (1 + e_sum[h]);
        top[h] = (v_top * e_sum[h] - v_sum[h] + g_lambda[h]) / (1 + e_sum[h]);
    }
    vf share_32 = narrow(share);
    for (int64_t j = 0; j < rows->at.length; j++) {
        if (!rows->in_float64) rows->v[j] -= rows->e[j] * share_32;
        else HALVES(h) rows->v_64[2 * j + h] -= rows->e_64[2 * j + h] * share[h];
    }
    EACH(l) {
        int64_t at = place(&rows->at, rows->top[l], l);
        if (rows->in_float64) lanes(rows->v_64)[at] = lanes(top)[l];
        else ((float *)rows->v)[at] = (float)lanes(top)[l];
    }
}

#define SOFTMAX_FOR_KIND(name, KIND)                                               \
    static __attribute__((noinline)) void name(const Softmax *job, Rows *rows) {   \
        if (job->gradient.data) {                                                  \
            softmax_backward(job, rows, KIND);                                     \
            return;                                                                \
        }                                                                          \
        solve(&job->of, rows, KIND);                                               \
        if (rows->in_float64) solve_64(&job->of, rows, KIND);                      \
        softmax_pass(job, rows, KIND);                                             \
    }
SOFTMAX_FOR_KIND(softmax_below_1, -1)
SOFTMAX_FOR_KIND(softmax_at_1, 0)
SOFTMAX_FOR_KIND(softmax_above_1, 1)

static void softmax_block(const Softmax *job, int64_t first, Rows *rows) {
    const Problem *of = &job->of;
    Lanes one = {all64(1), all64(1)}, lambda;
    vl nothing[2] = {{0}};
    go_to(of, &rows->at, first);
    rows->in_float64 = 0;
    load(of, rows);
    if (rows->in_float64) {
        if (!is_64(of)) gaps_64(of, rows, 0);
        leave_out_top(rows, 1);
    }
    if (job->gradient.data) EACH(l) lanes(rows->m)[l] = job->m[row_of(&rows->at, first, l)];
    for (int attempt = 0; attempt < 3; attempt++) { /* once, unless rounding misled it */
        of->s < 0 ? softmax_below_1(job, rows) : of->s > 0 ? softmax_above_1(job, rows) : softmax_at_1(job, rows);
        if (job->gradient.data || rows->in_float64) break;
        Lanes off;
        HALVES(h) off[h] = abs64((1 + rows->r[h]) * rows->p[h] - 1);
        if (largest(off) < 1e-6) break;
    }
    if (job->gradient.data) {
        put(&job->gradient, rows, one, nothing);
        return;
    }
    HALVES(h) lambda[h] = pick64(rows->bad[h], all64(NAN), rows->max[h] + phi(rows->m[h], of->s));
    for (int l = 0; l < rows->at.used; l++) {
        job->m[first + l] = lanes(rows->m)[l];
        if (job->partition) job->partition[first + l] = lanes(lambda)[l];
    }
    if (job->out.data) put(&job->out, rows, one, nothing);
}

static void work_softmax(void *data) {
    Softmax *job = data;
    const Problem *of = &job->of;
    int folded = is_folded(of);
    Rows rows = {.at = {.folded = folded, .length = block_length(of), .k = of->k}};
    int64_t grain = grain_of(of);
    vf *memory = aligned_alloc(sizeof(vf), (size_t)(SIZE_OF_ROWS * rows.at.length) * sizeof(vf));
    if (!memory) {
        __atomic_store_n(&job->out_of_memory, 1, __ATOMIC_RELAXED);
        return;
    }
    use_memory(&rows, memory);
    for (int64_t i; (i = __atomic_fetch_add(&job->next, grain, __ATOMIC_RELAXED)) < of->n;)
        for (int64_t row = i; row < least(i + grain, of->n); row += folded ? 1 : LANES) softmax_block(job, row, &rows);
    free(memory);
}
